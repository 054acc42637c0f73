"""padded_tiles by as many programs as the device has multiprocessors, which walk the tiles expert by expert.

Wins where there are many tiles: prefill. Programs that run together are GROUP_M tiles of pairs deep in one expert
before they take its next columns of gate and up, so that they share their operands in the L2 cache.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.ops.activations import limit_arguments
from tkernels.ops.arguments import pointers
from tkernels.ops.grouped_matmul._tiles import (
    combine_products,
    pairs_of_tile,
    place_of_tile,
    store_pairs,
    tile_arguments,
)
from tkernels.ops.grouped_matmul.padded_tiles import blocks, grouped_matmul_combine
from tkernels.ops.grouped_matmul.persistent import launch_persistent
from tkernels.ops.moe_mlp._shared import activated, fused_buffers, supports_dense
from tkernels.ops.moe_mlp.padded_tiles import gate_and_up_sums
from tkernels.ops.products import order_of_tile, tile_configs
from tkernels.ops.sort_by_expert._tables import sorted_by_expert

CONFIGS = tile_configs(
    (
        (64, 64, 64, 4, 3),
        (64, 64, 64, 8, 4),
        (64, 128, 64, 8, 3),
        (128, 64, 64, 8, 3),
        (128, 64, 64, 8, 4),
        (128, 128, 64, 8, 3),
    ),
    GROUP_M=8,
)


@triton.jit(do_not_specialize=["tiles_m"])
def moe_mlp_persistent(
    activated_ptr,
    x_ptr,
    gate_up_ptr,
    bias_ptr,
    order_ptr,
    starts_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    stride_activated_p,
    stride_x_t,
    stride_gate_up_e,
    stride_gate_up_n,
    stride_bias_e,
    tiles_m,
    width,
    inputs,
    top_k,
    limit,
    CLAMPED: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_n = tl.cdiv(width, BLOCK_N)
    up_rows = width.to(tl.int64) * stride_gate_up_n  # 2 I * stride can pass 2**31
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = place_of_tile(tile, tiles_m, tiles_n, GROUP_M)
        expert = tl.load(tile_expert_ptr + tile_m)
        if expert >= 0:
            pairs, mask_m = pairs_of_tile(order_ptr, starts_ptr, tile_start_ptr, tile_m, expert, BLOCK_M)
            offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            mask_n = offs_n < width
            # Tokens, experts and their rows times their strides can pass 2**31.
            x_ptrs = x_ptr + (pairs // top_k).to(tl.int64)[:, None] * stride_x_t
            expert_ptr = gate_up_ptr + expert.to(tl.int64) * stride_gate_up_e
            gate_ptrs = expert_ptr + offs_n.to(tl.int64)[:, None] * stride_gate_up_n
            gate, up = gate_and_up_sums(x_ptrs, mask_m, gate_ptrs, up_rows, mask_n, inputs, BLOCK_M, BLOCK_N, BLOCK_K)
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
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    limit: float | None,
) -> None:
    tile = run.config["BLOCK_M"]
    with run.section("sort"):
        tables = sorted_by_expert(run, experts, gate_up.shape[0], tile)
    block_n, block_k = blocks(run.config, x, 2 * tile)  # of two sums
    pairs, width, tiles_m = run.workspace["activated"], down.shape[2], tables[2].shape[0]
    with run.section("up"):
        run.launch(
            moe_mlp_persistent,
            (min(tiles_m * triton.cdiv(width, block_n), run.device.multiprocessors),),
            **pointers("activated[p] x[t] gate_up[en] bias", pairs, x, gate_up, gate_up_bias),
            **tile_arguments(*tables),
            stride_bias_e=0 if gate_up_bias is None else gate_up_bias.stride(0),
            tiles_m=tiles_m,
            width=width,
            inputs=x.shape[1],
            top_k=experts.shape[1],
            **limit_arguments(limit),
            GROUP_M=run.config["GROUP_M"],
            BLOCK_M=tile,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
        )
    with run.section("down"):
        launch_persistent(run, run.workspace["products"], pairs, down, experts, tile, tables, down_bias)
        combine_products(run, grouped_matmul_combine, out, experts, weights)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    return fused_buffers(axes, config["BLOCK_M"], device)


VARIANT = Variant(
    wins="many pairs for each expert: prefill",
    launch=launch,
    configs=CONFIGS,
    workspace=workspace,
    supports=supports_dense,
    region={"T": (513, 2**31 - 1)},
    # By reasoning, not measured: two sums of 128 x 64 over 8 warps are 64 registers a thread. gfx942 has 64 kB of
    # shared memory. Interpreted, tiles are the smallest legal ones, so that shapes of the tests cross them.
    default={
        "": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=3),
        "sm_90": Config(BLOCK_M=128, BLOCK_N=64, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=4),
        "gfx942": Config(BLOCK_M=64, BLOCK_N=32, BLOCK_K=64, GROUP_M=8, num_warps=4, num_stages=2),
        "interpreter": Config(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, GROUP_M=2, num_warps=4, num_stages=2),
    },
    key=("T", "K", "E", "H", "I"),
    sum_order=order_of_tile,
    deterministic=True,
    batch_invariant=True,
)
