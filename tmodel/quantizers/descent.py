"""Goes over a quantized weight again and chooses each code, and each step, anew as the best for all the others.

Source: Behdin et al., 2023, "QuantEase: Optimization-based Quantization for Language Models": cyclic coordinate descent
on the squared error of the layer's outputs. A step is one more coordinate here, whose best value is known at once.
"""

from __future__ import annotations

import torch

from tmodel.quantizers.rtn import SCALE_DTYPE, round_to_codes

BLOCK = 128
"""Inputs after which the columns outside a block learn of its errors, by one matrix product."""


def descend(
    columns: torch.Tensor,
    codes: torch.Tensor,
    steps: torch.Tensor,
    zeros: torch.Tensor,
    moment: torch.Tensor,
    bits: int,
    sweeps: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowers tr(D^T H D), where D is what the codes differ by from the weight; it never rises but by rounding.

    Args:
        columns: [K, N], the dense weight, an input a row.
        codes: [K, N], in the weight's dtype, as all that follow.
        steps: [G, N], each a value of SCALE_DTYPE. K / G neighbours share one.
        zeros: [G, N].
        moment: H [K, K], positive definite.
        bits: Of a code.
        sweeps: How often all of them are chosen anew.

    Returns:
        (codes, steps).
    """
    codes, steps = codes.clone(), steps.clone()
    size = len(columns) // len(steps)
    block = block_of(size)
    difference = (codes - zeros.repeat_interleave(size, 0)) * steps.repeat_interleave(size, 0) - columns  # D [K, N]
    slope = moment @ difference  # [K, N], half the gradient by the quantized weight
    for _ in range(sweeps):
        for number, (step, zero) in enumerate(zip(steps, zeros, strict=True)):  # [N] each
            group = slice(number * size, (number + 1) * size)
            for start in range(group.start, group.stop, block):
                part = slice(start, start + block)
                changes = _choose_codes(columns[part], codes[part], slope[part], moment[part, part], step, zero, bits)
                slope += moment[:, part] @ changes
            change = _improve_step(codes[group] - zero, slope[group], moment[group, group], step)
            step += change
            slope += moment[:, group] @ ((codes[group] - zero) * change)
    return codes, steps


def block_of(size: int) -> int:
    """The largest number of inputs, at most BLOCK, that divides a group of `size`."""
    return max(length for length in range(1, BLOCK + 1) if size % length == 0)


def _choose_codes(
    columns: torch.Tensor,
    codes: torch.Tensor,
    slope: torch.Tensor,
    moment: torch.Tensor,
    step: torch.Tensor,
    zero: torch.Tensor,
    bits: int,
) -> torch.Tensor:
    """Writes `codes` [block, N], one input after another; returns by how much the quantized weight changed."""
    slope, changes = slope.clone(), torch.empty_like(codes)
    for place in range(len(codes)):
        old = (codes[place] - zero) * step
        # The parabola in this weight alone has its lowest point where the slope is 0.
        codes[place] = round_to_codes(old - slope[place] / moment[place, place], step, zero, bits)
        changes[place] = (codes[place] - zero) * step - old
        slope += moment[:, place, None] * changes[place]
    return changes


def _improve_step(shape: torch.Tensor, slope: torch.Tensor, moment: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """By how much to change each step [N] of a group whose weights are `shape` [size, N] times it; 0 where worse."""
    fall = (shape * slope).sum(0)
    curvature = (shape * (moment @ shape)).sum(0)
    best = (step - fall / torch.where(curvature > 0, curvature, 1)).to(SCALE_DTYPE).to(step.dtype)
    change = best - step
    lower = (best > 0) & (change * fall + change.square() * curvature / 2 < 0)
    return torch.where(lower, change, 0)
