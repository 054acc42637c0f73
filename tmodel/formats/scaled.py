"""Linear layers of 8-bit codes whose inputs become 8-bit codes too: what the formats that have them read alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tkernels.quantized.row_codes import SMALLEST_SCALE
from tkernels.quantized.scaled_weight import ScaledWeight
from tmodel.formats.base import FLOATS, ScaledScheme
from tmodel.weights import Checkpoint

_PART = 2**25
"""Codes that are looked through at a time."""


def read_codes(checkpoint: Checkpoint, name: str, shape: Sequence[int], scheme: ScaledScheme) -> torch.Tensor:
    """Reads a weight's codes [N, K].

    Raises:
        WeightError: The tensor is missing, has another shape or dtype, or holds a NaN.
    """
    codes = checkpoint.raw(name, shape, (scheme.dtype,), "where [N, K] = {} is expected")
    if codes.is_floating_point():
        for start, part in enumerate(codes.view(torch.uint8).view(-1).split(_PART)):
            wrong = (part & 0x7F) == 0x7F  # e4m3fn has no infinity, and these two NaNs
            if bool(wrong.any()):
                place = divmod(start * _PART + int(wrong.nonzero()[0]), shape[1])
                raise checkpoint.error(name, f"has a NaN at {list(place)}; every value of it must be finite")
    return codes


def read_scales(checkpoint: Checkpoint, name: str, shape: Sequence[int], layout: str) -> torch.Tensor:
    """Reads scales as float32; one scale alone may be stored as [1] or without a dim.

    Args:
        checkpoint: Where they are.
        name: Of the tensor.
        shape: That it must have.
        layout: The shape in symbols, for the message: "[N, 1]".

    Raises:
        WeightError: The tensor is missing, has another shape, holds no floats, or a value that is not finite.
    """
    if tuple(shape) == (1,) and name in checkpoint and not checkpoint.shape(name):
        shape = ()
    scales = checkpoint.raw(name, shape, FLOATS, f"where {layout} = {{}} is expected")
    checkpoint.require_finite(name, scales.view(-1))
    return scales.float()


def read_input_scale(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Reads the one scale of a layer's inputs, [1] float32.

    Raises:
        WeightError: As `read_scales`; or it is no positive number whose reciprocal float32 holds.
    """
    scale = read_scales(checkpoint, name, (1,), "[1]").view(1)
    if float(scale) < SMALLEST_SCALE:
        raise checkpoint.error(name, f"is {float(scale):g}; inputs are divided by it, so it must be 2**-126 or more")
    return scale


def read_zero_points(checkpoint: Checkpoint, name: str) -> None:
    """Reads zero-points that symmetric codes do not need and some files have.

    Raises:
        WeightError: One of them is not 0.
    """
    if name in checkpoint:
        dtypes = (torch.int8, torch.int32, torch.float8_e4m3fn, *FLOATS)
        if bool(checkpoint.raw(name, checkpoint.shape(name), dtypes).float().any()):
            raise checkpoint.error(name, "has a zero-point other than 0, but quantization_config calls it symmetric")


def make_weight(
    scheme: ScaledScheme, codes: torch.Tensor, scales: torch.Tensor, input_scale: torch.Tensor | None
) -> ScaledWeight:
    """The weight of codes [N, K] with scales as they are stored: of blocks, of outputs [N, 1], or one of all [1]."""
    if not scheme.blocked:
        scales = scales.view(-1).expand(codes.shape[0]).contiguous()  # [N]
    return ScaledWeight(codes, scales, input_scale)


def check_scaled(layer: str, weight: ScaledWeight, scheme: ScaledScheme) -> None:
    """Checks that the weight of `layer` is stored as `scheme` says.

    Raises:
        ValueError: Its codes or scales are of another kind.
    """
    kind = (weight.dtype, weight.is_blocked, weight.input_scale is not None)
    if kind != (scheme.dtype, scheme.blocked, scheme.static):
        raise ValueError(f"{layer}: (codes, blocked, static) are {kind}, but the format holds {scheme}")
