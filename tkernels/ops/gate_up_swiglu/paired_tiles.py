"""One program multiplies a tile of rows with a tile of gate columns and with the tile of up columns that belongs to it,
and writes silu(gate) * up.

Wins where there are many tiles of output: gate and up never leave their fp32 accumulators, which saves 4TI elements of
traffic, a launch and a rounding, and x is read from shared memory once for both products. As many programs as the
device has multiprocessors walk the tiles, GROUP_M rows deep before the next column, so that the programs running
together share their operands in the L2 cache.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.language import dot, wait_for_earlier_launches
from tkernels.ops.activations import swiglu_of
from tkernels.ops.arguments import pointers
from tkernels.ops.products import order_of_tile, persistent_grid, prefetch_columns, tile_configs

CONFIGS = (
    *tile_configs(
        (
            (16, 32, 128, 4, 4),
            (16, 64, 128, 4, 3),
            (32, 64, 64, 4, 4),
            (64, 32, 64, 4, 4),
            (64, 64, 32, 4, 3),
            (64, 64, 64, 8, 4),
            (64, 64, 64, 4, 3),
            (64, 64, 64, 4, 4),
            (64, 128, 64, 8, 3),
            (128, 64, 64, 4, 3),
            (128, 64, 64, 8, 3),
            (128, 64, 64, 8, 4),
            (128, 128, 64, 8, 3),
        ),
        GROUP_M=8,
    ),
    Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=4, launch_pdl=1),
)


@triton.jit(do_not_specialize=["tokens"])
def gate_up_swiglu_paired_tiles(
    out_ptr,
    x_ptr,
    weight_ptr,
    stride_out_t,
    stride_x_t,
    stride_weight_n,
    tokens,
    width,
    inputs,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY_TILES: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(tokens, BLOCK_M), tl.cdiv(width, BLOCK_N)
    up_rows = width.to(tl.int64) * stride_weight_n  # from a gate row to its up row; 2I * stride can pass 2**31
    # Few tokens make one row of tiles, and the first of a program's may be its only one.
    prefetch_columns(
        weight_ptr, stride_weight_n, tl.program_id(0) // min(GROUP_M, tiles_m) * BLOCK_N, width, inputs,
        BLOCK_N, EARLY_TILES * BLOCK_K,
    )  # fmt: skip
    prefetch_columns(
        weight_ptr + up_rows, stride_weight_n, tl.program_id(0) // min(GROUP_M, tiles_m) * BLOCK_N, width, inputs,
        BLOCK_N, EARLY_TILES * BLOCK_K,
    )  # fmt: skip
    wait_for_earlier_launches()
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        first_m = tile // (GROUP_M * tiles_n) * GROUP_M
        depth = min(GROUP_M, tiles_m - first_m)
        inside = tile % (GROUP_M * tiles_n)
        # T * stride and I * stride can pass 2**31.
        offs_m = (first_m + inside % depth).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = (inside // depth).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_m, mask_n = offs_m < tokens, offs_n < width
        x_ptrs = x_ptr + offs_m[:, None] * stride_x_t
        gate_ptrs = weight_ptr + offs_n[:, None] * stride_weight_n
        gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, inputs, BLOCK_K):
            offs_k = start + tl.arange(0, BLOCK_K)
            mask_k = (offs_k < inputs)[None, :]
            mask_weight = mask_n[:, None] & mask_k
            x = tl.load(x_ptrs + offs_k[None, :], mask=mask_m[:, None] & mask_k, other=0.0)  # [BLOCK_M, BLOCK_K]
            gate_weight = tl.load(gate_ptrs + offs_k[None, :], mask=mask_weight, other=0.0)
            up_weight = tl.load(gate_ptrs + up_rows + offs_k[None, :], mask=mask_weight, other=0.0)
            gate = dot(x, tl.trans(gate_weight), gate)  # [BLOCK_M, BLOCK_K] @ [BLOCK_K, BLOCK_N]
            up = dot(x, tl.trans(up_weight), up)
        out = swiglu_of(gate, up, 0.0, False).to(out_ptr.dtype.element_ty)
        out_ptrs = out_ptr + offs_m[:, None] * stride_out_t + offs_n[None, :]
        tl.store(out_ptrs, out, mask=mask_m[:, None] & mask_n[None, :])


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    tokens, width = out.shape
    block_n, block_k = run.config["BLOCK_N"], run.config["BLOCK_K"]
    if x.element_size() == 4:
        # fp32 is multiplied outside the matrix units, from registers: two sums of 64 x 64 spilled 28 bytes on sm_80.
        block_n, block_k = min(block_n, 32), min(block_k, 32)
    run.launch(
        gate_up_swiglu_paired_tiles,
        persistent_grid(run, tokens, width, run.config["BLOCK_M"], block_n),
        **pointers("out[t] x[t] weight[n]", out, x, weight),
        tokens=tokens,
        width=width,
        inputs=x.shape[1],
        **{**run.config, "BLOCK_N": block_n, "BLOCK_K": block_k},
        EARLY_TILES=run.early_tiles,
    )


VARIANT = Variant(
    wins="many tiles of output: prefill, where gate and up would go to memory and back",
    launch=launch,
    configs=CONFIGS,
    # 64 rows are the least that Hopper's asynchronous matrix units take. One config for every T, or a row's bits would
    # depend on the batch. Depth and warps are what does not spill at shapes that are not multiples of 16 bytes, whose
    # operands pass through registers: with 4 warps, a depth of 64 spills 328 bytes there on sm_90 and 672 on sm_80.
    # gfx942 has 64 kB of shared memory: two stages. Interpreted, tiles are the smallest legal ones, so that shapes of
    # the tests cross them.
    default={
        "": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8, num_warps=4, num_stages=3),
        "sm_90": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=4),
        "gfx942": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, GROUP_M=8, num_warps=4, num_stages=2),
        "interpreter": Config(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, GROUP_M=2, num_warps=4, num_stages=2),
    },
    key=("T", "I", "H"),
    sum_order=order_of_tile,
    deterministic=True,
    batch_invariant=True,
)
