"""As many programs as the device has multiprocessors walk the tiles of the output, a band of rows at a time.

Wins where there are many more tiles than multiprocessors: no program waits to be scheduled, and the loads of the next
tile's first operands overlap the last tile's stores. Tiles are visited GROUP_M rows deep before the next column, so
that the programs running together share their operands in the L2 cache.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.language import dot
from tkernels.ops.arguments import pointers
from tkernels.ops.products import order_of_tile, persistent_grid, tile_configs

CONFIGS = tile_configs(
    (
        (16, 64, 128, 4, 4),
        (16, 128, 128, 4, 4),
        (32, 64, 128, 4, 4),
        (64, 64, 64, 4, 4),
        (64, 128, 64, 4, 4),
        (64, 256, 64, 8, 3),
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 256, 64, 8, 3),
    ),
    GROUP_M=8,
)


@triton.jit
def matmul_persistent_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row, column) of a tile: GROUP_M rows of tiles deep before the next column."""
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    depth = min(GROUP_M, tiles_m - first_m)
    inside = tile % (GROUP_M * tiles_n)
    return first_m + inside % depth, inside // depth


@triton.jit(do_not_specialize=["tokens"])
def matmul_persistent(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    stride_out_m,
    stride_x_m,
    stride_weight_n,
    tokens,
    outputs,
    inputs,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(tokens, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = matmul_persistent_tile(tile, tiles_m, tiles_n, GROUP_M)
        # M * stride and N * stride can pass 2**31.
        offs_m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_m, mask_n = offs_m < tokens, offs_n < outputs
        x_ptrs = x_ptr + offs_m[:, None] * stride_x_m
        weight_ptrs = weight_ptr + offs_n[:, None] * stride_weight_n
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, inputs, BLOCK_K):
            offs_k = start + tl.arange(0, BLOCK_K)
            mask_k = (offs_k < inputs)[None, :]
            x = tl.load(x_ptrs + offs_k[None, :], mask=mask_m[:, None] & mask_k, other=0.0)  # [BLOCK_M, BLOCK_K]
            weight = tl.load(weight_ptrs + offs_k[None, :], mask=mask_n[:, None] & mask_k, other=0.0)
            sums = dot(x, tl.trans(weight), sums)  # [BLOCK_M, BLOCK_K] @ [BLOCK_K, BLOCK_N]
        if bias_ptr is not None:
            sums += tl.load(bias_ptr + offs_n, mask=mask_n).to(tl.float32)[None, :]
        out_ptrs = out_ptr + offs_m[:, None] * stride_out_m + offs_n[None, :]
        tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    block_m, block_n = run.config["BLOCK_M"], run.config["BLOCK_N"]
    if x.element_size() == 4:
        block_n = min(block_n, 64)  # fp32 products run on FMA units, from registers: 64 x 128 spilled 72 bytes on sm_90
    run.launch(
        matmul_persistent,
        persistent_grid(run, tokens, outputs, block_m, block_n),
        **pointers("out[m] x[m] weight[n] bias", out, x, weight, bias),
        tokens=tokens,
        outputs=outputs,
        inputs=inputs,
        **{**run.config, "BLOCK_N": block_n},
    )


VARIANT = Variant(
    wins="many tiles of output: prefill, and wide layers at any number of tokens",
    launch=launch,
    configs=CONFIGS,
    # 64 rows are the least that Hopper's asynchronous matrix units take. One default for every M, or a row's bits would
    # depend on the batch. gfx942 has 64 kB of shared memory: two stages. Interpreted, tiles are the smallest legal
    # ones, so that shapes of the tests cross them.
    default={
        "": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, GROUP_M=8, num_warps=4, num_stages=3),
        "sm_90": Config(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, num_warps=4, num_stages=4),
        "gfx942": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, GROUP_M=8, num_warps=4, num_stages=2),
        "interpreter": Config(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, GROUP_M=2, num_warps=4, num_stages=2),
    },
    key=("M", "N", "K"),
    sum_order=order_of_tile,
    deterministic=True,
    batch_invariant=True,
)
