"""Tiny models with random weights, and kernels for the Qwen3 among them that compute every row alone."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

import tkernels
import tmodel
from tkernels.ops.add_rms_norm import contract as add_rms_norm
from tkernels.ops.gate_up_swiglu import contract as gate_up_swiglu
from tkernels.ops.matmul import contract as matmul
from tkernels.ops.qk_norm_rope_scatter import contract as qk_norm_rope_scatter
from tkernels.ops.rms_norm import contract as rms_norm
from tkernels.ranges import NVTX
from tmodel.transformers_models import new_transformers_model

# The weights are wide enough that greedy tokens vary and no two logits are near.
SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}


QWEN3 = "Qwen3ForCausalLM"
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    QWEN3: {},
    "LlamaForCausalLM": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "attention_bias": True,
        "mlp_bias": True,
    },
    "MistralForCausalLM": {"sliding_window": 9},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "GPT2LMHeadModel": {"num_attention_heads": 2, "scale_attn_by_inverse_layer_idx": True},
    "Qwen3MoeForCausalLM": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
        "num_hidden_layers": 3, "mlp_only_layers": [1],
    },
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    "GptOssForCausalLM": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 9, "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "OlmoeForCausalLM": {
        "num_experts": 16, "num_experts_per_tok": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    },
}  # fmt: skip
"""What each has beside SHAPE."""


def save_random_model(directory: Path, architecture: str = QWEN3, **changes: Any) -> None:
    """Saves a model of SHAPE, `changes` of it aside."""
    # Late: it takes seconds, and the kernels are of use without it.
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    shape = {**SHAPE, **ARCHITECTURES[architecture], **changes}
    model = new_transformers_model({"architectures": [architecture], **shape})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # they begin as zeros
                parameter.normal_(std=0.3)
    model.save_pretrained(directory)


@cache
def random_model(kind: str, architecture: str = QWEN3) -> tuple[tmodel.ModelConfig, tmodel.Model]:
    """The model as "float64" (torch's kernels in that dtype), "shared" (the same, and prefixes are read together) or,
    a Qwen3, as "rowwise" (float32, every row alone).
    """
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(Path(folder), architecture)
        config = tmodel.load_config(folder)
        dtype = torch.float32 if kind == "rowwise" else torch.float64
        if kind != "rowwise":
            limits = tmodel.Limits(
                max_num_tokens=128, max_num_seqs=16, max_model_len=128, block_size=16, num_blocks=16,
                shared_prefixes=kind == "shared",
            )  # fmt: skip
            axes = tmodel.kernel_axes(config, limits)
            choices = {"cascade_decode": "composed"} if kind == "shared" else {}
            kernels = tkernels.select(choices, device="cpu", dtype=dtype, axes=axes)
        else:
            kernels = rowwise_kernels()
        return config, tmodel.load_model(folder, config, kernels, device="cpu", dtype=dtype)


def rowwise_kernels() -> tkernels.KernelSet:
    """Kernels whose every row is one call of its own on memory of its own, so its bits cannot depend on its company:
    not by the shape that a library picks its algorithm by, nor by where the row lies.
    """
    return cast(
        "tkernels.KernelSet",
        SimpleNamespace(
            matmul=_each_row(matmul.baseline),
            rms_norm=_each_row(rms_norm.baseline),
            gate_up_swiglu=_each_row(gate_up_swiglu.baseline),
            add_rms_norm=_add_rms_norm,
            qk_norm_rope_scatter=_qk_norm_rope_scatter,
            paged_decode=_paged_decode,
            paged_prefill=_paged_prefill,
            greatest=lambda op, axis: SHAPE["max_position_embeddings"],
            ranges=NVTX,
        ),
    )


def _each_row(function: Any) -> Any:
    def rows(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        return torch.cat([function(row.clone(), *rest, **options) for row in x.split(1)])

    return rows


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [
        add_rms_norm.baseline(one.clone(), other.clone(), weight, eps)
        for one, other in zip(x.split(1), residual.split(1), strict=True)
    ]
    return torch.cat([out for out, _ in rows]), torch.cat([total for _, total in rows])


def _qk_norm_rope_scatter(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, **options: Any,
) -> None:  # fmt: skip
    for i in range(q.shape[0]):
        row = slice(i, i + 1)
        alone = q[row].clone()
        qk_norm_rope_scatter.reference(
            alone, k[row].clone(), v[row].clone(), cos, sin, positions[row], k_cache, v_cache, slots[row], **options
        )
        q[row] = alone


def _attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, context: int, scale: float
) -> torch.Tensor:
    """q [Hq, D] over the first `context` cached tokens of `table` [N] -> [Hq, Dv]."""
    pages = table[: -(-context // k_cache.shape[1])].long()
    k = k_cache[pages].flatten(0, 1)[:context].clone()  # [context, Hkv, D]
    v = v_cache[pages].flatten(0, 1)[:context].clone()
    group = q.shape[0] // k.shape[1]
    scores = (q.clone().unflatten(0, (-1, group)) @ k.permute(1, 2, 0)) * scale  # [Hkv, G, context]
    return (scores.softmax(dim=-1) @ v.transpose(0, 1)).flatten(0, 1)


def _paged_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
    context_lens: torch.Tensor, scale: float, **_: Any,
) -> torch.Tensor:  # fmt: skip
    rows = [
        _attend(q[i], k_cache, v_cache, block_tables[i], context, scale)
        for i, context in enumerate(context_lens.tolist())
    ]
    return torch.stack(rows) if rows else torch.empty_like(q)


def _paged_prefill(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor, scale: float, **_: Any,
) -> torch.Tensor:  # fmt: skip
    starts = cu_seqlens_q.tolist()
    rows = [
        _attend(q[i], k_cache, v_cache, block_tables[sequence], context - (end - 1 - i), scale)
        for sequence, (start, end, context) in enumerate(zip(starts, starts[1:], context_lens.tolist(), strict=False))
        for i in range(start, end)
    ]
    return torch.stack([*rows, *torch.zeros_like(q[len(rows) :])])  # padding comes last
