"""Which ops a model and its engine call, and at which sizes: what `tkernels.select` is asked for.

`kernel_axes` is the whole; the rest are the parts that an architecture's own `axes` are put together from. These are
the widest ops: what a composed fusion is made of follows from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tkernels.contract import Value
from tkernels.inputs import dtype_name
from tkernels.quantized.row_codes import BLOCK
from tkernels.variant import AxisRanges
from tmodel.config import Axes, Limits, ModelConfig
from tmodel.formats.base import ScaledScheme, Scheme
from tmodel.quantization import LinearShape, Quantization, coding_axes, fuses_gelu, fuses_swiglu

Range = Value | tuple[int, int]


def kernel_axes(config: ModelConfig, limits: Limits) -> Axes:
    """Every op that the model calls, and those that an engine calls for any model, with all their axes."""
    return {**config.architecture.axes(config, limits), **_engine_axes(config, limits)}


def _engine_axes(config: ModelConfig, limits: Limits) -> Axes:
    """What builds a step's inputs, moves the cache's pages, takes tokens and scores them."""
    logits: AxisRanges = {"V": config.vocab_size, "score": "float64" if config.dtype == torch.float64 else "float32"}
    copies: list[AxisRanges] = [
        {
            "pairs": (0, limits.num_blocks),
            "C": part.per_layer * len(kind.layers),
            "P": limits.num_blocks,
            "S": part.shape[0],
            "Hkv": part.shape[1],
            "D": part.shape[2],
            **({} if part.dtype == config.dtype else {"kv": dtype_name(part.dtype)}),
        }
        for kind in config.cache_kinds
        if kind.state_interval is None
        for part in kind.parts(limits.block_size, config.dtype)
    ]
    return {
        **({"copy_pages": copies[0] if len(copies) == 1 else tuple(copies)} if copies else {}),
        "step_inputs": {
            "R": limits.max_num_seqs,
            "B": (0, limits.max_num_seqs),
            "T": (0, limits.max_num_tokens),
            "N": (1, _table_width(limits)),
            "page_size": limits.block_size,
        },
        "sample": {**logits, "B": (0, limits.max_num_seqs), "R": (1, 2 * limits.max_num_seqs)},
        "logprobs": {**logits, "B": (0, limits.max_num_tokens), "top": (0, config.vocab_size)},
    }


def attention_axes(config: ModelConfig, limits: Limits, *, sinks: bool = False) -> Axes:
    """Paged attention in the heads and windows of `config`, with sinks or without."""
    windows = [window or 0 for window in config.windows]
    attention: AxisRanges = {
        "Hq": config.num_heads,
        "Hkv": config.num_kv_heads,
        "D": config.head_dim,
        "B": (1, limits.max_num_seqs),
        "Dv": config.head_dim,
        "P": limits.num_blocks,
        "S": limits.block_size,
        "N": (1, _table_width(limits)),
        "window": (min(windows), max(windows)),
        "return_lse": False,
        "sinks": sinks,
        **_cache_axes(config),
    }
    groups: AxisRanges = {"G": (1, limits.max_num_seqs)}
    return {
        **({"cascade_decode": {**attention, **groups}} if limits.shared_prefixes else {}),
        "paged_decode": attention,
        "paged_prefill": {**attention, "T": (1, limits.max_num_tokens), "causal": True},
    }


def rotary_axes(config: ModelConfig, limits: Limits, rotary_dim: int, *, head_norms: bool) -> Axes:
    """Rotation of queries and keys and the write of keys and values, with a norm on each head before where there is
    one.
    """
    return {
        "qk_norm_rope_scatter": {
            "Hq": config.num_heads,
            "Hkv": config.num_kv_heads,
            "D": config.head_dim,
            "T": (1, limits.max_num_tokens),
            "Dv": config.head_dim,
            "R": rotary_dim,
            "L": limits.max_model_len,
            "P": limits.num_blocks,
            "S": limits.block_size,
            "q_weight": head_norms,
            "k_weight": head_norms,
            "interleaved": False,
            **_cache_axes(config),
        }
    }


def _cache_axes(config: ModelConfig) -> AxisRanges:
    """What keys and values are kept as: in the model's dtype, or with scales in the checkpoint's."""
    dtype = None if config.quantization is None else config.quantization.cache_dtype
    if dtype is None:
        return {"k_scale": False, "v_scale": False}
    return {"kv": dtype_name(dtype), "k_scale": True, "v_scale": True}


def rms_norm_axes(width: int, limits: Limits, *others: int) -> Axes:
    """RMS norms of vectors of `width`, alone and with the residual's addition, and those of `others` alone."""
    norm: AxisRanges = {"T": (1, limits.max_num_tokens), "H": width}
    return {"rms_norm": {**norm, "H": _span((width, *others))}, "add_rms_norm": norm}


def layer_norm_axes(width: int, limits: Limits) -> Axes:
    """Layer norms of vectors of `width`, alone and with the residual's addition."""
    norm: AxisRanges = {"T": (1, limits.max_num_tokens), "H": width}
    return {"layer_norm": norm, "add_layer_norm": norm}


def scatter_axes(config: ModelConfig, limits: Limits) -> Axes:
    """The write of keys and values that nothing turns."""
    return {
        "kv_scatter": {
            "T": (1, limits.max_num_tokens),
            "Hkv": config.num_kv_heads,
            "D": config.head_dim,
            "Dv": config.head_dim,
            "P": limits.num_blocks,
            "S": limits.block_size,
            "k_scale": False,
            "v_scale": False,
        }
    }


