"""Tiles of few rows on the matrix units, K split over programs, whose partial sums the last to arrive adds up in order.

Wins from two tokens to 64, and of 4-bit codes from 9, below which gemv does: there are too few tiles of the output to
fill the device, and, as at one token, the weight's bytes are what counts, so the rows ride along for nothing.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.contract import is_aligned
from tkernels.language import dot, wait_for_earlier_launches
from tkernels.ops.arguments import pointers
from tkernels.ops.dequant_gemm._argument import needs_interleaved
from tkernels.ops.dequant_gemm._outlier_sums import OUTLIERS_AT_A_TIME, outlier_sums, outliers_arguments
from tkernels.ops.dequant_gemm._pairs import (
    by_output,
    inputs_by_depth,
    outputs_by_row,
    pair_rows,
    pairs_arguments,
    places_by_depth,
    takes_pairs,
    with_group,
    words_by_lane,
)
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
from tkernels.ops.products import tile_grid
from tkernels.ops.split_sums import (
    MAX_ROWS,
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

CONFIGS = (
    *(
        Config(
            BLOCK_TOKENS=16,
            BLOCK_N=columns,
            BLOCK_K=128,
            PROGRAMS_PER_SM=programs,
            num_warps=4,
            num_stages=stages,
            launch_pdl=early,
        )
        for columns, programs in ((64, 4), (128, 3))
        for stages, early in ((3, 0), (4, 0), (3, 1))
    ),
    *row_configs(((16, 128, 128, 8, 3), (16, 256, 128, 8, 3), (16, 256, 128, 8, 4))),
)
MAX_SPLITS = 32


@triton.jit
def dequant_gemm_split_k_product(
    sums, x, packed, high, scales_ptr, zeros_ptr, table_ptr, table,
    stride_scales_g, stride_zeros_g, stride_table_c, start, end, offs_n, mask_n, magic,
    BITS: tl.constexpr, GROUP_WORDS: tl.constexpr, ONE_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """sums [BLOCK_N, BLOCK_TOKENS] plus the products of word rows start .. start + BLOCK_W, unpacked as a tile of the
    weight, with x [BLOCK_TOKENS, places].
    """
    BLOCK_K: tl.constexpr = x.shape[1]
    if table_ptr is not None:
        weight = looked_up(packed, high, table, table_ptr, stride_table_c, offs_n, mask_n, BITS, BLOCK_N, BLOCK_K)
        return dot(weight, tl.trans(x), sums)  # [BLOCK_N, BLOCK_K] @ [BLOCK_K, BLOCK_TOKENS]
    else:
        zero, scale = group_tile(
            scales_ptr, zeros_ptr, stride_scales_g, stride_zeros_g, start, end, offs_n, mask_n,
            BITS, GROUP_WORDS, ONE_GROUP, BLOCK_W,
        )  # fmt: skip
        if ONE_GROUP:
            # A scale for each sum, not for each weight: 16 to 32 products instead of BLOCK_K, and no rounding but of
            # codes of 8 bits.
            weight = unpacked(packed, high, zero, None, magic, x.dtype, BITS, BLOCK_N, BLOCK_K)
            products = dot(weight, tl.trans(x), tl.zeros(sums.shape, dtype=tl.float32))
            return sums + products * tl.trans(scale).to(tl.float32)
        else:
            weight = unpacked(packed, high, zero, scale, magic, x.dtype, BITS, BLOCK_N, BLOCK_K)
            return dot(weight, tl.trans(x), sums)


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
    exponent,
    BITS: tl.constexpr,
    GROUP_WORDS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    WHOLE: tl.constexpr,
    NEXT: tl.constexpr,
    WARPS: tl.constexpr,
    BY_GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    EARLY_TILES: tl.constexpr,
):
    """A word row is a row of `packed`. partial [splits, M, N], arrived: None, one split.

    PAIRS, NEXT, WARPS, BY_GROUP: see `pairs_arguments`.
    """
    FIELDS: tl.constexpr = 16 if BITS == 3 else 32 // BITS
    BLOCK_K: tl.constexpr = BLOCK_W * FIELDS
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
    offs_r = outputs_by_row(tl.program_id(1) * BLOCK_N, BLOCK_N, NEXT, WARPS)
    places = tl.arange(0, BLOCK_K)
    if PAIRS and permutation_ptr is not None:
        places = places_by_depth(BLOCK_W, BY_GROUP)
    for start in tl.range(first, end, BLOCK_W):
        cols, mask_k = inputs_at(permutation_ptr, start * FIELDS + places, end * FIELDS)
        mask_x = mask_m[:, None]
        if permutation_ptr is not None or not WHOLE:
            mask_x = mask_x & mask_k[None, :]
        x = tl.load(x_ptrs + cols[None, :], mask=mask_x, other=0.0)  # [BLOCK_TOKENS, BLOCK_K]
        if PAIRS:
            zero, scale = group_tile(
                scales_ptr, zeros_ptr, stride_scales_g, stride_zeros_g, start, end, offs_r, offs_r < outputs,
                BITS, GROUP_WORDS, ONE_GROUP, BLOCK_W,
            )  # fmt: skip
            tile = words_by_lane(
                packed_ptr, stride_packed_w, start, end, tl.program_id(1) * BLOCK_N, outputs,
                WHOLE, BLOCK_W, BLOCK_N, NEXT,
            )  # fmt: skip
            if permutation_ptr is None:
                x = inputs_by_depth(x, BLOCK_TOKENS, BLOCK_W, BY_GROUP)
            sums = with_group(
                sums, tile, x, zero, scale, exponent, BLOCK_TOKENS, BLOCK_W, BLOCK_N, NEXT, WARPS, BY_GROUP
            )
        else:
            packed, high = word_tile(
                packed_ptr, high_ptr, stride_packed_w, stride_high_w, start, end, offs_n, mask_n, BLOCK_W
            )
            sums = dequant_gemm_split_k_product(
                sums, x, packed, high, scales_ptr, zeros_ptr, table_ptr, table,
                stride_scales_g, stride_zeros_g, stride_table_c, start, end, offs_n, mask_n, magic,
                BITS, GROUP_WORDS, ONE_GROUP, BLOCK_N, BLOCK_W,
            )  # fmt: skip
    if PAIRS:
        sums = by_output(sums, BLOCK_N, NEXT, WARPS)
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


def word_rows(axes: Axes, config: Config, device: DeviceFacts) -> int:
    """Of a tile; of pairs no more than a group's, which share their zero-point and scale."""
    rows = config["BLOCK_K"] // codes_per_word(int(axes["bits"]))
    return pair_rows(int(axes["group_size"]), rows) if takes_pairs(axes, device) else rows


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    tokens, outputs, bits = int(axes["M"]), int(axes["N"]), int(axes["bits"])
    words = (int(axes["K"]) + int(axes["padding"])) // codes_per_word(bits)
    rows = word_rows(axes, config, device)
    splits = triton.cdiv(words, words_per_split(words, rows, outputs, config, device, MAX_SPLITS))
    return partial_buffers_of_rows(splits, tokens, outputs, config)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return too_many_rows(axes) or needs_interleaved(axes, device)


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    outputs, block_m, block_n = weight.shape[0], run.config["BLOCK_TOKENS"], run.config["BLOCK_N"]
    if x.element_size() == 2 and is_aligned(x) and run.axes["weight_aligned"]:
        # One tile of tokens: the weight is read and unpacked once. In fp32 it does not fit the shared memory of some
        # devices, and loaded a number at a time not the registers. Of outliers' product the tokens are the rows, and 64
        # of them would go through another instruction than fewer, whose sums have another order.
        most = MAX_ROWS if weight.outliers is None else MAX_ROWS // 2
        block_m = max(block_m, min(triton.next_power_of_2(x.shape[0]), most))
    words, block_w = weight.places // codes_per_word(weight.bits), word_rows(run.axes, run.config, run.device)
    words_of_split = words_per_split(words, block_w, outputs, run.config, run.device, MAX_SPLITS)
    splits = triton.cdiv(words, words_of_split)
    run.launch(
        dequant_gemm_split_k,
        (*tile_grid(x.shape[0], outputs, block_m, block_n), splits),
        **partial_arguments(run),
        **pointers("out[m] x[m] bias permutation", out, x, bias, weight.permutation),
        **words_arguments(weight),
        **groups_arguments(weight, block_w),
        **table_arguments(weight),
        **outliers_arguments(weight),
        tokens=x.shape[0],
        outputs=outputs,
        words=words,
        words_of_split=words_of_split,
        splits=splits,
        magic=magic_of(weight.dtype),
        **pairs_arguments(weight.dtype, block_n, run.config.num_warps, run.device),
        PAIRS=takes_pairs(run.axes, run.device),
        WHOLE=words % block_w == 0,
        BLOCK_TOKENS=block_m,
        BLOCK_N=block_n,
        BLOCK_W=block_w,
        EARLY_TILES=run.early_tiles,
    )


