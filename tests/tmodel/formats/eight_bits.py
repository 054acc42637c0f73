"""Layers in 8-bit codes, weights and inputs, written by hand: numpy and the layouts' definitions.

Each comes with its dense weight in float64. The codes reach both ends of their range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.tmodel.conftest import checkpoint_tensors
from tests.tmodel.formats.models import LINEARS, SHAPE, write
from tests.tmodel.mixtures import mixture_tensors

BLOCK = 128


@dataclass(frozen=True)
class Kind:
    """What a checkpoint is. scales: one for each "channel", "block" or "tensor". static: one of inputs is stored."""

    method: str
    codes: str
    scales: str
    static: bool = False

    def __str__(self) -> str:
        return "-".join([self.method, self.codes, self.scales, *["static"] * self.static])


KINDS = (
    Kind("compressed-tensors", "int", "channel"),
    Kind("compressed-tensors", "int", "tensor", static=True),
    Kind("compressed-tensors", "float", "channel"),
    Kind("compressed-tensors", "float", "tensor", static=True),
    Kind("compressed-tensors", "float", "block"),
    Kind("fp8", "float", "block"),
    Kind("fp8", "float", "tensor"),
    Kind("fp8", "float", "tensor", static=True),
)


def settings(kind: Kind) -> dict[str, Any]:
    """The checkpoint's quantization_config."""
    if kind.method == "fp8":
        return {
            "quant_method": "fp8",
            "activation_scheme": "static" if kind.static else "dynamic",
            "weight_block_size": [BLOCK, BLOCK] if kind.scales == "block" else None,
            "modules_to_not_convert": ["lm_head"],
        }
    shared = {"num_bits": 8, "type": kind.codes, "symmetric": True}
    weights = {**shared, "strategy": kind.scales, "dynamic": False}
    inputs = {**shared, "strategy": "tensor" if kind.static else "token", "dynamic": not kind.static}
    if kind.scales == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
        inputs |= {"strategy": "group", "group_size": BLOCK}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind.codes}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def linear(kind: Kind, outputs: int, inputs: int, rng: np.random.Generator) -> tuple[dict[str, torch.Tensor], Any]:
    """(the layer's tensors by the last part of their names, the dense weight [N, K] float64)."""
    if kind.codes == "int":
        codes = rng.integers(-128, 127, (outputs, inputs), endpoint=True).astype(np.int8)
        codes[0], codes[-1] = -128, 127
        stored, values = torch.from_numpy(codes), codes.astype(np.float64)
    else:
        # Of each sign, every code below 2**8 but none of the few far above it, so that no weight stands out.
        codes = (rng.integers(0, 0x78, (outputs, inputs)) | rng.choice([0, 0x80], (outputs, inputs))).astype(np.uint8)
        codes[0, 0], codes[-1, -1] = 0x7E, 0xFE
        stored, values = torch.from_numpy(codes).view(torch.float8_e4m3fn), e4m3(codes)
    shape = {"channel": (outputs, 1), "tensor": (1,), "block": (-(-outputs // BLOCK), inputs // BLOCK)}[kind.scales]
    scales = ((rng.random(shape) + 0.5) / (values.std() * inputs**0.5)).astype(np.float32)
    spread = scales.astype(np.float64)
    if kind.scales == "block":
        spread = spread.repeat(BLOCK, 0)[:outputs].repeat(BLOCK, 1)
    name = "weight_scale" if kind.method != "fp8" else "weight_scale_inv"
    tensors = {"weight": stored, name: torch.from_numpy(scales)}
    if kind.method == "fp8" and kind.scales == "tensor":
        tensors[name] = torch.tensor(scales[0])
    if kind.static:
        scale = torch.tensor([0.125 if kind.codes == "int" else 0.0625])
        tensors |= {"input_scale": scale} if kind.method != "fp8" else {"activation_scale": scale[0]}
    return tensors, values * spread


def e4m3(codes: np.ndarray) -> np.ndarray:
    """What codes of a sign, four bits of exponent and three of significand stand for."""
    exponent, significand = (codes >> 3 & 15).astype(np.float64), (codes & 7) / 8
    sizes = np.where(exponent > 0, (1 + significand) * 2.0 ** (exponent - 7), significand * 2.0**-6)
    return np.where(codes & 0x80, -sizes, sizes)


def write_models(
    directory: Path, kind_of: Kind | Callable[[str], Kind | None], quantization: dict[str, Any] | None = None,
    change: Callable[[str, dict[str, torch.Tensor]], None] = lambda layer, parts: None,
    linears: tuple[str, ...] = LINEARS, **changes: Any,
) -> tuple[Path, Path]:  # fmt: skip
    """(a model in 8-bit codes, its dense twin): `kind_of` a layer's name, None for a dense one; `quantization` is the
    config where it is not the kind's own; `change` may alter a layer's tensors; `linears` are the ends of the names
    that are asked about.
    """
    config = {**SHAPE, **changes}
    dense = mixture_tensors(config) if "num_experts" in config else checkpoint_tensors(config)
    quantized = dict(dense)
    rng = np.random.default_rng(0)
    for name, tensor in dense.items():
        layer = name.removesuffix(".weight")
        kind = kind_of if isinstance(kind_of, Kind) else kind_of(layer)
        if not layer.endswith(linears) or not name.endswith(".weight") or kind is None:
            continue
        parts, weight = linear(kind, *tensor.shape, rng)
        change(layer, parts)
        del quantized[name]
        quantized |= {f"{layer}.{part}": stored.contiguous() for part, stored in parts.items()}
        dense[name] = torch.from_numpy(weight).float()
    if quantization is None:
        assert isinstance(kind_of, Kind)
        quantization = settings(kind_of)
    return (
        write(directory / "quantized", {**config, "quantization_config": quantization}, quantized),
        write(directory / "dense", config, dense),
    )
