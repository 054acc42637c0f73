"""As many programs as the device has multiprocessors walk the list of tiles, expert by expert.

Wins where there are many tiles: prefill. Programs that run together are GROUP_M tiles of pairs deep in one expert
before they take its next outputs, so that they share their operands in the L2 cache, and no program is started for
the tiles that the bound on their number has too many.
"""

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.ops.grouped_matmul._argument import needs_dense
from tkernels.ops.grouped_matmul._tiles import (
    combine_products,
    expert_sums,
    pairs_of_row,
    pairs_of_tile,
    place_of_tile,
    products_of,
    products_workspace,
    store_pairs,
    tile_arguments,
    with_bias,
)
from tkernels.ops.grouped_matmul.padded_tiles import blocks, grouped_matmul_combine

CONFIGS = tuple(
    Config(BLOCK_N=columns, BLOCK_K=depth, GROUP_M=8, num_warps=warps, num_stages=stages)
    for columns, depth, warps, stages in (
        (64, 64, 4, 3),
        (64, 64, 4, 4),
        (128, 64, 4, 3),
        (128, 64, 4, 4),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (256, 64, 8, 3),
        (256, 64, 8, 4),
    )
)


@triton.jit(do_not_specialize=["tiles_m", "pairs_of_row"])
def grouped_matmul_persistent(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    order_ptr,
    starts_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    stride_out_m,
    stride_x_m,
    stride_weight_e,
    stride_weight_n,
    stride_bias_e,
    tiles_m,
    outputs,
    inputs,
    pairs_of_row,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_n = tl.cdiv(outputs, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = place_of_tile(tile, tiles_m, tiles_n, GROUP_M)
        expert = tl.load(tile_expert_ptr + tile_m)
        if expert >= 0:
            pairs, mask_m = pairs_of_tile(order_ptr, starts_ptr, tile_start_ptr, tile_m, expert, BLOCK_M)
            offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            mask_n = offs_n < outputs
            # Rows of x times their stride, experts and their rows times theirs can pass 2**31.
            x_ptrs = x_ptr + (pairs // pairs_of_row).to(tl.int64)[:, None] * stride_x_m
            expert_ptr = weight_ptr + expert.to(tl.int64) * stride_weight_e
            weight_ptrs = expert_ptr + offs_n.to(tl.int64)[:, None] * stride_weight_n
            sums = expert_sums(x_ptrs, mask_m, weight_ptrs, mask_n, inputs, BLOCK_M, BLOCK_N, BLOCK_K)
            sums = with_bias(sums, bias_ptr, stride_bias_e, expert, offs_n, mask_n)
            store_pairs(out_ptr, stride_out_m, sums, pairs, mask_m, offs_n, mask_n)


def launch_persistent(
    run: Run,
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    experts: torch.Tensor,
    tile: int,
    tables: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
) -> None:
    """Launches the products of all pairs, [T K, N]. tables: order, starts, tile_expert, tile_start."""
    block_n, block_k = blocks(run.config, x, tile)
    tiles_m = tables[2].shape[0]
    run.launch(
        grouped_matmul_persistent,
        (min(tiles_m * triton.cdiv(weight.shape[1], block_n), run.device.multiprocessors),),
        **pointers("out[m] x[m] weight[en] bias", out, x, weight, bias),
        **tile_arguments(*tables),
        stride_bias_e=0 if bias is None else bias.stride(0),
        tiles_m=tiles_m,
        outputs=weight.shape[1],
        inputs=weight.shape[2],
        pairs_of_row=pairs_of_row(x, experts),
        GROUP_M=run.config["GROUP_M"],
        BLOCK_M=tile,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )


def launch(
    run: Run,
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    experts: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    tile: int,
    tile_expert: torch.Tensor,
    tile_start: torch.Tensor,
    bias: torch.Tensor | None,
    combine: torch.Tensor | None,
) -> None:
    products, tables = products_of(run, out, combine), (order, starts, tile_expert, tile_start)
    launch_persistent(run, products, x, weight, experts, tile, tables, bias)
    combine_products(run, grouped_matmul_combine, out, experts, combine)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    return products_workspace(axes)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return needs_dense(axes)


VARIANT = Variant(
    wins="many pairs for each expert: prefill",
    launch=launch,
    configs=CONFIGS,
    workspace=workspace,
    supports=supports,
    region={"T": (513, 2**31 - 1)},
    # By reasoning, not measured: a tile of 128 pairs and 128 outputs has a warp for each 32 x 64 of it. gfx942 has 64
    # kB of shared memory. Interpreted, tiles are the smallest legal ones, so that shapes of the tests cross them.
    default={
        "": Config(BLOCK_N=64, BLOCK_K=64, GROUP_M=8, num_warps=4, num_stages=3),
        "sm_90": Config(BLOCK_N=128, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=4),
        "gfx942": Config(BLOCK_N=64, BLOCK_K=64, GROUP_M=8, num_warps=4, num_stages=2),
        "interpreter": Config(BLOCK_N=16, BLOCK_K=32, GROUP_M=2, num_warps=4, num_stages=2),
    },
    key=("T", "K", "E", "N", "C", "tile"),
    sum_order=lambda config: config["BLOCK_K"],
    deterministic=True,
    batch_invariant=True,
)
