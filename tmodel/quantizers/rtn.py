"""Round to nearest: each group of weights has steps over its own range. Other methods build on it and must beat it."""

from __future__ import annotations

import torch

from tkernels.quantized.rounding import grid, nonzero
from tkernels.quantized.weight import QuantizedWeight, from_codes
from tmodel.formats import GPTQ
from tmodel.quantizers.layers import linear_names
from tmodel.quantizers.method import Layer, Method, QuantizedLayer

SCALE_DTYPE = torch.float16
"""The dtype of scales in files of GPTQ and AWQ. Codes are chosen for the scales as rounded to it."""

_GRID, _NARROWER = 100, 80
"""Ranges are tried in hundredths of the whole one, down to a fifth of it: the reference code's grid."""


def compute_steps(
    groups: torch.Tensor, bits: int, *, symmetric: bool = False, lowest_zero: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes steps and zero-points that span each group of weights.

    Args:
        groups: [..., group_size, N].
        bits: Of a code.
        symmetric: Every zero-point is 2**(bits - 1).
        lowest_zero: No zero-point is below it. A GPTQ file of format v1 cannot hold 0, so a group that would have it
            (no weight is below minus half a step) gets 1 and the codes from there up.

    Returns:
        (steps, zero-points), [..., 1, N] each, in the weights' dtype.
    """
    step, zeros = grid(groups, bits, symmetric, SCALE_DTYPE)
    if lowest_zero:
        top = 2**bits - 1
        wider = (step * (top / (top - lowest_zero))).to(SCALE_DTYPE).to(step.dtype)
        step, zeros = torch.where(zeros < lowest_zero, wider, step), zeros.clamp(min=lowest_zero)
    return step, zeros


def search_steps(
    groups: torch.Tensor, costs: torch.Tensor, bits: int, *, symmetric: bool = False, lowest_zero: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Searches for the steps that round each group at the least weighted squared error, over ever narrower ranges.

    Source: the `mse` of the reference code of Frantar et al., 2023, "GPTQ", which counts every weight alike.

    Args:
        groups: [..., group_size, N].
        costs: What an error of each weight costs, at least 0; broadcasts against `groups`.
        bits: Of a code.
        symmetric: As in `compute_steps`.
        lowest_zero: As in `compute_steps`.

    Returns:
        (steps, zero-points), [..., 1, N] each. No group errs more than with those of `compute_steps`.
    """
    step, zeros = compute_steps(groups, bits, symmetric=symmetric, lowest_zero=lowest_zero)
    least = _weighted_error(groups, costs, step, zeros, bits)
    for narrower in range(1, _NARROWER):
        share = 1 - narrower / _GRID
        its_step, its_zeros = compute_steps(groups * share, bits, symmetric=symmetric, lowest_zero=lowest_zero)
        error = _weighted_error(groups, costs, its_step, its_zeros, bits)
        better = error < least
        step, zeros, least = (
            torch.where(better, new, old) for new, old in ((its_step, step), (its_zeros, zeros), (error, least))
        )
    return step, zeros


def _weighted_error(
    groups: torch.Tensor, costs: torch.Tensor, step: torch.Tensor, zeros: torch.Tensor, bits: int
) -> torch.Tensor:
    """[..., 1, N]: the squared error of each rounded group, its weights' counted by `costs`."""
    rounded = (round_to_codes(groups, step, zeros, bits) - zeros) * step
    return ((rounded - groups).square() * costs).sum(-2, keepdim=True)


def round_to_codes(weights: torch.Tensor, step: torch.Tensor, zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest codes, in the weights' dtype. `weights`, `step` and `zeros` broadcast."""
    return ((weights / nonzero(step)).round() + zeros).clamp(0, 2**bits - 1)


def round_to_nearest(
    weight: torch.Tensor, bits: int, group_size: int, *, symmetric: bool = False, lowest_zero: int = 0
) -> QuantizedWeight:
    """Rounds a weight to the nearest codes.

    Args:
        weight: [N, K], float32 or float64.
        bits: Of a code.
        group_size: Inputs that share a step; -1 is all K.
        symmetric: Every zero-point is 2**(bits - 1).
        lowest_zero: No zero-point is below it, see `compute_steps`.
    """
    size = weight.shape[1] if group_size == -1 else group_size
    groups = weight.t().unflatten(0, (-1, size))  # [G, size, N]
    step, zeros = compute_steps(groups, bits, symmetric=symmetric, lowest_zero=lowest_zero)  # [G, 1, N] each
    codes = round_to_codes(groups, step, zeros, bits).flatten(0, 1)  # [K, N]
    return pack_weight(codes, step.squeeze(1), zeros.squeeze(1), bits, size, symmetric=symmetric)


def pack_weight(
    codes: torch.Tensor, step: torch.Tensor, zeros: torch.Tensor, bits: int, group_size: int, *,
    symmetric: bool, permutation: torch.Tensor | None = None,
) -> QuantizedWeight:  # fmt: skip
    """Packs floating codes [K, N], steps [G, N] and zero-points [G, N] as a QuantizedWeight."""
    return from_codes(
        codes.to(torch.uint8),
        bits,
        scales=step.to(SCALE_DTYPE).contiguous(),
        zeros=None if symmetric else zeros.to(torch.int16).contiguous(),
        group_size=group_size,
        permutation=permutation,
    )


def quantize(layer: Layer, bits: int, group_size: int) -> QuantizedLayer:
    """Rounds each linear alone. No zero-point is 0: format v1 cannot store it."""
    return QuantizedLayer(
        {
            name: round_to_nearest(layer.weights[f"{name}.weight"], bits, group_size, lowest_zero=1)
            for name in linear_names(layer.groups)
        }
    )


def _format(bits: int, group_size: int) -> GPTQ:
    """Format v1, which every reader of GPTQ knows; v2 is GPTQModel's and newer."""
    return GPTQ(bits=bits, group_size=group_size, sym=False)


METHOD = Method("rtn", (2, 3, 4, 8), _format, grouped=True, walk="none", quantize=quantize)
