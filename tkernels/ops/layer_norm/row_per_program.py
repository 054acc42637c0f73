"""One program normalizes one row, which it reads once and keeps in registers.

Wins wherever a row fits into a program's registers and there are enough rows to fill the device: the bytes moved are
the minimum, and no reduction leaves the program.
"""

import torch
import triton
import triton.language as tl

from tkernels import Axes, Config, DeviceFacts, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.ops.rows import ROW_CONFIGS, launch_rows, layer_normalized, too_wide

WIDEST = 16384


@triton.jit
def layer_norm_row_per_program(
    out_ptr, x_ptr, weight_ptr, bias_ptr, stride_out_t, stride_x_t, hidden, eps, BLOCK_H: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)  # T * stride can pass 2**31
    offs = tl.arange(0, BLOCK_H)
    mask = offs < hidden
    x = tl.load(x_ptr + row * stride_x_t + offs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_H]
    normalized = layer_normalized(x, mask, hidden, eps, 0)
    weight = tl.load(weight_ptr + offs, mask=mask).to(tl.float32)
    bias = tl.load(bias_ptr + offs, mask=mask).to(tl.float32)
    out = (normalized * weight + bias).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride_out_t + offs, out, mask=mask)


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
    arguments = pointers("out[t] x[t] weight bias", out, x, weight, bias)
    launch_rows(run, layer_norm_row_per_program, arguments, x.shape, eps)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return too_wide(axes, "H", WIDEST, "leave a program's registers")


VARIANT = Variant(
    wins="rows up to 16k wide, and enough of them to fill the device",
    launch=launch,
    configs=ROW_CONFIGS,
    supports=supports,
    # 8 warps keep a thread at 16 elements for widths of 2k to 4k, two 16-byte loads in flight.
    default={"": Config(num_warps=8)},
    key=("H",),
    deterministic=True,
    batch_invariant=True,
)
