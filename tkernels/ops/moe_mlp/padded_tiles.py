"""grouped_matmul's padded_tiles with swiglu at the end of the first product, and the sort before it.

Wins where experts have a few pairs each: gate and up never leave their fp32 accumulators, which saves 4 T K I elements
of traffic, a launch and a rounding, and a row of x is read once for both.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.language import dot
from tkernels.ops.activations import limit_arguments
from tkernels.ops.arguments import pointers
from tkernels.ops.grouped_matmul._tiles import (
    combine_products,
    pairs_of_tile,
    store_pairs,
    tile_arguments,
)
from tkernels.ops.grouped_matmul.padded_tiles import blocks, grouped_matmul_combine, launch_tiles
from tkernels.ops.moe_mlp._shared import activated, fused_buffers, supports_dense
from tkernels.ops.sort_by_expert._tables import sorted_by_expert

CONFIGS = tuple(
    Config(BLOCK_PAIRS=pairs, BLOCK_N=columns, BLOCK_K=depth, num_warps=warps, num_stages=stages)
    for pairs, columns, depth, warps, stages in (
        (16, 32, 128, 4, 3),
        (16, 64, 64, 4, 4),
        (16, 64, 128, 4, 3),
        (16, 128, 64, 8, 3),
        (32, 64, 64, 4, 4),
        (32, 64, 128, 8, 3),
        (64, 64, 64, 4, 3),
        (64, 64, 64, 8, 4),
        (64, 128, 64, 8, 3),
        (128, 64, 64, 8, 3),
    )
)


@triton.jit
def gate_and_up_sums(
    x_ptrs, mask_m, gate_ptrs, up_rows, mask_n, inputs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows of x times rows of an expert's gate, and of its up projection, `up_rows` elements further: in fp32."""
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
    return gate, up


@triton.jit
def moe_mlp_padded_tiles(
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
    width,
    inputs,
    top_k,
    limit,
    CLAMPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    if expert >= 0:
        pairs, mask_m = pairs_of_tile(order_ptr, starts_ptr, tile_start_ptr, tile, expert, BLOCK_M)
        offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < width
        # Tokens, experts and their rows times their strides can pass 2**31.
        x_ptrs = x_ptr + (pairs // top_k).to(tl.int64)[:, None] * stride_x_t
        gate_ptrs = (
            gate_up_ptr + expert.to(tl.int64) * stride_gate_up_e + offs_n.to(tl.int64)[:, None] * stride_gate_up_n
        )
        up_rows = width.to(tl.int64) * stride_gate_up_n
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
    tile = run.config["BLOCK_PAIRS"]
    with run.section("sort"):
        tables = sorted_by_expert(run, experts, gate_up.shape[0], tile)
    block_n, block_k = blocks(run.config, x, 2 * tile)  # of two sums
    pairs, width = run.workspace["activated"], down.shape[2]
    with run.section("up"):
        run.launch(
            moe_mlp_padded_tiles,
            (tables[2].shape[0], triton.cdiv(width, block_n)),
            **pointers("activated[p] x[t] gate_up[en] bias", pairs, x, gate_up, gate_up_bias),
            **tile_arguments(*tables),
            stride_bias_e=0 if gate_up_bias is None else gate_up_bias.stride(0),
            width=width,
            inputs=x.shape[1],
            top_k=experts.shape[1],
            **limit_arguments(limit),
            BLOCK_M=tile,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
        )
    with run.section("down"):
        launch_tiles(run, run.workspace["products"], pairs, down, experts, tile, tables, down_bias)
        combine_products(run, grouped_matmul_combine, out, experts, weights)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    return fused_buffers(axes, config["BLOCK_PAIRS"], device)


VARIANT = Variant(
    wins="a few pairs for each expert: decoding in batches",
    launch=launch,
    configs=CONFIGS,
    workspace=workspace,
    supports=supports_dense,
    # By reasoning, not measured: 16 pairs, the fewest that the matrix units take, for 64 tokens of Qwen3-30B-A3B are 4
    # pairs for each expert. One default for every T, or a row's bits would depend on the batch. gfx942 has 64 kB of
    # shared memory. Interpreted, tiles are the smallest legal ones, so that shapes of the tests cross them.
    default={
        "": Config(BLOCK_PAIRS=16, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=4),
        "gfx942": Config(BLOCK_PAIRS=16, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=2),
        "interpreter": Config(BLOCK_PAIRS=16, BLOCK_N=16, BLOCK_K=32, num_warps=4, num_stages=2),
    },
    key=("T", "K", "E", "H", "I"),
    sum_order=lambda config: (config["BLOCK_K"], config["BLOCK_PAIRS"] >= 64),
    deterministic=True,
    batch_invariant=True,
)