def linear_axes(linears: Sequence[LinearShape], quantization: Quantization | None, limits: Limits) -> Axes:
    """What the linear layers `linears` and their activations call, as LinearReader makes them."""
    tokens = (1, limits.max_num_tokens)
    linears = [shape for shape in linears if not shape.num_experts]
    fused = [shape for shape in linears if fuses_swiglu(shape, quantization)]
    split = [shape for shape in linears if shape.gated and not fuses_swiglu(shape, quantization)]
    curved = [shape for shape in linears if fuses_gelu(shape, quantization)]
    apart = [
        shape for shape in linears if not fuses_swiglu(shape, quantization) and not fuses_gelu(shape, quantization)
    ]
    dense = [(shape, sizes) for shape in apart if (sizes := _dense_outputs(shape, quantization))]
    axes: Axes = {}
    if dense:
        axes["matmul"] = {
            "M": tokens,
            "N": _span(size for _, sizes in dense for size in sizes),
            "K": _span(shape.inputs for shape, _ in dense),
            "bias": _span(shape.bias for shape, _ in dense),
        }
    if fused:
        widths = _span(shape.outputs[0] for shape in fused)
        axes["gate_up_swiglu"] = {"T": tokens, "H": _span(shape.inputs for shape in fused), "I": widths}
    if split:
        axes["swiglu"] = {"T": tokens, "I": _span(shape.outputs[0] for shape in split)}
    axes |= _gelu_axes(curved, [shape for shape in apart if shape.gelu], tokens)
    return axes if quantization is None else {**axes, **quantization.kernel_axes(tokens)}


def experts_axes(
    mixtures: Iterable[tuple[LinearShape, LinearShape]], quantization: Quantization | None, limits: Limits,
    *, top_k: int, normalize: bool, limit: float | None,
) -> Axes:  # fmt: skip
    """What routes tokens to experts, and computes these.

    Args:
        mixtures: Of each layer that has experts, their gate and up projections and their down projections.
        quantization: Of the checkpoint.
        limits: The most that a model is asked for.
        top_k: K, experts of a token.
        normalize: Whether what a token's experts count adds up to 1.
        limit: Of SwiGLU's clamped form; None is the other form.
    """
    tokens = (1, limits.max_num_tokens)
    ways: list[AxisRanges] = []
    for gate_up, down in mixtures:
        sizes = {"E": down.num_experts, "H": gate_up.inputs, "I": down.inputs}
        axes: AxisRanges = {
            "T": tokens, "K": top_k, **sizes, "gate_up_bias": gate_up.bias, "down_bias": down.bias,
            "limit": math.ceil(limit or 0), **_experts_coding(gate_up, down, quantization),
        }  # fmt: skip
        if axes not in ways:
            ways.append(axes)
    if not ways:
        return {}
    route: AxisRanges = {
        "T": tokens, "K": top_k, "E": ways[0]["E"], "normalize": normalize, "sigmoid": False, "bias": False,
    }  # fmt: skip
    return {"route": route, "moe_mlp": ways[0] if len(ways) == 1 else tuple(ways)}


def _experts_coding(gate_up: LinearShape, down: LinearShape, quantization: Quantization | None) -> AxisRanges:
    """How experts' weights are stored, which Quantization has seen to be in codes of one kind."""
    found: dict[str, Any] = {}
    for name, shape in {"gate_up": gate_up, "down": down}.items():
        scheme = None if quantization is None else quantization.scheme(shape.names[0])
        axes: dict[str, Any] = {"padding": 0, "bits": 0, "group_size": 0, "symmetric": True, "permuted": False}
        coding = "uniform"
        if isinstance(scheme, Scheme):
            axes, coding = dict(coding_axes(scheme, shape.inputs)), scheme.coding
        elif isinstance(scheme, ScaledScheme):
            axes |= {"bits": 8, "group_size": BLOCK}
            coding = "e4m3"
        found |= {"bits": axes.pop("bits"), "coding": coding}
        found |= {f"{name}_{axis}": value for axis, value in axes.items()}
    return found


def _gelu_axes(fused: Sequence[LinearShape], split: Sequence[LinearShape], tokens: tuple[int, int]) -> Axes:
    """What computes the gelus: with their projections, or after them."""
    axes: Axes = {}
    if fused:
        axes["matmul_gelu"] = {
            "T": tokens,
            "I": _span(sum(shape.outputs) for shape in fused),
            "H": _span(shape.inputs for shape in fused),
            "bias": _span(shape.bias for shape in fused),
            "tanh": _span(shape.gelu == "tanh" for shape in fused),
        }
    if split:
        widths = _span(sum(shape.outputs) for shape in split)
        axes["gelu"] = {"T": tokens, "I": widths, "tanh": _span(shape.gelu == "tanh" for shape in split)}
    return axes


def _dense_outputs(shape: LinearShape, quantization: Quantization | None) -> tuple[int, ...]:
    """The least and the most outputs of one dense matmul of `shape`; none where all of it is quantized."""
    schemes = [None] if quantization is None else quantization.schemes(shape)
    if not any(schemes):
        return (sum(shape.outputs),)
    parts = [outputs for outputs, scheme in zip(shape.outputs, schemes, strict=True) if scheme is None]
    return (min(parts), sum(parts)) if parts else ()


def _span(values: Iterable[int]) -> Range:
    """The one value, or (least, greatest)."""
    found = sorted(set(values))
    return found[0] if len(found) == 1 else (found[0], found[-1])


def _table_width(limits: Limits) -> int:
    """Blocks of the longest sequence."""
    return -(-limits.max_model_len // limits.block_size)
