"""Tiles of few tokens on the matrix units, K split over programs, whose partial sums the last to arrive adds in order.

Wins from two tokens to a few dozen: there are too few tiles of the output to fill the device, and the weight's bytes
are what counts, so the tokens ride along for nothing.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.language import dot, prefetch_rows, wait_for_earlier_launches
from tkernels.ops.arguments import pointers
from tkernels.ops.products import tile_grid, tile_sizes
from tkernels.ops.split_sums import (
    order_of_rows,
    partial_arguments,
    partial_buffers_of_rows,
    row_configs,
    summed_by_the_last,
    too_many_rows,
    words_per_split,
)

CONFIGS = row_configs(
    (
        (16, 64, 64, 4, 4),
        (16, 64, 128, 4, 3),
        (16, 128, 64, 4, 4),
        (32, 64, 64, 4, 4),
        (32, 64, 128, 4, 3),
        (32, 128, 64, 8, 4),
        (64, 64, 64, 4, 4),
    )
)
MAX_SPLITS = 16
"""Of 64 tokens, the sums that a program leaves weigh as much as 128 inputs of its tile of the weight: what each of 16
reads in the o projection of Qwen3-0.6B."""


@triton.jit(do_not_specialize=["tokens"])
def matmul_split_k(
    out_ptr,
    partial_ptr,
    arrived_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    stride_out_m,
    stride_x_m,
    stride_weight_n,
    tokens,
    outputs,
    inputs,
    inputs_of_split,
    splits,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY_TILES: tl.constexpr,
):
    """partial [splits, M, N] fp32, arrived: None where there is one split."""
    split = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    offs_m = rows.to(tl.int64)  # M * stride and N * stride can pass 2**31
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = rows < tokens, offs_n < outputs
    first = split * inputs_of_split
    end = tl.minimum(first + inputs_of_split, inputs)
    x_ptrs = x_ptr + offs_m[:, None] * stride_x_m
    weight_ptrs = weight_ptr + offs_n[:, None] * stride_weight_n
    prefetch_rows(weight_ptrs, mask_n[:, None], first, end, EARLY_TILES * BLOCK_K)
    wait_for_earlier_launches()
    # Transposed, so that the weight's 64 rows are the side of the product that Hopper's matrix units want.
    sums = tl.zeros((BLOCK_N, BLOCK_TOKENS), dtype=tl.float32)
    for start in tl.range(first, end, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = (offs_k < end)[None, :]
        weight = tl.load(weight_ptrs + offs_k[None, :], mask=mask_n[:, None] & mask_k, other=0.0)  # [BLOCK_N, BLOCK_K]
        x = tl.load(x_ptrs + offs_k[None, :], mask=mask_m[:, None] & mask_k, other=0.0)  # [BLOCK_TOKENS, BLOCK_K]
        sums = dot(weight, tl.trans(x), sums)  # [BLOCK_N, BLOCK_K] @ [BLOCK_K, BLOCK_TOKENS]
    sums = tl.trans(sums)
    mask = mask_m[:, None] & mask_n[None, :]
    if partial_ptr is not None:
        partial_ptrs = partial_ptr + rows[:, None] * outputs + offs_n[None, :]  # splits * M * N: see `too_many_rows`
        count_ptr = arrived_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        is_last, sums = summed_by_the_last(sums, partial_ptrs, mask, count_ptr, split, splits, tokens * outputs)
        mask = mask & is_last
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + offs_n, mask=mask_n).to(tl.float32)[None, :]
    out_ptrs = out_ptr + offs_m[:, None] * stride_out_m + offs_n[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask)


def split_inputs(outputs: int, inputs: int, config: Config, device: DeviceFacts) -> int:
    """Inputs for one program: enough programs for PROGRAMS_PER_SM on every multiprocessor."""
    return words_per_split(inputs, config["BLOCK_K"], outputs, config, device, MAX_SPLITS)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    tokens, outputs, inputs = int(axes["M"]), int(axes["N"]), int(axes["K"])
    splits = triton.cdiv(inputs, split_inputs(outputs, inputs, config, device))
    return partial_buffers_of_rows(splits, tokens, outputs, config)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return too_many_rows(axes)


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    block_m, block_n, block_k = tile_sizes(run.config, "BLOCK_TOKENS")
    inputs_of_split = split_inputs(outputs, inputs, run.config, run.device)
    splits = triton.cdiv(inputs, inputs_of_split)
    run.launch(
        matmul_split_k,
        (*tile_grid(tokens, outputs, block_m, block_n), splits),
        **partial_arguments(run),
        **pointers("out[m] x[m] weight[n] bias", out, x, weight, bias),
        tokens=tokens,
        outputs=outputs,
        inputs=inputs,
        inputs_of_split=inputs_of_split,
        splits=splits,
        BLOCK_TOKENS=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EARLY_TILES=run.early_tiles,
    )


VARIANT = Variant(
    wins="two to 64 tokens: as many programs as fill the device, and the tokens cost next to nothing beside the weight",
    region={"M": (2, 64)},
    launch=launch,
    configs=CONFIGS,
    # By reasoning, not measured. 64 outputs are the least that Hopper's asynchronous matrix units take, and tokens come
    # by 8 there: 32 cost no more than 16. Four programs of 4 warps on a multiprocessor, each with three tiles of 8 kB
    # of weight on their way, have twice in flight what hides the latency of its share of 4.3 TB/s.
    default={
        "": Config(BLOCK_TOKENS=16, BLOCK_N=64, BLOCK_K=64, PROGRAMS_PER_SM=4, num_warps=4, num_stages=3),
        "sm_90": Config(BLOCK_TOKENS=32, BLOCK_N=64, BLOCK_K=64, PROGRAMS_PER_SM=4, num_warps=4, num_stages=4),
        "gfx942": Config(BLOCK_TOKENS=16, BLOCK_N=64, BLOCK_K=64, PROGRAMS_PER_SM=2, num_warps=4, num_stages=2),
        "interpreter": Config(BLOCK_TOKENS=16, BLOCK_N=16, BLOCK_K=32, PROGRAMS_PER_SM=2, num_warps=4, num_stages=2),
    },
    supports=supports,
    workspace=workspace,
    key=("M", "N", "K"),
    sum_order=order_of_rows,
    deterministic=True,
    batch_invariant=True,
)
