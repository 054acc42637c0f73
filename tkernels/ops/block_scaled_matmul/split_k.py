"""Tiles of few tokens on the matrix units, K split over programs, whose partial sums the last to arrive adds in order.

Wins up to a few dozen tokens: there are too few tiles of the output to fill the device, and the weight's bytes are what
counts. What a program leaves is scaled already, so that the parts only add up.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.language import prefetch_rows, wait_for_earlier_launches
from tkernels.ops.arguments import pointers
from tkernels.ops.code_sums import sums_are_short, unsupported_sums, with_products, zero_sums
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
from tkernels.quantized.row_codes import BLOCK

CONFIGS = row_configs(
    (
        (16, 32, 128, 4, 4),
        (16, 64, 128, 4, 3),
        (16, 64, 128, 4, 4),
        (32, 64, 128, 4, 4),
        (16, 128, 128, 4, 4),
        (64, 64, 128, 4, 4),
    )
)
MAX_SPLITS = 32


@triton.jit(do_not_specialize=["tokens"])
def block_scaled_matmul_split_k(
    out_ptr,
    partial_ptr,
    arrived_ptr,
    q_ptr,
    scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    stride_out_m,
    stride_q_m,
    stride_scale_m,
    stride_weight_n,
    stride_weight_scale_b,
    tokens,
    outputs,
    inputs,
    inputs_of_split,
    splits,
    SHORT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY_TILES: tl.constexpr,
):
    """partial [splits, M, N] fp32, arrived: None where there is one split. BLOCK_N and BLOCK_K divide GROUP, BLOCK_K
    the inputs of a split, and GROUP all inputs: what a tile reads of the weight is of one block.
    """
    split = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    offs_m = rows.to(tl.int64)  # M * stride and N * stride can pass 2**31
    first_n = tl.program_id(1).to(tl.int64) * BLOCK_N
    offs_n = first_n + tl.arange(0, BLOCK_N)
    mask_m, mask_n = rows < tokens, offs_n < outputs
    first = split * inputs_of_split
    end = tl.minimum(first + inputs_of_split, inputs)
    q_ptrs = q_ptr + offs_m[:, None] * stride_q_m
    weight_ptrs = weight_ptr + offs_n[:, None] * stride_weight_n
    scale_ptrs = scale_ptr + offs_m * stride_scale_m
    weight_scale_ptr += (first_n // GROUP) * stride_weight_scale_b
    prefetch_rows(weight_ptrs, mask_n[:, None], first, end, EARLY_TILES * BLOCK_K)
    wait_for_earlier_launches()
    # Transposed, so that the weight's 64 rows are the side of the product that Hopper's matrix units want.
    total = tl.zeros((BLOCK_N, BLOCK_TOKENS), dtype=tl.float32)
    for start in tl.range(first, end, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        # Rows and columns that are masked off are not stored, whatever is read of them.
        weight = tl.load(weight_ptrs + offs_k[None, :], mask=mask_n[:, None])  # [BLOCK_N, BLOCK_K]
        q = tl.load(q_ptrs + offs_k[None, :], mask=mask_m[:, None])  # [BLOCK_TOKENS, BLOCK_K]
        scale = tl.load(scale_ptrs + start // GROUP, mask=mask_m)
        weight_scale = tl.load(weight_scale_ptr + start // GROUP)
        sums = with_products(zero_sums(BLOCK_N, BLOCK_TOKENS, q_ptr.dtype.element_ty), weight, tl.trans(q), SHORT)
        # The token's scale first: two scales' product can be too small for fp32 where that of all three is not.
        total += sums * scale[None, :] * weight_scale
    out = tl.trans(total)
    mask = mask_m[:, None] & mask_n[None, :]
    if partial_ptr is not None:
        partial_ptrs = partial_ptr + rows[:, None] * outputs + offs_n[None, :]  # splits * M * N: see `too_many_rows`
        count_ptr = arrived_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        is_last, out = summed_by_the_last(out, partial_ptrs, mask, count_ptr, split, splits, tokens * outputs)
        mask = mask & is_last
    if bias_ptr is not None:
        out += tl.load(bias_ptr + offs_n, mask=mask_n).to(tl.float32)[None, :]
    out_ptrs = out_ptr + offs_m[:, None] * stride_out_m + offs_n[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


def split_inputs(outputs: int, inputs: int, config: Config, device: DeviceFacts) -> int:
    """Inputs for one program: enough programs for PROGRAMS_PER_SM on every multiprocessor."""
    return words_per_split(inputs, config["BLOCK_K"], outputs, config, device, MAX_SPLITS)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    tokens, outputs, inputs = int(axes["M"]), int(axes["N"]), int(axes["K"])
    splits = triton.cdiv(inputs, split_inputs(outputs, inputs, config, device))
    return partial_buffers_of_rows(splits, tokens, outputs, config)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return unsupported_sums(axes, device) or too_many_rows(axes)


def launch(
    run: Run,
    out: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    (tokens, inputs), outputs = q.shape, weight.shape[0]
    block_m, block_n, block_k = tile_sizes(run.config, "BLOCK_TOKENS")
    inputs_of_split = split_inputs(outputs, inputs, run.config, run.device)
    splits = triton.cdiv(inputs, inputs_of_split)
    layout = "out[m] q[m] scale[m] weight[n] weight_scale[b] bias"
    run.launch(
        block_scaled_matmul_split_k,
        (*tile_grid(tokens, outputs, block_m, block_n), splits),
        **partial_arguments(run),
        **pointers(layout, out, q, scale, weight, weight_scale, bias),
        tokens=tokens,
        outputs=outputs,
        inputs=inputs,
        inputs_of_split=inputs_of_split,
        splits=splits,
        SHORT=sums_are_short(run.device),
        GROUP=BLOCK,
        BLOCK_TOKENS=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EARLY_TILES=run.early_tiles,
    )


VARIANT = Variant(
    wins="up to 64 tokens: as many programs as fill the device, and the tokens cost next to nothing beside the weight",
    region={"M": (1, 64)},
    launch=launch,
    configs=CONFIGS,
    # By reasoning, not measured, and as scaled_matmul's: four programs of 4 warps on a multiprocessor, each with three
    # tiles of 8 kB of codes on their way, have twice in flight what hides the latency of its share of 4.3 TB/s.
    default={
        "": Config(BLOCK_TOKENS=16, BLOCK_N=64, BLOCK_K=128, PROGRAMS_PER_SM=4, num_warps=4, num_stages=3),
        "sm_90": Config(BLOCK_TOKENS=32, BLOCK_N=64, BLOCK_K=128, PROGRAMS_PER_SM=4, num_warps=4, num_stages=4),
        "gfx942": Config(BLOCK_TOKENS=16, BLOCK_N=64, BLOCK_K=128, PROGRAMS_PER_SM=2, num_warps=4, num_stages=2),
        "interpreter": Config(BLOCK_TOKENS=16, BLOCK_N=16, BLOCK_K=64, PROGRAMS_PER_SM=2, num_warps=4, num_stages=2),
    },
    limits={"BLOCK_N": (16, BLOCK), "BLOCK_K": (16, BLOCK)},
    supports=supports,
    workspace=workspace,
    key=("M", "N", "K"),
    sum_order=order_of_rows,
    deterministic=True,
    batch_invariant=True,
)
