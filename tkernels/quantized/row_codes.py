"""8-bit codes of a row: its scale, and how the row is rounded to codes. One definition, in torch and on the device."""

import numpy as np
import torch
import triton
import triton.language as tl

from tkernels.contract import Axes
from tkernels.device import DeviceFacts, unsupported_e4m3
from tkernels.language import nearest_even

CODES = ("int8", "float8_e4m3fn")
"""The dtypes of codes by name."""

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The code that the row's largest value becomes. int8's -128 is left out, so that a row and its negative have codes of
one size."""

LEAST = {torch.int8: -128.0, torch.float8_e4m3fn: -448.0}
"""Below which codes saturate. -128 is reached only where a scale was fixed beforehand and a row goes beyond it."""

BLOCK = 128
"""Inputs of a token, and inputs as well as outputs of a weight, that share a scale where scales are those of blocks:
DeepSeek-AI, DeepSeek-V3, 2024, section 3.3.2."""

SMALLEST_SCALE = 2.0**-126
"""fp32's smallest normal number, whose reciprocal is finite: the scale of a row of zeros, and of one so small that its
own scale would be subnormal. Its codes are 0, or fewer than there could be, and nothing is NaN."""


def reciprocal_of(dtype: torch.dtype) -> float:
    """1 / the largest code, rounded to fp32: what a row's largest value is multiplied by."""
    return float(np.float32(1.0 / LARGEST[dtype]))


def codes_and_scales(x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes [..., K] in `dtype`, and the scales [...] float32, of rows x [..., K] float32 with largest = max|x|
    [...].

    Every operation is fp32's, rounded once: scale = max(largest * fp32(1 / 127 or 448), 2**-126), and the codes are
    those of `codes_at`. None is beyond the largest: the product is that at most, but for less than what rounds back
    to it.
    """
    scale = (largest * reciprocal_of(dtype)).clamp(min=SMALLEST_SCALE)
    return codes_at(x, scale.unsqueeze(-1), dtype), scale


def codes_at(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The codes of x float32 at scales that broadcast to it: x * fp32(1 / scale), what is beyond the codes' range at
    its end, rounded to nearest, ties to even.
    """
    products = (x * scale.reciprocal()).clamp(LEAST[dtype], LARGEST[dtype])
    return (products.round() if dtype == torch.int8 else products).to(dtype)


@triton.jit
def scale_of(largest, reciprocal):
    """A row's scale from its largest absolute value, fp32: see `codes_and_scales`."""
    return tl.maximum(largest * reciprocal, 1.1754943508222875e-38)


@triton.jit
def codes_of(x, scale, code: tl.constexpr, SATURATES: tl.constexpr):
    """x [...] fp32 in codes of type `code`: see `codes_at`. SATURATES: x may be beyond their range at this scale."""
    # A division that rounds as the definition's: `/` is off by two units in the last place on a GPU.
    products = x * tl.div_rn(1.0, scale)
    if code == tl.int8:
        if SATURATES:
            products = tl.minimum(tl.maximum(products, -128.0), 127.0)
        return nearest_even(products).to(tl.int8)
    else:
        if SATURATES:
            products = tl.minimum(tl.maximum(products, -448.0), 448.0)
        return products.to(code)


def unsupported_codes(axes: Axes, device: DeviceFacts) -> str | None:
    """Why a Triton kernel cannot make or multiply codes of this dtype on a device, or None where it can."""
    return unsupported_e4m3(device) if axes["codes"] == "float8_e4m3fn" else None
