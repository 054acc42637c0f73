"""What the tiles of grouped products share: their pairs, their sums, and how a token's choices become one."""

from typing import Any

import torch
import triton
import triton.language as tl

from tkernels.contract import Axes
from tkernels.language import dot
from tkernels.launch import Run
from tkernels.ops.arguments import pointers
from tkernels.workspace import Buffer

COMBINED_AT_A_TIME = 1024
"""Results of one program that adds choices up: 8 of each choice a thread, two loads of 16 bytes."""


@triton.jit
def pairs_of_tile(order_ptr, starts_ptr, tile_start_ptr, tile, expert, BLOCK_M: tl.constexpr):
    """The pairs of a tile of this expert, [BLOCK_M], and which of them there are."""
    places = tl.load(tile_start_ptr + tile) + tl.arange(0, BLOCK_M)
    mask = places < tl.load(starts_ptr + expert + 1)
    return tl.load(order_ptr + places, mask=mask, other=0), mask


@triton.jit
def place_of_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(tile of pairs, tile of outputs) of a program's next tile: GROUP_M tiles of pairs before the next outputs.

    Tiles of one expert follow each other, so what runs at once shares its weight in the L2 cache.
    """
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    depth = min(GROUP_M, tiles_m - first_m)
    inside = tile % (GROUP_M * tiles_n)
    return first_m + inside % depth, inside // depth


@triton.jit
def expert_sums(
    x_ptrs, mask_m, weight_ptrs, mask_n, inputs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Rows of x times rows of one expert's weight, in fp32: [BLOCK_M, BLOCK_N]. x_ptrs, weight_ptrs: of input 0, with a
    last dim of 1.
    """
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, inputs, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = (offs_k < inputs)[None, :]
        x = tl.load(x_ptrs + offs_k[None, :], mask=mask_m[:, None] & mask_k, other=0.0)  # [BLOCK_M, BLOCK_K]
        weight = tl.load(weight_ptrs + offs_k[None, :], mask=mask_n[:, None] & mask_k, other=0.0)
        sums = dot(x, tl.trans(weight), sums)  # [BLOCK_M, BLOCK_K] @ [BLOCK_K, BLOCK_N]
    return sums


@triton.jit
def with_bias(sums, bias_ptr, stride_bias_e, expert, offs_n, mask_n):
    """Sums [BLOCK_M, BLOCK_N] and an expert's bias, where there is one."""
    if bias_ptr is not None:
        bias_ptr += expert.to(tl.int64) * stride_bias_e
        sums += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    return sums


@triton.jit
def store_pairs(out_ptr, stride_out_m, sums, pairs, mask_m, offs_n, mask_n):
    """Each pair's row of the result."""
    out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * stride_out_m + offs_n[None, :]  # T K * stride can pass 2**31
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


def products_buffers(pairs: int, outputs: int, combine: bool) -> dict[str, Buffer]:
    """Where the products of all pairs are before a token's become one: fp32, so that they are rounded once."""
    return {"products": Buffer((pairs, outputs), torch.float32)} if combine else {}


def products_workspace(axes: Axes) -> dict[str, Buffer]:
    return products_buffers(int(axes["T"]) * int(axes["K"]), int(axes["N"]), bool(axes["combine"]))


def products_of(run: Run, out: torch.Tensor, combine: torch.Tensor | None) -> torch.Tensor:
    """Where a launch puts the rows of pairs: the result, or what is to be combined."""
    return out if combine is None else run.workspace["products"]


def combine_products(
    run: Run, kernel: Any, out: torch.Tensor, experts: torch.Tensor, combine: torch.Tensor | None
) -> None:
    """Adds each token's products up by `grouped_matmul_combine`, where that is asked for.

    The kernel is an argument so that it is one of those of each variant that launches it.
    """
    if combine is not None:
        tokens, outputs = out.shape
        block_n = min(COMBINED_AT_A_TIME, triton.next_power_of_2(outputs))
        block_t = COMBINED_AT_A_TIME // block_n
        run.launch(
            kernel,
            (triton.cdiv(tokens, block_t), triton.cdiv(outputs, block_n)),
            **pointers("out[t] products[p] experts[t] combine[t]", out, run.workspace["products"], experts, combine),
            tokens=tokens,
            outputs=outputs,
            top_k=experts.shape[1],
            BLOCK_T=block_t,
            BLOCK_N=block_n,
        )


def pairs_of_row(x: torch.Tensor, experts: torch.Tensor) -> int:
    """How many pairs multiply one row of x."""
    return experts.shape[1] if x.shape[0] == experts.shape[0] else 1


def tile_arguments(
    order: torch.Tensor, starts: torch.Tensor, tile_expert: torch.Tensor, tile_start: torch.Tensor
) -> dict[str, Any]:
    """What sort_by_expert made, as kernels take it."""
    return pointers("order starts tile_expert tile_start", order, starts, tile_expert, tile_start)
