"""padded_tiles with the weights as e4m3 codes: each tile of them becomes numbers on its way to the matrix units.

Wins from a few pairs for each expert on. A row of x is read for the gate, and again for the up projection: that costs
less than the registers of two tiles of codes at once.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.ops.activations import limit_arguments
from tkernels.ops.arguments import pointers
from tkernels.ops.grouped_matmul._e4m3 import blocks_arguments, expert_block_sums
from tkernels.ops.grouped_matmul._tiles import (
    combine_products,
    pairs_of_tile,
    store_pairs,
    tile_arguments,
)
from tkernels.ops.grouped_matmul.fp8_padded_tiles import launch_fp8_tiles
from tkernels.ops.grouped_matmul.padded_tiles import blocks, grouped_matmul_combine
from tkernels.ops.moe_mlp._shared import activated, fused_buffers, supports_e4m3
from tkernels.ops.sort_by_expert._tables import sorted_by_expert
from tkernels.quantized.row_codes import BLOCK
from tkernels.quantized.stacked_scaled import StackedScaledWeight

CONFIGS = tuple(
    Config(BLOCK_PAIRS=pairs, BLOCK_N=columns, BLOCK_K=depth, num_warps=warps, num_stages=stages)
    for pairs, columns, depth, warps, stages in (
        (16, 32, 128, 4, 3),
        (16, 64, 64, 4, 4),
        (16, 64, 128, 4, 3),
        (32, 64, 128, 4, 3),
        (64, 64, 64, 4, 3),
        (64, 64, 128, 8, 3),
    )
)


@triton.jit
def moe_mlp_fp8_padded_tiles(
    activated_ptr, x_ptr, codes_ptr, scales_ptr, bias_ptr, order_ptr, starts_ptr, tile_expert_ptr, tile_start_ptr,
    stride_activated_p, stride_x_t, stride_codes_e, stride_codes_n, stride_scales_e, stride_scales_n, stride_bias_e,
    width, inputs, top_k, limit, CLAMPED: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """GROUP divides width, as it has to where the second product's inputs are these: gate and up share no block."""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    if expert >= 0:
        pairs, mask_m = pairs_of_tile(order_ptr, starts_ptr, tile_start_ptr, tile, expert, BLOCK_M)
        first_n = tl.program_id(1) * BLOCK_N
        offs_n = first_n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < width
        x_ptrs = x_ptr + (pairs // top_k).to(tl.int64)[:, None] * stride_x_t  # T * stride can pass 2**31
        gate = expert_block_sums(
            x_ptrs, mask_m, codes_ptr, scales_ptr, stride_codes_e, stride_codes_n, stride_scales_e, stride_scales_n,
            expert, first_n, mask_n, inputs, x_ptr.dtype.element_ty, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        up = expert_block_sums(
            x_ptrs, mask_m, codes_ptr, scales_ptr, stride_codes_e, stride_codes_n, stride_scales_e, stride_scales_n,
            expert, width + first_n, mask_n, inputs, x_ptr.dtype.element_ty, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        out = activated(
            gate, up, bias_ptr, stride_bias_e, expert, offs_n[None, :], mask_n[None, :], width, limit, CLAMPED
        )
        store_pairs(activated_ptr, stride_activated_p, out, pairs, mask_m, offs_n, mask_n)


def launch(
    run: Run,
    out: torch.Tensor,
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: StackedScaledWeight,
    down: StackedScaledWeight,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    limit: float | None,
) -> None:
    tile = run.config["BLOCK_PAIRS"]
    with run.section("sort"):
        tables = sorted_by_expert(run, experts, gate_up.shape[0], tile)
    block_n, block_k = blocks(run.config, x, 2 * tile)  # of two sums
    pairs, width = run.workspace["activated"], down.shape[2]
    with run.section("up"):
        run.launch(
            moe_mlp_fp8_padded_tiles,
            (tables[2].shape[0], triton.cdiv(width, block_n)),
            **pointers("activated[p] x[t] bias", pairs, x, gate_up_bias),
            **blocks_arguments(gate_up),
            **tile_arguments(*tables),
            stride_bias_e=0 if gate_up_bias is None else gate_up_bias.stride(0),
            width=width,
            top_k=experts.shape[1],
            **limit_arguments(limit),
            BLOCK_M=tile,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
        )
    with run.section("down"):
        launch_fp8_tiles(run, run.workspace["products"], pairs, down, experts, tile, tables, down_bias)
        combine_products(run, grouped_matmul_combine, out, experts, weights)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    return fused_buffers(axes, config["BLOCK_PAIRS"], device)


VARIANT = Variant(
    wins="e4m3 codes, from a few pairs for each expert on",
    launch=launch,
    configs=CONFIGS,
    workspace=workspace,
    supports=supports_e4m3,
    # By reasoning, not measured, as grouped_matmul's fp8_padded_tiles. Interpreted, a tile is a block wide: narrower
    # ones make more programs of the smallest sizes that there are than tests draw.
    default={
        "": Config(BLOCK_PAIRS=16, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3),
        "sm_90": Config(BLOCK_PAIRS=16, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=4),
        "gfx942": Config(BLOCK_PAIRS=16, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=2),
        "interpreter": Config(BLOCK_PAIRS=16, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=2),
    },
    limits={"BLOCK_N": (16, BLOCK), "BLOCK_K": (16, BLOCK)},
    key=("T", "K", "E", "H", "I"),
    sum_order=lambda config: (config["BLOCK_K"], config["BLOCK_PAIRS"] >= 64),
    deterministic=True,
    batch_invariant=True,
)
