"""One program multiplies a tile of one expert's pairs with a tile of its outputs, gathering and scattering rows.

Wins where experts have a few pairs each: an expert's weight is read once for all of them, and no row is copied into an
order of its own first. Only a tile's index table is padded, never what is read or written. Programs that run together
multiply neighbouring tiles of pairs with the same outputs.
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
    products_of,
    products_workspace,
    store_pairs,
    tile_arguments,
    with_bias,
)

CONFIGS = tuple(
    Config(BLOCK_N=columns, BLOCK_K=depth, num_warps=warps, num_stages=stages)
    for columns, depth, warps, stages in (
        (32, 128, 4, 4),
        (64, 64, 4, 4),
        (64, 128, 4, 3),
        (64, 128, 4, 4),
        (128, 64, 4, 3),
        (128, 64, 4, 4),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (128, 128, 8, 3),
        (256, 64, 8, 3),
    )
)


@triton.jit(do_not_specialize=["pairs_of_row"])
def grouped_matmul_padded_tiles(
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
    outputs,
    inputs,
    pairs_of_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    if expert >= 0:
        pairs, mask_m = pairs_of_tile(order_ptr, starts_ptr, tile_start_ptr, tile, expert, BLOCK_M)
        offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < outputs
        # Rows of x times their stride, experts and their rows times theirs can pass 2**31.
        x_ptrs = x_ptr + (pairs // pairs_of_row).to(tl.int64)[:, None] * stride_x_m
        weight_ptrs = (
            weight_ptr + expert.to(tl.int64) * stride_weight_e + offs_n.to(tl.int64)[:, None] * stride_weight_n
        )
        sums = expert_sums(x_ptrs, mask_m, weight_ptrs, mask_n, inputs, BLOCK_M, BLOCK_N, BLOCK_K)
        sums = with_bias(sums, bias_ptr, stride_bias_e, expert, offs_n, mask_n)
        store_pairs(out_ptr, stride_out_m, sums, pairs, mask_m, offs_n, mask_n)


@triton.jit(do_not_specialize=["tokens"])
def grouped_matmul_combine(
    out_ptr,
    products_ptr,
    experts_ptr,
    combine_ptr,
    stride_out_t,
    stride_products_p,
    stride_experts_t,
    stride_combine_t,
    tokens,
    outputs,
    top_k,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out [T, N] = the sum of a token's products [T K, N], each times its weight, in the order of its choices."""
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # T K * stride can pass 2**31
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_t, mask_n = offs_t < tokens, (offs_n < outputs)[None, :]
    sums = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for choice in range(top_k):
        counts = tl.load(experts_ptr + offs_t * stride_experts_t + choice, mask=mask_t, other=-1) >= 0
        weight = tl.load(combine_ptr + offs_t * stride_combine_t + choice, mask=counts, other=0.0)
        row_ptrs = products_ptr + (offs_t * top_k + choice)[:, None] * stride_products_p
        products = tl.load(row_ptrs + offs_n[None, :], mask=counts[:, None] & mask_n, other=0.0)
        sums += products * weight[:, None]
    out_ptrs = out_ptr + offs_t[:, None] * stride_out_t + offs_n[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask_t[:, None] & mask_n)


def blocks(config: Config, x: torch.Tensor, tile: int) -> tuple[int, int]:
    """BLOCK_N and BLOCK_K of a launch."""
    block_n, block_k = config["BLOCK_N"], config["BLOCK_K"]
    if x.element_size() == 4:  # fp32 products run on FMA units, from registers: larger ones spill
        return min(block_n, 4096 // tile), min(block_k, 32)
    return block_n, block_k


def launch_tiles(
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
    run.launch(
        grouped_matmul_padded_tiles,
        (tables[2].shape[0], triton.cdiv(weight.shape[1], block_n)),
        **pointers("out[m] x[m] weight[en] bias", out, x, weight, bias),
        **tile_arguments(*tables),
        stride_bias_e=0 if bias is None else bias.stride(0),
        outputs=weight.shape[1],
        inputs=weight.shape[2],
        pairs_of_row=pairs_of_row(x, experts),
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
    launch_tiles(run, products, x, weight, experts, tile, tables, bias)
    combine_products(run, grouped_matmul_combine, out, experts, combine)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    return products_workspace(axes)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return needs_dense(axes)


VARIANT = Variant(
    wins="a few pairs for each expert: decoding in batches",
    launch=launch,
    configs=CONFIGS,
    workspace=workspace,
    supports=supports,
    # By reasoning, not measured: 128 outputs deep enough that a tile of 16 pairs is nothing beside the weight's bytes.
    # One default for every T, or a row's bits would depend on the batch. gfx942 has 64 kB of shared memory.
    # Interpreted, tiles are the smallest legal ones, so that shapes of the tests cross them.
    default={
        "": Config(BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3),
        "sm_90": Config(BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=4),
        "gfx942": Config(BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=2),
        "interpreter": Config(BLOCK_N=16, BLOCK_K=32, num_warps=4, num_stages=2),
    },
    key=("T", "K", "E", "N", "C", "tile"),
    sum_order=lambda config: config["BLOCK_K"],
    deterministic=True,
    batch_invariant=True,
)
