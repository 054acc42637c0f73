"""One program computes one tile of rows and columns: both halves are read once, the activation stays in registers.

Wins for small and middling batches: every tile is a program of its own, so that even one token spreads over the
device, and where the grid is a few waves at most there is no tail to save.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.language import wait_for_earlier_launches
from tkernels.ops.activations import limit_arguments, swiglu_of
from tkernels.ops.arguments import pointers

CONFIGS = (
    *(
        Config(BLOCK_T=rows, BLOCK_I=columns, num_warps=warps)
        for rows, columns, warps in ((1, 256, 1), (1, 512, 2), (1, 1024, 4), (1, 2048, 4), (2, 1024, 8), (4, 256, 4))
    ),
    Config(BLOCK_T=1, BLOCK_I=1024, num_warps=4, launch_pdl=1),
)


@triton.jit(do_not_specialize=["tokens"])
def swiglu_fused(
    out_ptr,
    gate_up_ptr,
    stride_out_t,
    stride_gate_up_t,
    tokens,
    width,
    limit,
    CLAMPED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # T * stride can pass 2**31
    columns = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = (rows < tokens)[:, None] & (columns < width)[None, :]
    wait_for_earlier_launches()
    gate_ptrs = gate_up_ptr + rows[:, None] * stride_gate_up_t + columns[None, :]
    gate = tl.load(gate_ptrs, mask=mask).to(tl.float32)  # [BLOCK_T, BLOCK_I]
    up = tl.load(gate_ptrs + width, mask=mask).to(tl.float32)
    out = swiglu_of(gate, up, limit, CLAMPED).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * stride_out_t + columns[None, :], out, mask=mask)


def launch(run: Run, out: torch.Tensor, gate_up: torch.Tensor, limit: float | None) -> None:
    tokens, width = out.shape
    run.launch(
        swiglu_fused,
        (triton.cdiv(tokens, run.config["BLOCK_T"]), triton.cdiv(width, run.config["BLOCK_I"])),
        **pointers("out[t] gate_up[t]", out, gate_up),
        tokens=tokens,
        width=width,
        **limit_arguments(limit),
        **run.config,
    )


VARIANT = Variant(
    wins="batches of up to a few waves of tiles, single tokens among them",
    launch=launch,
    configs=CONFIGS,
    # 8 elements a thread: one 16-byte load from each half, and enough programs at one token. gfx942 has 64 threads in a
    # warp. Interpreted, tiles have two rows, so that rows past the end occur.
    default={
        "": Config(BLOCK_T=1, BLOCK_I=1024),
        "gfx942": Config(BLOCK_T=1, BLOCK_I=1024, num_warps=2),
        "interpreter": Config(BLOCK_T=2, BLOCK_I=1024),
    },
    key=("I",),
    deterministic=True,
    batch_invariant=True,
)
