"""Quantized linears of every format written by hand: numpy and the layouts' definitions, nothing of tmodel.formats.

Each comes with its dense weight in float64. The codes reach both ends of their range, as do the zero-points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Kind:
    """What a checkpoint is: a quant_method, and for GPTQ the checkpoint_format after a dash."""

    method: str
    bits: int
    group_size: int = -1
    symmetric: bool = False
    act_order: bool = False

    def __str__(self) -> str:
        flags = ["sym"] * self.symmetric + ["act-order"] * self.act_order
        return "-".join([self.method, f"{self.bits}bit", f"g{self.group_size}", *flags])


KINDS = (
    *(
        Kind(method, bits, group_size, symmetric, act_order)
        for method in ("gptq", "gptq_v2")
        for bits in (2, 3, 4, 8)
        for group_size in (32, 64, 128, -1)
        for symmetric in (False, True)
        for act_order in (False, True)
    ),
    *(Kind("awq", 4, group_size, symmetric) for group_size in (32, 64, 128, -1) for symmetric in (False, True)),
    *(
        Kind("compressed-tensors", bits, group_size, symmetric, act_order)
        for bits in (2, 3, 4, 8)
        for group_size in (32, 64, 128, -1)
        for symmetric in (False, True)
        for act_order in (False, True)
    ),
    *(Kind("squeezellm", bits) for bits in (3, 4)),
)


def settings(kind: Kind) -> dict[str, Any]:
    """The checkpoint's quantization_config."""
    if kind.method == "squeezellm":
        return {"quant_method": "squeezellm", "wbits": kind.bits}
    if kind.method == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": kind.group_size, "version": "gemm", "zero_point": True}
    if kind.method == "compressed-tensors":
        weights = {
            "num_bits": kind.bits,
            "type": "int",
            "symmetric": kind.symmetric,
            "strategy": "channel" if kind.group_size == -1 else "group",
            "group_size": None if kind.group_size == -1 else kind.group_size,
            "actorder": "group" if kind.act_order else None,
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }
    return {
        "quant_method": "gptq",
        "bits": kind.bits,
        "group_size": kind.group_size,
        "sym": kind.symmetric,
        "desc_act": kind.act_order,
        "checkpoint_format": kind.method,
    }


def linear(
    kind: Kind, outputs: int, inputs: int, rng: np.random.Generator, order: np.random.Generator | None = None
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(the layer's tensors by the last part of their names, the dense weight [N, K] float64); `order` draws the order
    of activations in place of `rng`.
    """
    if kind.method == "squeezellm":
        return _squeezellm(kind.bits, outputs, inputs, rng)
    bits, group_size = kind.bits, inputs if kind.group_size == -1 else kind.group_size
    groups, top, middle = inputs // group_size, 2**bits - 1, 2 ** (bits - 1)
    codes = rng.integers(0, top, (outputs, inputs), endpoint=True)
    codes[0], codes[-1] = top, 0
    # What is stored for a zero-point; GPTQ's first version means one more.
    added = 1 if kind.method == "gptq" else 0
    stored = rng.integers(0, top, (groups, outputs), endpoint=True)
    stored[:, 0], stored[:, -1] = 0, top
    if kind.symmetric:
        stored[:] = middle - added
    scales = (rng.random((groups, outputs)) + 0.5).astype(np.float16) * np.float16(0.5 / 2**bits)
    group_of = np.arange(inputs) // group_size
    if kind.act_order:
        group_of = (order or rng).permutation(group_of)
    zeros = stored.astype(np.float64) + added
    dense = (codes - zeros[group_of].T) * scales.astype(np.float64)[group_of].T
    if kind.method == "awq":
        tensors = {"qweight": awq_words(codes.T), "qzeros": awq_words(stored), "scales": scales}
    elif kind.method == "compressed-tensors":
        tensors = {
            "weight_packed": stream(codes, bits, 1),
            "weight_scale": np.ascontiguousarray(scales.T),
            "weight_shape": np.array([outputs, inputs]),
        }
        if kind.act_order:
            tensors["weight_g_idx"] = group_of.astype(np.int32)
        if not kind.symmetric:
            tensors["weight_zero_point"] = stream(stored.T, bits, 0)
    else:
        tensors = {
            "qweight": stream(codes.T, bits, 0),
            "qzeros": stream(stored, bits, 1),
            "scales": scales,
            "g_idx": group_of.astype(np.int32),
        }
    return tensors, dense


def stream(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """The codes along an axis, bit after bit, the lowest first; 32 bits are a word, the last one filled up with 0."""
    along = np.moveaxis(codes, axis, -1).astype(np.int64)
    bit = (along[..., None] >> np.arange(bits) & 1).reshape(*along.shape[:-1], -1).astype(np.uint8)
    filled = np.pad(bit, [(0, 0)] * (bit.ndim - 1) + [(0, -bit.shape[-1] % 32)])
    words = np.packbits(filled, axis=-1, bitorder="little").view("<i4")
    return np.ascontiguousarray(np.moveaxis(words, -1, axis))


def awq_words(codes: np.ndarray) -> np.ndarray:
    """[rows, N] -> [rows, N / 8]."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
    for word in range(words.shape[1]):
        for nibble, column in enumerate(AWQ_COLUMNS):
            words[:, word] |= codes[:, 8 * word + column].astype(np.uint32) << np.uint32(4 * nibble)
    return words.view(np.int32)


def _squeezellm(
    bits: int, outputs: int, inputs: int, rng: np.random.Generator
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    table = np.sort(rng.normal(0, 0.1, (outputs, 2**bits)), axis=1).astype(np.float32)
    codes = rng.integers(0, 2**bits, (outputs, inputs))
    codes[0], codes[-1] = 2**bits - 1, 0
    kept = rng.random((outputs, inputs)) < 0.05
    kept[1] = False  # an empty row
    full = np.array([2, outputs - 1])
    kept[full] = False
    nearest = np.abs(table).argmin(axis=1)
    codes = np.where(kept, nearest[:, None], codes)
    sparse = np.where(kept, rng.normal(0, 0.5, kept.shape), 0).astype(np.float32)
    whole = rng.normal(0, 0.1, (inputs, len(full))).astype(np.float32)
    dense = np.take_along_axis(table, codes, axis=1).astype(np.float64) + sparse
    dense[full] += whole.T
    rows = np.concatenate(([0], np.cumsum(kept.sum(axis=1))))
    tensors = {
        "qweight": stream(codes.T, bits, 0),
        "lookup_table": table,
        "rows": rows.astype(np.int32),
        "cols": np.nonzero(kept)[1].astype(np.int32),
        "vals": sparse[kept],
        "startrows": np.zeros(10, dtype=np.int32),
        "full_rows": whole,
        "full_row_indices": full.astype(np.int32),
    }
    return tensors, dense


def as_torch(tensors: dict[str, np.ndarray], prefix: str = "") -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": torch.from_numpy(np.ascontiguousarray(array)) for name, array in tensors.items()}
