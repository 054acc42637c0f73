"""Round-to-nearest quantization, the simplest there is."""

import torch

from tkernels.quantized.codes import BITS, codes_per_row
from tkernels.quantized.weight import QuantizedWeight, check_group_size, from_codes


def grid(groups: torch.Tensor, bits: int, symmetric: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The steps and zero-points that span each group of weights [..., group_size, N]: [..., 1, N] each, the scales
    rounded to `dtype` and given as the groups' own dtype.

    symmetric: from -max|w| to max|w| with the zero-point in the middle; else from min(w, 0) to max(w, 0).
    """
    top = 2**bits - 1
    if symmetric:
        high = groups.abs().amax(-2, keepdim=True)
        low = -high
    else:
        low, high = groups.amin(-2, keepdim=True).clamp(max=0), groups.amax(-2, keepdim=True).clamp(min=0)
    step = ((high - low) / top).to(dtype).to(groups.dtype)
    zeros = torch.full_like(low, 2 ** (bits - 1)) if symmetric else (-low / nonzero(step)).round().clamp(0, top)
    return step, zeros


def nonzero(step: torch.Tensor) -> torch.Tensor:
    """`step`, 1 where it is 0: a group of zeros, or one too small for the scale's dtype, whose codes are all zero's."""
    return torch.where(step > 0, step, 1)


def quantize(
    weight: torch.Tensor,
    bits: int = 4,
    group_size: int = 128,
    *,
    symmetric: bool = False,
    dtype: torch.dtype | None = None,
) -> QuantizedWeight:
    """Round-to-nearest quantization, each group by its own range.

    Args:
        weight: [N, K], any float dtype, finite; K a multiple of 32 / bits (of 32 for 3 bits).
        bits: 2, 3, 4 or 8.
        group_size: As in QuantizedWeight.
        symmetric: The range is [-max|w|, max|w|] and no zero-points are stored; otherwise it is [min(w, 0), max(w, 0)].
        dtype: Of the scales; `weight`'s by default.

    Returns:
        A weight within half a step, plus the rounding of the scale, of the given one.
    """
    if bits not in BITS:
        raise ValueError(f"quantize: bits must be one of {', '.join(map(str, BITS))}, got {bits!r}")
    if weight.dim() != 2 or not weight.is_floating_point() or weight.numel() == 0:
        raise ValueError(f"quantize: weight must be floating [N, K], got {weight.dtype} {list(weight.shape)}")
    inputs = weight.shape[1]
    if inputs % codes_per_row(bits):
        raise ValueError(f"quantize: K = {inputs} must be a multiple of {codes_per_row(bits)} at {bits} bits")
    group_size = inputs if group_size == -1 else group_size
    check_group_size(group_size, inputs, bits)
    wide = weight.double() if weight.dtype == torch.float64 else weight.float()
    groups = wide.t().unflatten(0, (-1, group_size))  # [G, group_size, N]
    step, zeros = grid(groups, bits, symmetric, dtype or weight.dtype)  # [G, 1, N] each
    codes = ((groups / nonzero(step)).round() + zeros).clamp(0, 2**bits - 1).flatten(0, 1)  # [K, N]
    return from_codes(
        codes.to(torch.uint8),
        bits,
        scales=step.squeeze(1).to(dtype or weight.dtype).contiguous(),
        zeros=None if symmetric else zeros.squeeze(1).to(torch.int16),
        group_size=group_size,
    )
