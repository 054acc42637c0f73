"""Round to nearest: each group of weights by its own range. What other methods have to beat, and what they end in."""

from __future__ import annotations

import torch

from tkernels.quantized.rounding import grid, nonzero
from tkernels.quantized.weight import QuantizedWeight, from_codes
from tmodel.formats import GPTQ
from tmodel.quantizers.layers import linear_names
from tmodel.quantizers.method import Layer, Method, QuantizedLayer

SCALE_DTYPE = torch.float16
"""What files of GPTQ and AWQ keep their scales in. Codes are chosen for the scales as they are kept."""


def fit(
    groups: torch.Tensor, bits: int, *, symmetric: bool = False, lowest_zero: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The steps and zero-points that span each group of weights [..., group_size, N]: [..., 1, N] each.

    lowest_zero: no zero-point is below it. A GPTQ file of format v1 cannot hold 0: a group that would have it, one with
    no weight below half a step, gets 1 and the codes from there up.
    """
    step, zeros = grid(groups, bits, symmetric, SCALE_DTYPE)
    if lowest_zero:
        top = 2**bits - 1
        wider = (step * (top / (top - lowest_zero))).to(SCALE_DTYPE).to(step.dtype)
        step, zeros = torch.where(zeros < lowest_zero, wider, step), zeros.clamp(min=lowest_zero)
    return step, zeros


def codes_for(weights: torch.Tensor, step: torch.Tensor, zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest codes, in the weights' dtype; the three broadcast."""
    return ((weights / nonzero(step)).round() + zeros).clamp(0, 2**bits - 1)


def rounded(
    weight: torch.Tensor, bits: int, group_size: int, *, symmetric: bool = False, lowest_zero: int = 0
) -> QuantizedWeight:
    """`weight` [N, K] in codes of `bits`, `group_size` inputs to a step; -1 is all K."""
    size = weight.shape[1] if group_size == -1 else group_size
    groups = weight.t().unflatten(0, (-1, size))  # [G, size, N]
    step, zeros = fit(groups, bits, symmetric=symmetric, lowest_zero=lowest_zero)  # [G, 1, N] each
    codes = codes_for(groups, step, zeros, bits).flatten(0, 1)  # [K, N]
    return packed(codes, step.squeeze(1), zeros.squeeze(1), bits, size, symmetric=symmetric)


def packed(
    codes: torch.Tensor, step: torch.Tensor, zeros: torch.Tensor, bits: int, group_size: int, *,
    symmetric: bool, permutation: torch.Tensor | None = None,
) -> QuantizedWeight:  # fmt: skip
    """codes [K, N], step and zeros [G, N], all floating, as a QuantizedWeight."""
    return from_codes(
        codes.to(torch.uint8),
        bits,
        scales=step.to(SCALE_DTYPE).contiguous(),
        zeros=None if symmetric else zeros.to(torch.int16).contiguous(),
        group_size=group_size,
        permutation=permutation,
    )


def quantize(layer: Layer, bits: int, group_size: int) -> QuantizedLayer:
    """The layer, each linear alone. Files of format v1 hold no zero-point of 0, so there is none."""
    return QuantizedLayer(
        {
            name: rounded(layer.weights[f"{name}.weight"], bits, group_size, lowest_zero=1)
            for name in linear_names(layer.groups)
        }
    )


def _format(bits: int, group_size: int) -> GPTQ:
    """Version 1, which every reader of GPTQ has; version 2 is GPTQModel's and newer."""
    return GPTQ(bits=bits, group_size=group_size, sym=False)


METHOD = Method("rtn", (2, 3, 4, 8), _format, grouped=True, walk="none", quantize=quantize)
