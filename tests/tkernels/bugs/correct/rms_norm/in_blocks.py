"""One program normalizes one row, which it reads twice, block by block."""

import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.ops.arguments import pointers


@triton.jit
def rms_norm_in_blocks(out_ptr, x_ptr, weight_ptr, stride_out_t, stride_x_t, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_x_t + offs, mask=offs < columns, other=0.0).to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, axis=0) / columns + eps)
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < columns
        x = tl.load(x_ptr + row * stride_x_t + offs, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * stride_out_t + offs, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def launch(run: Run, out, x, weight, eps) -> None:
    rows, columns = x.shape
    run.launch(
        rms_norm_in_blocks,
        (rows,),
        **pointers("out[t] x[t] weight", out, x, weight),
        columns=columns,
        eps=eps,
        BLOCK=run.config["BLOCK"],
    )


VARIANT = Variant(
    wins="never: it is as short as can be",
    launch=launch,
    default={"": Config(BLOCK=1024), "interpreter": Config(BLOCK=64)},
    deterministic=True,
    batch_invariant=True,
)
