"""One program adds and normalizes one row, which it reads once and keeps in registers.

Wins wherever a row fits into a program's registers (H up to 32k): two reads and two writes of a row are the
minimum, and the sum never goes to memory and back before it is normalized.
"""

import torch
import triton
import triton.language as tl

from tkernels import Axes, Config, DeviceFacts, Run, Variant
from tkernels.language import wait_for_earlier_launches
from tkernels.ops.arguments import pointers
from tkernels.ops.rows import EARLY_ROW_CONFIGS, launch_rows, too_wide

WIDEST = 32768


@triton.jit
def add_rms_norm_row_per_program(
    out_ptr,
    new_residual_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    stride_out_t,
    stride_x_t,
    stride_residual_t,
    hidden,
    eps,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # T * stride can pass 2**31
    offs = tl.arange(0, BLOCK_H)
    mask = offs < hidden
    weight = tl.load(weight_ptr + offs, mask=mask)  # [BLOCK_H], which no launch writes
    wait_for_earlier_launches()
    x = tl.load(x_ptr + row * stride_x_t + offs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_H]
    residual = tl.load(residual_ptr + row * stride_residual_t + offs, mask=mask, other=0.0).to(tl.float32)
    total = x + residual
    # The norm goes on with the sum in fp32; what is stored is rounded once, laid out as `out` is.
    new_residual = total.to(new_residual_ptr.dtype.element_ty)
    tl.store(new_residual_ptr + row * stride_out_t + offs, new_residual, mask=mask)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / hidden + eps)
    out = (total * scale * weight.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride_out_t + offs, out, mask=mask)


def launch(
    run: Run,
    out: torch.Tensor,
    new_residual: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> None:
    arguments = pointers("out[t] new_residual x[t] residual[t] weight", out, new_residual, x, residual, weight)
    launch_rows(run, add_rms_norm_row_per_program, arguments, x.shape, eps)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return too_wide(axes, "H", WIDEST, "leave a program's registers")


VARIANT = Variant(
    wins="rows up to 32k wide: every element is read and written once",
    launch=launch,
    configs=EARLY_ROW_CONFIGS,
    supports=supports,
    # 8 warps keep a thread at 16 elements of each operand for widths of 2k to 4k: two 16-byte loads of each in flight,
    # and at 211 registers for 32k.
    default={"": Config(num_warps=8)},
    key=("H",),
    deterministic=True,
    batch_invariant=True,
)
