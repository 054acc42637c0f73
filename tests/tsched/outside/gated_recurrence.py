"""A gated linear recurrence, as a user adds it: layers that keep a state for each sequence, alone or beside attention.

    S_t = a_t S_(t-1) + k_t v_t',   y_t = S_t' q_t / sqrt(D)

per head, with a decay a_t in (0, 1) that follows from the token. Source: Yang et al., Gated Linear Attention, 2023.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from tkernels import KernelSet
from tmodel import Pages, UnitPart
from tmodel.batch import Batch, KVCache
from tmodel.config import Architecture, Axes, Limits, ModelConfig
from tmodel.decoders.attention import GroupedQueryAttention
from tmodel.fields import HuggingFaceConfig
from tmodel.kernel_axes import attention_axes, linear_axes, rms_norm_axes, rotary_axes
from tmodel.layers import PagedAttention, count_weight_bytes
from tmodel.linear_reader import LinearReader
from tmodel.quantization import Feed, LinearShape
from tmodel.rotary import Rope, RopeParameters
from tmodel.weights import Checkpoint


class RecurrenceConfig(HuggingFaceConfig):
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    attention_every: NonNegativeInt = 0  # every so manieth layer attends; 0: none does
    max_position_embeddings: PositiveInt = 2048
    rms_norm_eps: PositiveFloat = 1e-6


@dataclass(frozen=True)
class MatrixState:
    layers: tuple[int, ...]
    num_heads: int
    head_dim: int
    state_interval: int | None = 2  # blocks between two matrices that are kept for later prefixes
    window: int | None = None

    def parts(self, block_size: int, dtype: torch.dtype) -> tuple[UnitPart, ...]:
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        return (UnitPart(1, (self.num_heads, self.head_dim, self.head_dim), kept),)


def attends(fields: RecurrenceConfig, layer: int) -> bool:
    return fields.attention_every > 0 and (layer + 1) % fields.attention_every == 0


def resolve(fields: RecurrenceConfig, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    count, heads = fields.num_hidden_layers, fields.num_attention_heads
    head_dim = fields.hidden_size // heads
    layers = {kind: tuple(i for i in range(count) if attends(fields, i) == kind) for kind in (False, True)}
    pages = (Pages(layers[True], heads, head_dim),) if layers[True] else ()
    return ModelConfig(
        architecture=ARCHITECTURE, fields=fields, num_layers=count, num_heads=heads, num_kv_heads=heads,
        head_dim=head_dim, windows=(None,) * count, max_position_embeddings=fields.max_position_embeddings,
        eos_token_ids=eos_token_ids, dtype=fields.resolved_dtype(),
        cache_kinds=(MatrixState(layers[False], heads, head_dim), *pages),
    )  # fmt: skip


def attention(config: ModelConfig) -> GroupedQueryAttention:
    heads, dim = config.num_heads, config.head_dim
    return GroupedQueryAttention(
        config.fields.hidden_size, heads, heads, dim, Rope(dim, RopeParameters(rope_theta=10000.0))
    )


def layer_linears(config: ModelConfig, layer: int) -> list[LinearShape]:
    hidden, name = config.fields.hidden_size, f"model.layers.{layer}.mixer"
    if attends(config.fields, layer):
        return list(attention(config).linears(name, Feed(name)))
    joint = tuple(f"{name}.{part}_proj" for part in ("q", "k", "v", "decay"))
    output = LinearShape((f"{name}.o_proj",), (hidden,), hidden)
    return [LinearShape(joint, (hidden, hidden, hidden, config.num_heads), hidden), output]


def linears(config: ModelConfig) -> list[LinearShape]:
    head = LinearShape(("lm_head",), (config.vocab_size,), config.fields.hidden_size)
    return [*(shape for layer in range(config.num_layers) for shape in layer_linears(config, layer)), head]


def around(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    names = [*(f"model.layers.{layer}.norm.weight" for layer in range(config.num_layers)), "model.norm.weight"]
    hidden = config.fields.hidden_size
    return {"model.embed_tokens.weight": (config.vocab_size, hidden)} | dict.fromkeys(names, (hidden,))


def tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return around(config) | {name: size for shape in linears(config) for name, size in shape.tensors().items()}


def axes(config: ModelConfig, limits: Limits) -> Axes:
    own = {**linear_axes(linears(config), None, limits), **rms_norm_axes(config.fields.hidden_size, limits)}
    return {**own, **rotary_axes(config, limits, config.head_dim, head_norms=False), **attention_axes(config, limits)}


def recur(q: Any, k: Any, v: Any, decay: Any, batch: Batch, states: torch.Tensor) -> torch.Tensor:
    """q, k, v [T, heads, D], decay [T, heads] -> [T, heads, D]; states [slots, heads, D, D] are read and written."""
    read, written = batch.state_slots
    state = torch.where((read < 0)[:, None, None, None], 0.0, states[read.clamp_min(0)])  # [B, heads, D, D]
    ends = [*range(1, batch.num_decodes + 1), *(batch.num_decodes + batch.cu_seqlens_q[1:]).tolist()]
    out = torch.zeros_like(v)
    for row, (start, end) in enumerate(pairwise([0, *ends])):
        for t in range(start, end):
            state[row] = decay[t, :, None, None] * state[row] + k[t, :, :, None] * v[t, :, None, :]
            out[t] = torch.einsum("hd,hde->he", q[t], state[row].to(q.dtype)) * q.shape[-1] ** -0.5
    states[written] = state
    return out


class Recurrence:
    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, kernels: KernelSet) -> None:
        self.config, self.kernels = config, kernels
        reader = LinearReader(checkpoint, kernels, config.quantization)
        self.embedding, *self.norms = (checkpoint.tensor(*one) for one in around(config).items())
        self.layers = [
            attention(config).build(name, Feed(name), checkpoint, reader) if attends(config.fields, layer)
            else [reader.linear(shape) for shape in layer_linears(config, layer)]
            for layer, name in enumerate(f"model.layers.{layer}.mixer" for layer in range(config.num_layers))
        ]  # fmt: skip
        self.head = reader.linear(linears(config)[-1])
        lengths = config.max_position_embeddings, kernels.greatest("qk_norm_rope_scatter", "L")
        self.rotation = attention(config).rope.tables(*lengths, dtype=checkpoint.dtype, device=checkpoint.device)
        self.prepare_report = reader.report

    @property
    def weight_bytes(self) -> int:
        return count_weight_bytes([self.embedding, self.norms, self.layers, self.head])

    @torch.inference_mode()
    def __call__(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        heads, dim, eps = self.config.num_heads, self.config.head_dim, self.config.fields.rms_norm_eps
        step = PagedAttention(self.kernels, batch, dim**-0.5)
        hidden = self.embedding.index_select(0, batch.token_ids)  # [T, H]
        for mixer, norm, cache in zip(self.layers, self.norms, kv_cache, strict=False):
            x = self.kernels.rms_norm(hidden, norm, eps)
            if isinstance(mixer, list):
                *qkv, decay = mixer[0](x).split([heads * dim] * 3 + [heads], dim=1)
                qkv = [part.view(-1, heads, dim) for part in qkv]
                hidden = hidden + mixer[1](recur(*qkv, decay.sigmoid(), batch, *cache).flatten(1))
            else:
                hidden = hidden + mixer.output(mixer.mix(x, step, self.rotation, *cache))
        logits = self.head(self.kernels.rms_norm(hidden[batch.logit_indices], self.norms[-1], eps))  # [n, vocab]
        return logits if logits.dtype == torch.float64 else logits.float()


ARCHITECTURE = Architecture("GatedRecurrenceForCausalLM", RecurrenceConfig, resolve, tensors, axes, Recurrence)
