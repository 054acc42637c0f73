"""A fixed number of programs, set by the multiprocessors, strides over all tiles and prefetches the next while it
computes.

Wins for large batches: there is one wave whatever the batch, no program start for each kilobyte, and the loads of the
tiles to come are in flight (a software pipeline) while this one's exponentials are computed.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.ops.activations import limit_arguments, swiglu_of
from tkernels.ops.arguments import pointers

CONFIGS = tuple(
    Config(BLOCK_I=columns, PROGRAMS_PER_SM=programs, num_warps=warps, num_stages=stages)
    for columns, programs, warps in ((512, 16, 2), (1024, 8, 4), (1024, 16, 4), (2048, 8, 4), (2048, 8, 8))
    for stages in (2, 3, 4)
)


@triton.jit(do_not_specialize=["tiles", "programs"])
def swiglu_grid_stride(
    out_ptr,
    gate_up_ptr,
    stride_out_t,
    stride_gate_up_t,
    width,
    tiles,
    tiles_per_row,
    programs,
    limit,
    CLAMPED: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
):
    for tile in tl.range(tl.program_id(0), tiles, programs, num_stages=STAGES):
        row = (tile // tiles_per_row).to(tl.int64)  # T * stride can pass 2**31
        columns = (tile % tiles_per_row) * BLOCK_I + tl.arange(0, BLOCK_I)
        mask = columns < width
        gate_ptrs = gate_up_ptr + row * stride_gate_up_t + columns
        gate = tl.load(gate_ptrs, mask=mask).to(tl.float32)  # [BLOCK_I]
        up = tl.load(gate_ptrs + width, mask=mask).to(tl.float32)
        out = swiglu_of(gate, up, limit, CLAMPED).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * stride_out_t + columns, out, mask=mask)


def launch(run: Run, out: torch.Tensor, gate_up: torch.Tensor, limit: float | None) -> None:
    tokens, width = out.shape
    block = run.config["BLOCK_I"]
    tiles_per_row = triton.cdiv(width, block)
    tiles = tokens * tiles_per_row
    programs = min(tiles, run.device.multiprocessors * run.config["PROGRAMS_PER_SM"])
    run.launch(
        swiglu_grid_stride,
        (programs,),
        **pointers("out[t] gate_up[t]", out, gate_up),
        width=width,
        tiles=tiles,
        tiles_per_row=tiles_per_row,
        programs=programs,
        **limit_arguments(limit),
        BLOCK_I=block,
        STAGES=run.config.num_stages,
    )


VARIANT = Variant(
    wins="large batches: one wave of programs, whose next tiles are on their way while this one is computed",
    region={"T": (256, 2**31 - 1)},
    launch=launch,
    configs=CONFIGS,
    # 8 programs of 4 warps fill half of a multiprocessor's 64 warps; three stages make up for the other half. gfx942
    # has 64 threads in a warp. Interpreted, 4 programs have several tiles each.
    default={
        "": Config(BLOCK_I=1024, PROGRAMS_PER_SM=8, num_stages=3),
        "gfx942": Config(BLOCK_I=1024, PROGRAMS_PER_SM=8, num_warps=2, num_stages=3),
        "interpreter": Config(BLOCK_I=64, PROGRAMS_PER_SM=1),
    },
    key=("I",),
    deterministic=True,
    batch_invariant=True,
)