VARIANT = Variant(
    wins="two to 64 tokens: as many programs as fill the device, and the rows cost next to nothing beside the weight",
    region={"M": (2, 64)},
    launch=launch,
    configs=CONFIGS,
    # Tiles have as many tokens as there are, BLOCK_TOKENS at least. BLOCK_K 128 is the usual group, whose scale is then
    # left to the sums. On sm_90 a thread of 8 warps over 256 outputs has 128 weights of a tile: 2.5 instructions for
    # each at 16 tokens with Triton 3.7 (2.7 with 3.6), 2.7 at 32, 3.0 at 64. Tiles that leave it 64 take 3.3 at 16
    # tokens, those that leave it 256 take 2.3 and all 255 registers; 4 warps over 128 outputs spill at 64 tokens with
    # Triton 3.6. Three tiles ahead are 48 kB of codes in flight, twice what hides the latency of a multiprocessor's
    # share of 4.3 TB/s. On gfx942 4 warps spill where outliers are added.
    default={
        "": Config(BLOCK_TOKENS=16, BLOCK_N=64, BLOCK_K=128, PROGRAMS_PER_SM=4, num_warps=4, num_stages=3),
        "sm_90": Config(BLOCK_TOKENS=16, BLOCK_N=256, BLOCK_K=128, PROGRAMS_PER_SM=2, num_warps=8, num_stages=4),
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
