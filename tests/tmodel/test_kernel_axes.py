"""Which ops a model is said to call, and at which sizes: all of them, worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tmodel.conftest import CONFIG, WriteCheckpoint
from tests.tmodel.formats.by_hand import Kind, settings
from tests.tmodel.formats.models import SHAPE
from tkernels.ops.served_models import SERVED_MODELS
from tmodel import Limits, kernel_axes, load_config
from tmodel.formats import GPTQ, parse_format
from tmodel.loading import parse_config
from tmodel.quantization import LinearShape, Quantization
from tmodel.random_weights import RANDOM_PRESETS, random_config

LIMITS = Limits(max_num_tokens=64, max_num_seqs=4, max_model_len=60, block_size=8, num_blocks=32)
TOKENS = (1, 64)
POOL = {"P": 32, "S": 8}
NO_SCALES = {"k_scale": False, "v_scale": False}
STEP_INPUTS = {"R": 4, "B": (0, 4), "T": (0, 64), "N": (1, 8), "page_size": 8}  # 60 tokens are 8 blocks of 8


def of_logits(vocab_size: int) -> dict[str, Any]:
    """What an engine takes tokens of, and scores."""
    logits = {"V": vocab_size, "score": "float32"}
    return {
        "sample": {**logits, "B": (0, 4), "R": (1, 8)},
        "logprobs": {**logits, "B": (0, 64), "top": (0, vocab_size)},
    }


GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "vocab_size": 97, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 160,
    "eos_token_id": None,
}  # fmt: skip


def attention(heads: dict[str, int], window: tuple[int, int]) -> dict[str, Any]:
    """What both kernels of attention are asked for; `heads` are Hq and Hkv, all of 16 dims."""
    axes = {
        **heads, "D": 16, "Dv": 16, "B": (1, 4), **POOL, "N": (1, 8), "window": window, "return_lse": False,
        "sinks": False, **NO_SCALES,
    }  # fmt: skip
    return {"paged_decode": axes, "paged_prefill": {**axes, "T": TOKENS, "causal": True}}


def test_those_of_a_qwen3_whose_layers_differ() -> None:
    windows = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    config = parse_config({**CONFIG, **windows, "attention_bias": True})
    heads = {"Hq": 4, "Hkv": 2}
    assert kernel_axes(config, LIMITS) == {
        # q, k and v are 128 outputs of 16 inputs with a bias, o 16 of 64 with one, the head 40 of 16 without.
        "matmul": {"M": TOKENS, "N": (16, 128), "K": (16, 64), "bias": (False, True)},
        "gate_up_swiglu": {"T": TOKENS, "H": 16, "I": 24},
        "rms_norm": {"T": TOKENS, "H": 16},
        "add_rms_norm": {"T": TOKENS, "H": 16},
        "qk_norm_rope_scatter": {
            **heads, "D": 16, "Dv": 16, "T": TOKENS, "R": 16, "L": 60, **POOL, "q_weight": True, "k_weight": True,
            "interleaved": False, **NO_SCALES,
        },
        **attention(heads, (0, 7)),
        "copy_pages": {"pairs": (0, 32), "C": 4, **POOL, "Hkv": 2, "D": 16},
        "step_inputs": STEP_INPUTS,
        **of_logits(40),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("activation", "tanh"), [("gelu_new", True), ("gelu_fast", True), ("gelu_pytorch_tanh", True), ("gelu", False)]
)
def test_those_of_a_gpt2(activation: str, tanh: bool) -> None:
    heads = {"Hq": 4, "Hkv": 4}
    config = parse_config({**GPT2, "activation_function": activation})
    assert kernel_axes(config, LIMITS) == {
        # c_attn has 192 outputs of 64 inputs, c_proj 64 of 64 and of 160, the tied head 97 of 64 and no bias.
        "matmul": {"M": TOKENS, "N": (64, 192), "K": (64, 160), "bias": (False, True)},
        "matmul_gelu": {"T": TOKENS, "I": 160, "H": 64, "bias": True, "tanh": tanh},
        "layer_norm": {"T": TOKENS, "H": 64},
        "add_layer_norm": {"T": TOKENS, "H": 64},
        "kv_scatter": {"T": TOKENS, "Hkv": 4, "D": 16, "Dv": 16, **POOL, **NO_SCALES},
        **attention(heads, (0, 0)),
        "copy_pages": {"pairs": (0, 32), "C": 6, **POOL, "Hkv": 4, "D": 16},
        "step_inputs": STEP_INPUTS,
        **of_logits(97),
    }


def test_those_of_a_quantized_model_beside_its_dense_head(write_checkpoint: WriteCheckpoint) -> None:
    quantization = settings(Kind("gptq", 4, 32))
    axes = kernel_axes(load_config(write_checkpoint({}, **SHAPE, quantization_config=quantization)), LIMITS)
    same = {
        "M": TOKENS, "bias": False, "padding": 0, "bits": 4, "coding": "uniform", "group_size": 32,
        "symmetric": (False, True), "permuted": False, "sparse": False,
    }  # fmt: skip
    # Of 128 inputs: q is 128 outputs and k and v 64 each, gate and up 256 each, o 128. Of 256 inputs: down.
    wide, deep = {**same, "N": (64, 512), "K": 128}, {**same, "N": (128, 128), "K": 256}
    assert axes["dequant_gemm"] == (wide, deep)
    assert axes["swiglu"] == {"T": TOKENS, "I": 256}
    assert axes["matmul"] == {"M": TOKENS, "N": 40, "K": 128, "bias": False}
    assert "gate_up_swiglu" not in axes


@pytest.mark.parametrize(("activation", "tanh"), [("gelu_new", True), ("gelu", False)])
def test_the_gelu_of_a_quantized_gpt2_is_called_after_its_projection(
    activation: str, tanh: bool, tmp_path: Path
) -> None:
    fields = {**GPT2, "activation_function": activation, "quantization_config": settings(Kind("gptq", 4, 32))}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    axes = kernel_axes(load_config(tmp_path), LIMITS)
    assert axes["gelu"] == {"T": TOKENS, "I": 160, "tanh": tanh}
    assert "matmul_gelu" not in axes


PARTS = LinearShape(("a.q_proj", "a.k_proj", "a.v_proj"), (256, 64, 64), 128)


def test_parts_of_a_layer_are_called_by_the_last_words_of_their_names() -> None:
    assert PARTS.title(0, 3) == "q_proj+k_proj+v_proj"
    assert PARTS.title(1, 2) == "k_proj"


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        # An int16 zero-point for each output and 32 inputs, or for each output.
        (GPTQ(bits=4, group_size=32), 2 * 384 * 4),
        (GPTQ(bits=4, group_size=-1), 2 * 384),
        (parse_format({"quant_method": "squeezellm", "wbits": 4}), 0),
        # A float32 scale for each block of 128 x 128, of which 64 outputs begin one of their own.
        (
            parse_format(
                {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
                 "modules_to_not_convert": ["v_proj"]}
            ),
            4 * (2 + 1),
        ),
    ],
)  # fmt: skip
def test_bytes_that_a_quantized_layer_takes_beyond_its_file(quantization: Any, expected: int) -> None:
    assert Quantization(quantization, (PARTS,)).added_bytes == expected


@pytest.mark.parametrize("model", SERVED_MODELS)
def test_the_products_that_are_timed_for_a_served_model_are_its_own(model: str) -> None:
    # Qwen3-8B's published config.json differs from Qwen3-4B's in these, and in a head of its own.
    larger = {"Qwen3-8B": {**RANDOM_PRESETS["Qwen3-4B"], "hidden_size": 4096, "intermediate_size": 12288}}
    config = random_config({**RANDOM_PRESETS, **larger}[model])
    products = {(sum(shape.outputs), shape.inputs) for shape in config.linears()}
    head = config.tensors()["model.embed_tokens.weight"]
    assert products | {head} == set(SERVED_MODELS[model].linears.values())
