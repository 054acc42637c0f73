"""Tiles of few rows on the matrix units, K split over programs, whose partial sums the last to arrive adds up in order.

Wins from two tokens to 64: there are too few tiles of the output to fill the device, and, as at one token, the weight's
bytes are what counts, so the rows ride along for nothing.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.language import dot, wait_for_earlier_launches
from tkernels.ops.arguments import pointers
from tkernels.ops.dequant_gemm._argument import needs_interleaved
from tkernels.ops.dequant_gemm._outlier_sums import OUTLIERS_AT_A_TIME, outlier_sums, outliers_arguments
from tkernels.ops.dequant_gemm._unpack import (
    group_tile,
    groups_arguments,
    inputs_at,
    looked_up,
    magic_of,
    prefetch_words,
    table_arguments,
    table_tile,
    unpacked,
    word_tile,
    words_arguments,
)
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
from tkernels.quantized.codes import codes_per_word
from tkernels.quantized.weight import QuantizedWeight, interleaved

CONFIGS = row_configs(
    (
        (16, 64, 128, 4, 3),
        (16, 64, 128, 4, 4),
        (16, 128, 128, 8, 3),
        (32, 64, 128, 4, 3),
        (32, 64, 128, 4, 4),
        (32, 128, 128, 8, 3),
    )
)
MAX_SPLITS = 32


@triton.jit(do_not_specialize=["tokens"])
def dequant_gemm_split_k(
    out_ptr,
    partial_ptr,
    arrived_ptr,
    x_ptr,
    packed_ptr,
    high_ptr,
    scales_ptr,
    zeros_ptr,
    table_ptr,
    permutation_ptr,
    rows_ptr,
    cols_ptr,
    vals_ptr,
    bias_ptr,
    stride_out_m,
    stride_x_m,
    stride_packed_w,
    stride_high_w,
    stride_scales_g,
    stride_zeros_g,
    stride_table_c,
    tokens,
    outputs,
    words,
    words_of_split,
    splits,
    magic,
    BITS: tl.constexpr,
    GROUP_WORDS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY_TILES: tl.constexpr,
):
    """A word row is a row of `packed`. partial [splits, M, N], arrived: None, one split."""
    FIELDS: tl.constexpr = 16 if BITS == 3 else 32 // BITS
    BLOCK_W: tl.constexpr = BLOCK_K // FIELDS
    split = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    offs_m = rows.to(tl.int64)  # M * stride can pass 2**31
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = rows < tokens, offs_n < outputs
    first = split * words_of_split
    end = tl.minimum(first + words_of_split, words)
    x_ptrs = x_ptr + offs_m[:, None] * stride_x_m
    prefetch_words(
        packed_ptr, stride_packed_w, first, end, tl.program_id(1) * BLOCK_N, outputs, EARLY_TILES * BLOCK_W, BLOCK_N
    )
    wait_for_earlier_launches()
    table = table_tile(table_ptr, stride_table_c, offs_n, mask_n, BITS)
    # Transposed, so that the weight's 64 rows and more are the side of the product that Hopper's matrix units want.
    sums = tl.zeros((BLOCK_N, BLOCK_TOKENS), dtype=tl.float32)
    for start in tl.range(first, end, BLOCK_W):
        cols, mask_k = inputs_at(permutation_ptr, start * FIELDS + tl.arange(0, BLOCK_K), end * FIELDS)
        x = tl.load(
            x_ptrs + cols[None, :], mask=mask_m[:, None] & mask_k[None, :], other=0.0
        )  # [BLOCK_TOKENS, BLOCK_K]
        packed, high = word_tile(
            packed_ptr, high_ptr, stride_packed_w, stride_high_w, start, end, offs_n, mask_n, BLOCK_W
        )
        if table_ptr is not None:
            weight = looked_up(packed, high, table, table_ptr, stride_table_c, offs_n, mask_n, BITS, BLOCK_N, BLOCK_K)
            sums = dot(weight, tl.trans(x), sums)  # [BLOCK_N, BLOCK_K] @ [BLOCK_K, BLOCK_TOKENS]
        else:
            zero, scale = group_tile(
                scales_ptr, zeros_ptr, stride_scales_g, stride_zeros_g, start, end, offs_n, mask_n,
                BITS, GROUP_WORDS, ONE_GROUP, BLOCK_W,
            )  # fmt: skip
            if ONE_GROUP:
                # A scale for each sum, not for each weight: 16 to 32 products instead of BLOCK_K, and no rounding but
                # of codes of 8 bits.
                weight = unpacked(packed, high, zero, None, magic, x_ptr.dtype.element_ty, BITS, BLOCK_N, BLOCK_K)
                products = dot(weight, tl.trans(x), tl.zeros((BLOCK_N, BLOCK_TOKENS), dtype=tl.float32))
                sums += products * tl.trans(scale).to(tl.float32)
            else:
                weight = unpacked(packed, high, zero, scale, magic, x_ptr.dtype.element_ty, BITS, BLOCK_N, BLOCK_K)
                sums = dot(weight, tl.trans(x), sums)
    sums = tl.trans(sums)
    if rows_ptr is not None:
        sums = outlier_sums(
            sums, x_ptrs, mask_m, rows_ptr, cols_ptr, vals_ptr, offs_n, mask_n, split, splits, OUTLIERS_AT_A_TIME
        )
    mask = mask_m[:, None] & mask_n[None, :]
    if partial_ptr is not None:
        partial_ptrs = partial_ptr + rows[:, None] * outputs + offs_n[None, :]  # splits * M * N: see `too_many_rows`
        count_ptr = arrived_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        is_last, sums = summed_by_the_last(sums, partial_ptrs, mask, count_ptr, split, splits, tokens * outputs)
        mask = mask & is_last
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + offs_m[:, None] * stride_out_m + offs_n[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask)


def split_words(outputs: int, places: int, bits: int, config: Config, device: DeviceFacts) -> int:
    """Word rows for one program: enough programs for PROGRAMS_PER_SM on every multiprocessor."""
    fields = codes_per_word(bits)
    return words_per_split(places // fields, config["BLOCK_K"] // fields, outputs, config, device, MAX_SPLITS)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    tokens, outputs, bits = int(axes["M"]), int(axes["N"]), int(axes["bits"])
    places = int(axes["K"]) + int(axes["padding"])
    splits = triton.cdiv(places // codes_per_word(bits), split_words(outputs, places, bits, config, device))
    return partial_buffers_of_rows(splits, tokens, outputs, config)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return too_many_rows(axes) or needs_interleaved(axes, device)


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    outputs, fields = weight.shape[0], codes_per_word(weight.bits)
    block_m, block_n, block_k = tile_sizes(run.config, "BLOCK_TOKENS")
    words = weight.places // fields
    words_of_split = split_words(outputs, weight.places, weight.bits, run.config, run.device)
    splits = triton.cdiv(words, words_of_split)
    run.launch(
        dequant_gemm_split_k,
        (*tile_grid(x.shape[0], outputs, block_m, block_n), splits),
        **partial_arguments(run),
        **pointers("out[m] x[m] bias permutation", out, x, bias, weight.permutation),
        **words_arguments(weight),
        **groups_arguments(weight, block_k // fields),
        **table_arguments(weight),
        **outliers_arguments(weight),
        tokens=x.shape[0],
        outputs=outputs,
        words=words,
        words_of_split=words_of_split,
        splits=splits,
        magic=magic_of(weight.dtype),
        BLOCK_TOKENS=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EARLY_TILES=run.early_tiles,
    )


VARIANT = Variant(
    wins="two to 64 tokens: as many programs as fill the device, and the rows cost next to nothing beside the weight",
    region={"M": (2, 64)},
    launch=launch,
    configs=CONFIGS,
    # 64 outputs are the least that Hopper's asynchronous matrix units take, and rows come by 8 there: 32 cost no more
    # than 16. BLOCK_K 128 is the usual group, whose scale is then left to the sums. Four programs of 4 warps on a
    # multiprocessor have 48 kB of codes in flight, twice what hides the latency of its share of 4.3 TB/s.
    # On gfx942 4 warps spill where outliers are added.
    default={
        "": Config(BLOCK_TOKENS=16, BLOCK_N=64, BLOCK_K=128, PROGRAMS_PER_SM=4, num_warps=4, num_stages=3),
        "sm_90": Config(BLOCK_TOKENS=32, BLOCK_N=64, BLOCK_K=128, PROGRAMS_PER_SM=4, num_warps=4, num_stages=4),
        "gfx942": Config(BLOCK_TOKENS=16, BLOCK_N=64, BLOCK_K=128, PROGRAMS_PER_SM=2, num_warps=8, num_stages=2),
        "interpreter": Config(BLOCK_TOKENS=16, BLOCK_N=16, BLOCK_K=32, PROGRAMS_PER_SM=2, num_warps=4, num_stages=2),
    },
    supports=supports,
    workspace=workspace,
    prepare=interleaved,
    key=("M", "N", "K", "bits", "coding", "permuted", "sparse", "group_size"),
    sum_order=order_of_rows,
    deterministic=True,
    batch_invariant=True,
)
