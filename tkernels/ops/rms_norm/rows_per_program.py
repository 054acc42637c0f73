"""One program normalizes as many rows as fill its tile: it reads each once and the weight once for all of them.

Wins for narrow rows (H up to 2048), of which one alone leaves most threads of a program without a 16-byte access: a
tile of them has every thread busy, and a fraction of the programs and of the weight's reads.
"""

import torch
import triton
import triton.language as tl

from tkernels import Axes, Config, DeviceFacts, Run, Variant
from tkernels.language import wait_for_earlier_launches
from tkernels.ops.arguments import pointers
from tkernels.ops.rows import TILE_DEFAULTS, launch_tiles_of_rows, too_wide

CONFIGS = tuple(
    Config(BLOCK_ELEMENTS=elements, num_warps=warps)
    for elements, warps in ((1024, 1), (2048, 2), (2048, 4), (4096, 4), (8192, 4), (8192, 8))
)
WIDEST = 2048


@triton.jit(do_not_specialize=["tokens"])
def rms_norm_rows_per_program(
    out_ptr,
    x_ptr,
    weight_ptr,
    stride_x_t,
    stride_out_t,
    tokens,
    hidden,
    eps,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # T * stride can pass 2**31
    offs = tl.arange(0, BLOCK_H)[None, :]
    mask = (rows < tokens) & (offs < hidden)
    weight = tl.load(weight_ptr + offs, mask=offs < hidden)  # [1, BLOCK_H], which no launch writes
    wait_for_earlier_launches()
    x = tl.load(x_ptr + rows * stride_x_t + offs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK_H]
    # Along the row alone, by threads whose places follow from BLOCK_T and BLOCK_H: no row's bits depend on another's.
    scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / hidden + eps)  # [BLOCK_T, 1]
    out = (x * scale * weight.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows * stride_out_t + offs, out, mask=mask)


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    launch_tiles_of_rows(run, rms_norm_rows_per_program, pointers("out[t] x[t] weight", out, x, weight), x.shape, eps)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return too_wide(axes, "H", WIDEST, "fill a program each", "row_per_program")


VARIANT = Variant(
    wins="rows up to 2048 wide, many of them",
    region={"H": (1, 2048), "T": (512, 2**31 - 1)},
    launch=launch,
    configs=CONFIGS,
    supports=supports,
    default=TILE_DEFAULTS,
    key=("H",),
    deterministic=True,
    batch_invariant=True,
)
