"""One program adds and normalizes as many rows as fill its tile, and reads weight and bias once for all of them.

Wins for narrow rows (H up to 2048), of which one alone leaves most threads of a program without a 16-byte access.
"""

import torch
import triton
import triton.language as tl

from tkernels import Axes, DeviceFacts, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.ops.rows import TILE_CONFIGS, TILE_DEFAULTS, launch_tiles_of_rows, layer_normalized, too_wide

WIDEST = 2048


@triton.jit(do_not_specialize=["tokens"])
def add_layer_norm_rows_per_program(
    out_ptr,
    new_residual_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    stride_out_t,
    stride_x_t,
    stride_residual_t,
    tokens,
    hidden,
    eps,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # T * stride can pass 2**31
    offs = tl.arange(0, BLOCK_H)[None, :]
    mask = (rows < tokens) & (offs < hidden)
    x = tl.load(x_ptr + rows * stride_x_t + offs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK_H]
    residual = tl.load(residual_ptr + rows * stride_residual_t + offs, mask=mask, other=0.0).to(tl.float32)
    total = x + residual
    # The norm goes on with the sum in fp32; what is stored is rounded once, laid out as `out` is.
    new_residual = total.to(new_residual_ptr.dtype.element_ty)
    tl.store(new_residual_ptr + rows * stride_out_t + offs, new_residual, mask=mask)
    # Along the row alone, by threads whose places follow from BLOCK_T and BLOCK_H: no row's bits depend on another's.
    normalized = layer_normalized(total, offs < hidden, hidden, eps, 1)
    weight = tl.load(weight_ptr + offs, mask=offs < hidden).to(tl.float32)  # [1, BLOCK_H]
    bias = tl.load(bias_ptr + offs, mask=offs < hidden).to(tl.float32)
    out = (normalized * weight + bias).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows * stride_out_t + offs, out, mask=mask)


def launch(
    run: Run,
    out: torch.Tensor,
    new_residual: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> None:
    tensors = (out, new_residual, x, residual, weight, bias)
    arguments = pointers("out[t] new_residual x[t] residual[t] weight bias", *tensors)
    launch_tiles_of_rows(run, add_layer_norm_rows_per_program, arguments, x.shape, eps)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return too_wide(axes, "H", WIDEST, "fill a program each", "row_per_program")


VARIANT = Variant(
    wins="rows up to 2048 wide, many of them",
    region={"H": (1, 2048), "T": (512, 2**31 - 1)},
    launch=launch,
    configs=TILE_CONFIGS,
    supports=supports,
    default=TILE_DEFAULTS,
    key=("H",),
    deterministic=True,
    batch_invariant=True,
)
