"""One program normalizes one row, which it reads once and keeps in registers.

Wins wherever a row fits into a program's registers (H up to 16k) and there are enough rows to fill the device:
the bytes moved are the minimum, and no reduction leaves the program.
"""

import torch
import triton
import triton.language as tl

from tkernels import Axes, Config, DeviceFacts, Run, Variant
from tkernels.language import wait_for_earlier_launches
from tkernels.ops.arguments import pointers
from tkernels.ops.rows import EARLY_ROW_CONFIGS, launch_rows, too_wide

WIDEST = 16384


@triton.jit
def rms_norm_row_per_program(out_ptr, x_ptr, weight_ptr, stride_x_t, stride_out_t, hidden, eps, BLOCK_H: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # T * stride can pass 2**31
    offs = tl.arange(0, BLOCK_H)
    mask = offs < hidden
    weight = tl.load(weight_ptr + offs, mask=mask)  # [BLOCK_H], which no launch writes
    wait_for_earlier_launches()
    x = tl.load(x_ptr + row * stride_x_t + offs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_H]
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    # One rounding, at the end: rounding before the weight, as some models do, costs up to one bit of bf16's eight.
    out = (x * scale * weight.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride_out_t + offs, out, mask=mask)


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    launch_rows(run, rms_norm_row_per_program, pointers("out[t] x[t] weight", out, x, weight), x.shape, eps)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return too_wide(axes, "H", WIDEST, "leave a program's registers", "two_pass")


VARIANT = Variant(
    wins="rows up to 16k wide, and enough of them to fill the device",
    launch=launch,
    configs=EARLY_ROW_CONFIGS,
    supports=supports,
    # 8 warps keep a thread at 16 elements for widths of 2k to 4k, two 16-byte loads in flight, and at 128 registers for
    # 16k (4 warps: 211).
    default={"": Config(num_warps=8)},
    key=("H",),
    deterministic=True,
    batch_invariant=True,
)
