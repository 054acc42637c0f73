"""One program takes one row, which it reads once and keeps in registers until its scale is known.

Wins wherever a row fits into a program's registers (K up to 32k): the bytes moved are the minimum, and no reduction
leaves the program.
"""

import torch
import triton
import triton.language as tl

from tkernels import Axes, Config, DeviceFacts, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.ops.rows import ROW_CONFIGS, too_wide
from tkernels.quantized.row_codes import codes_of, reciprocal_of, scale_of, unsupported_codes

WIDEST = 32768


@triton.jit
def quantize_tokens_row_per_program(
    q_ptr,
    scale_ptr,
    x_ptr,
    static_scale_ptr,
    stride_q_m,
    stride_x_m,
    inputs,
    reciprocal,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # M * stride can pass 2**31
    offs = tl.arange(0, BLOCK_K)
    mask = offs < inputs
    x = tl.load(x_ptr + row * stride_x_m + offs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_K]
    scale = scale_of(tl.max(tl.abs(x), axis=0), reciprocal) if static_scale_ptr is None else tl.load(static_scale_ptr)
    tl.store(scale_ptr + row, scale)
    codes = codes_of(x, scale, q_ptr.dtype.element_ty, static_scale_ptr is not None)
    tl.store(q_ptr + row * stride_q_m + offs, codes, mask=mask)


def launch(
    run: Run,
    q: torch.Tensor,
    scale: torch.Tensor,
    x: torch.Tensor,
    dtype: torch.dtype,
    static_scale: torch.Tensor | None,
) -> None:
    tokens, inputs = x.shape
    run.launch(
        quantize_tokens_row_per_program,
        (tokens,),
        **pointers("q[m] scale x[m] static_scale", q, scale, x, static_scale),
        inputs=inputs,
        reciprocal=reciprocal_of(dtype),
        BLOCK_K=triton.next_power_of_2(inputs),
    )


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    wide = too_wide(axes, "K", WIDEST, "leave a program's registers", "two_pass")
    return wide or unsupported_codes(axes, device)


VARIANT = Variant(
    wins="rows up to 32k wide",
    launch=launch,
    configs=ROW_CONFIGS,
    supports=supports,
    # 8 warps keep a thread at 16 elements for widths of 2k to 4k, two 16-byte loads of bf16 in flight and one 16-byte
    # store of codes; 32k are 150 registers a thread, and none spill. gfx942's warps have 64 threads: 4 for the same.
    default={"": Config(num_warps=8), "gfx942": Config(num_warps=4)},
    key=("K",),
    deterministic=True,
    batch_invariant=True,
)
