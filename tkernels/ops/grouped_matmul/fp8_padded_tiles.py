"""padded_tiles with the weights as e4m3 codes: each tile of them becomes numbers on its way to the matrix units.

Wins from a few pairs for each expert on: the codes of an expert are read and converted once for all of them. Inputs
stay in 16 bits, so a product is no faster than a dense one: what is saved is half of the weights' bytes.
"""

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.ops.grouped_matmul._argument import needs_e4m3
from tkernels.ops.grouped_matmul._e4m3 import blocks_arguments, expert_block_sums
from tkernels.ops.grouped_matmul._tiles import (
    combine_products,
    pairs_of_row,
    pairs_of_tile,
    products_of,
    products_workspace,
    store_pairs,
    tile_arguments,
    with_bias,
)
from tkernels.ops.grouped_matmul.padded_tiles import blocks, grouped_matmul_combine
from tkernels.quantized.row_codes import BLOCK
from tkernels.quantized.stacked_scaled import StackedScaledWeight

CONFIGS = tuple(
    Config(BLOCK_N=columns, BLOCK_K=depth, num_warps=warps, num_stages=stages)
    for columns, depth, warps, stages in (
        (32, 128, 4, 4),
        (64, 64, 4, 4),
        (64, 128, 4, 3),
        (64, 128, 4, 4),
        (128, 64, 8, 4),
        (128, 128, 8, 3),
    )
)


@triton.jit(do_not_specialize=["pairs_of_row"])
def grouped_matmul_fp8_padded_tiles(
    out_ptr, x_ptr, codes_ptr, scales_ptr, bias_ptr, order_ptr, starts_ptr, tile_expert_ptr, tile_start_ptr,
    stride_out_m, stride_x_m, stride_codes_e, stride_codes_n, stride_scales_e, stride_scales_n, stride_bias_e, outputs,
    inputs, pairs_of_row, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    if expert >= 0:
        pairs, mask_m = pairs_of_tile(order_ptr, starts_ptr, tile_start_ptr, tile, expert, BLOCK_M)
        first_n = tl.program_id(1) * BLOCK_N
        offs_n = first_n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < outputs
        x_ptrs = x_ptr + (pairs // pairs_of_row).to(tl.int64)[:, None] * stride_x_m  # X * stride can pass 2**31
        sums = expert_block_sums(
            x_ptrs, mask_m, codes_ptr, scales_ptr, stride_codes_e, stride_codes_n, stride_scales_e, stride_scales_n,
            expert, first_n, mask_n, inputs, x_ptr.dtype.element_ty, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        sums = with_bias(sums, bias_ptr, stride_bias_e, expert, offs_n, mask_n)
        store_pairs(out_ptr, stride_out_m, sums, pairs, mask_m, offs_n, mask_n)


def launch_fp8_tiles(
    run: Run,
    out: torch.Tensor,
    x: torch.Tensor,
    weight: StackedScaledWeight,
    experts: torch.Tensor,
    tile: int,
    tables: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
) -> None:
    """Launches the products of all pairs, [T K, N]. tables: order, starts, tile_expert, tile_start."""
    block_n, block_k = blocks(run.config, x, 2 * tile)  # of codes and numbers
    run.launch(
        grouped_matmul_fp8_padded_tiles,
        (tables[2].shape[0], triton.cdiv(weight.shape[1], block_n)),
        **pointers("out[m] x[m] bias", out, x, bias),
        **blocks_arguments(weight),
        **tile_arguments(*tables),
        stride_bias_e=0 if bias is None else bias.stride(0),
        outputs=weight.shape[1],
        pairs_of_row=pairs_of_row(x, experts),
        BLOCK_M=tile,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )


def launch(
    run: Run,
    out: torch.Tensor,
    x: torch.Tensor,
    weight: StackedScaledWeight,
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
    launch_fp8_tiles(run, products, x, weight, experts, tile, tables, bias)
    combine_products(run, grouped_matmul_combine, out, experts, combine)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    return products_workspace(axes)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return needs_e4m3(axes)


VARIANT = Variant(
    wins="e4m3 codes, from a few pairs for each expert on",
    launch=launch,
    configs=CONFIGS,
    workspace=workspace,
    supports=supports,
    # By reasoning, not measured: 128 deep is a block, and a line of 128 bytes for each row of codes. Two tiles of sums
    # are kept, a block's and the total, so that 4 warps would have 244 registers a thread on sm_90 for 128 pairs. One
    # default for every T, or a row's bits would depend on the batch. Interpreted, tiles are the smallest legal ones.
    default={
        "": Config(BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3),
        "sm_90": Config(BLOCK_N=64, BLOCK_K=128, num_warps=8, num_stages=4),
        "sm_120": Config(BLOCK_N=64, BLOCK_K=64, num_warps=8, num_stages=3),
        "gfx942": Config(BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=2),
        "interpreter": Config(BLOCK_N=32, BLOCK_K=64, num_warps=4, num_stages=2),
    },
    limits={"BLOCK_N": (16, BLOCK), "BLOCK_K": (16, BLOCK)},
    key=("T", "K", "E", "N", "C", "tile"),
    sum_order=lambda config: config["BLOCK_K"],
    deterministic=True,
    batch_invariant=True,
)
