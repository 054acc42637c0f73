"""One program computes one tile of rows and columns, which it reads and writes once.

Wins wherever the activation stands alone, behind a quantized layer: it moves the bytes that there are to move.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.ops.activations import gelu_of
from tkernels.ops.arguments import pointers

CONFIGS = tuple(
    Config(BLOCK_T=rows, BLOCK_I=columns, num_warps=warps)
    for rows, columns, warps in ((1, 256, 1), (1, 512, 2), (1, 1024, 4), (1, 2048, 4), (2, 1024, 8), (4, 256, 4))
)


@triton.jit(do_not_specialize=["tokens"])
def gelu_tile_per_program(
    out_ptr,
    x_ptr,
    stride_out_t,
    stride_x_t,
    tokens,
    width,
    TANH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # T * stride can pass 2**31
    columns = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = (rows < tokens)[:, None] & (columns < width)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_x_t + columns[None, :], mask=mask).to(tl.float32)  # [BLOCK_T, BLOCK_I]
    out = gelu_of(x, TANH).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * stride_out_t + columns[None, :], out, mask=mask)


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, tanh: bool) -> None:
    tokens, width = x.shape
    run.launch(
        gelu_tile_per_program,
        (triton.cdiv(tokens, run.config["BLOCK_T"]), triton.cdiv(width, run.config["BLOCK_I"])),
        **pointers("out[t] x[t]", out, x),
        tokens=tokens,
        width=width,
        TANH=tanh,
        **run.config,
    )


VARIANT = Variant(
    wins="wherever the activation is not another kernel's end",
    launch=launch,
    configs=CONFIGS,
    # 8 elements a thread: one 16-byte load, and enough programs at one token. gfx942 has 64 threads in a warp.
    # Interpreted, tiles have two rows, so that rows past the end occur.
    default={
        "": Config(BLOCK_T=1, BLOCK_I=1024),
        "gfx942": Config(BLOCK_T=1, BLOCK_I=1024, num_warps=2),
        "interpreter": Config(BLOCK_T=2, BLOCK_I=1024),
    },
    key=("I",),
    deterministic=True,
    batch_invariant=True,
)
