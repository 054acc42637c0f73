"""What norms share: rows that a program keeps in its registers, one of them or a tile of them, and their launches."""

from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl

from tkernels.config import Config
from tkernels.contract import Axes
from tkernels.launch import Run

ROW_CONFIGS = tuple(Config(num_warps=warps) for warps in (1, 2, 4, 8, 16))
"""Configs of a program for each row, whose tile is the row."""

EARLY_ROW_CONFIGS = (*ROW_CONFIGS, *(Config(num_warps=warps, launch_pdl=1) for warps in (4, 8)))
"""The same for kernels that wait for the launches ahead of them: their weight can be on its way before those end."""

TILE_CONFIGS = tuple(
    Config(BLOCK_ELEMENTS=elements, num_warps=warps)
    for elements, warps in ((1024, 1), (2048, 2), (2048, 4), (4096, 4), (4096, 8), (8192, 8))
)
"""Configs of a program for a tile of rows."""

TILE_DEFAULTS = {
    # 4096 elements over 4 warps: four 16-byte loads of each operand a thread in flight; 32 rows of 128, 2 of 2048.
    "": Config(BLOCK_ELEMENTS=4096),
    "gfx942": Config(BLOCK_ELEMENTS=4096, num_warps=2),  # of 64 threads: 4 would read the weight 8 bytes at a time
    "interpreter": Config(BLOCK_ELEMENTS=256),  # a few rows, so that there are several tiles and the last is not full
}
"""The untuned configs of a program for a tile of rows."""


@triton.jit
def layer_normalized(x, inside, hidden, eps, AXIS: tl.constexpr):
    """fp32 rows along AXIS, each less its mean and divided by its deviation; what is not `inside` a row is 0 in x."""
    mean = tl.sum(x, axis=AXIS, keep_dims=True) / hidden
    centered = tl.where(inside, x - mean, 0.0)
    # Of a mean far from 0 the rounding shows in all of a row: what it left over is the mean of the differences.
    left_over = tl.sum(centered, axis=AXIS, keep_dims=True) / hidden
    variance = tl.sum(centered * centered, axis=AXIS, keep_dims=True) / hidden - left_over * left_over
    return (centered - left_over) * tl.rsqrt(variance + eps)


def too_wide(axes: Axes, axis: str, widest: int, what: str, instead: str | None = None) -> str | None:
    """Why a variant that keeps whole rows does not take such wide ones, or None where it does.

    Args:
        axis: The width of a row.
        widest: Elements of a row.
        what: Wider rows do.
        instead: The variant that takes them.
    """
    if int(axes[axis]) <= widest:
        return None
    reason = f"rows wider than {widest} {what}; this is {axis} = {axes[axis]}"
    return f"{reason}: {instead}" if instead else reason


def launch_rows(run: Run, kernel: Any, arguments: Mapping[str, Any], shape: Sequence[int], eps: float) -> None:
    """Launches a program for each row of a tensor [T, H]. arguments: pointers and strides, `shape`: T and H."""
    tokens, hidden = shape
    run.launch(kernel, (tokens,), **arguments, hidden=hidden, eps=eps, BLOCK_H=triton.next_power_of_2(hidden))


def launch_tiles_of_rows(run: Run, kernel: Any, arguments: Mapping[str, Any], shape: Sequence[int], eps: float) -> None:
    """Launches a program for each tile of BLOCK_ELEMENTS of a tensor [T, H], of one row at least."""
    tokens, hidden = shape
    block_h = triton.next_power_of_2(hidden)
    block_t = max(1, run.config["BLOCK_ELEMENTS"] // block_h)
    sizes = {"tokens": tokens, "hidden": hidden, "eps": eps, "BLOCK_T": block_t, "BLOCK_H": block_h}
    run.launch(kernel, (triton.cdiv(tokens, block_t),), **arguments, **sizes)
