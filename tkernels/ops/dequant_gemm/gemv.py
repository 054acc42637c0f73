"""Matrix-vector product: the codes stream through registers once, and are summed in a fixed order in fp32.

Wins at one token, and up to 8 where codes are pairs, where the weight's bytes are all that counts: nothing passes
through shared memory but the loads in flight, and K is split over programs until the device is full, whatever N is.

Codes of 4 bits in 16-bit floats go through the matrix units, one warp's at a time, of whose columns most are padding:
that costs nothing, and unpacking pairs costs less than half of what multiplying each code in fp32 does (see _pairs.py:
1.5 instructions for each weight on sm_90 at one token, against 4.3). All others are multiplied one by one in fp32.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.language import wait_for_earlier_launches
from tkernels.ops.arguments import pointers
from tkernels.ops.dequant_gemm._argument import needs_interleaved
from tkernels.ops.dequant_gemm._outlier_sums import (
    OUTLIERS_AT_A_TIME,
    outlier_sums,
    outlier_sums_of_one,
    outliers_arguments,
)
from tkernels.ops.dequant_gemm._pairs import (
    LEAST_GROUP,
    by_output,
    inputs_by_depth,
    outputs_by_row,
    pair_rows,
    pairs_arguments,
    takes_pairs,
    with_group,
    words_by_lane,
)
from tkernels.ops.dequant_gemm._unpack import (
    group_tile,
    groups_arguments,
    inputs_at,
    prefetch_words,
    word_tile,
    words_arguments,
)
from tkernels.ops.split_sums import partial_arguments, partial_buffers, summed_by_the_last, words_per_split
from tkernels.quantized.codes import codes_per_word
from tkernels.quantized.weight import QuantizedWeight, interleaved

CONFIGS = (
    *(
        Config(BLOCK_N=columns, BLOCK_W=words, PROGRAMS_PER_SM=programs, num_warps=warps, num_stages=3)
        for columns, words, warps in ((64, 16, 1), (128, 8, 1), (128, 16, 2), (256, 16, 4))
        for programs in (2, 4, 8)
    ),
    Config(BLOCK_N=128, BLOCK_W=8, PROGRAMS_PER_SM=8, num_warps=1, num_stages=3, launch_pdl=1),
)
MAX_SPLITS = 64
MOST_TOKENS = 8
"""The columns of one tile of the matrix units. Of 16, a warp's threads need more registers than sm_100 has, and
with a permutation on sm_80: 8 to 40 bytes are spilled there. On sm_90 it would be 2.0 instructions a weight.
"""


@triton.jit
def dequant_gemm_gemv_difference(packed, high, zero, exponent, FIELD: tl.constexpr, BITS: tl.constexpr):
    """code - zero-point of one field of each word, exact, in fp32.

    The code stays where it is in the word and becomes mantissa bits of a number whose bit there counts 1, of which that
    number and the zero-point are subtracted: three operations at the full rate, where a conversion from an integer runs
    at a quarter of it (see _unpack.py). high: third bits, at bit FIELD of each half.
    """
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    HALF: tl.constexpr = 16 // WIDTH  # fields in half a word
    # fp32 has 23 bits of mantissa: what lies above is shifted down.
    SHIFT: tl.constexpr = 0 if FIELD * WIDTH + BITS <= 23 else 16
    PLACE: tl.constexpr = FIELD * WIDTH - SHIFT
    # In a register, not a constant beside the mask: one instruction, not two (see `magic_of`).
    magic = exponent - (PLACE << 23)
    code = (packed >> SHIFT) & (((1 << WIDTH) - 1) << PLACE)
    if BITS == 3:
        # From bit i of its half to bit 2 i + 2, beside the other two.
        UP: tl.constexpr = FIELD % HALF + 2
        code = code | (((high >> SHIFT) << UP) & (4 << PLACE))
    value = (code | magic).to(tl.float32, bitcast=True)  # 2**(23 - PLACE) + code
    return value - (zero + 2.0 ** (23 - PLACE))


@triton.jit
def dequant_gemm_gemv_four(
    products, packed, high, zero, exponent, x0, x1, x2, x3, PAIR: tl.constexpr, BITS: tl.constexpr
):
    """products [BLOCK_W, BLOCK_N] plus those of the codes 2 PAIR to 2 PAIR + 3 of each word with x0 to x3 [BLOCK_W]."""
    # Words are interleaved: the odd codes are above the even ones.
    ABOVE: tl.constexpr = 8 if BITS == 3 else 16 // BITS
    products += dequant_gemm_gemv_difference(packed, high, zero, exponent, PAIR, BITS) * x0[:, None]
    products += dequant_gemm_gemv_difference(packed, high, zero, exponent, PAIR + ABOVE, BITS) * x1[:, None]
    products += dequant_gemm_gemv_difference(packed, high, zero, exponent, PAIR + 1, BITS) * x2[:, None]
    products += dequant_gemm_gemv_difference(packed, high, zero, exponent, PAIR + 1 + ABOVE, BITS) * x3[:, None]
    return products


@triton.jit
def dequant_gemm_gemv_eight(
    products, packed, high, zero, exponent, x0, x1, x2, x3, PAIR: tl.constexpr, BITS: tl.constexpr
):
    """As `four` for eight codes: x0 to x3 [BLOCK_W, 2], each the inputs of two codes that are four apart."""
    a0, b0 = tl.split(x0)
    a1, b1 = tl.split(x1)
    a2, b2 = tl.split(x2)
    a3, b3 = tl.split(x3)
    products = dequant_gemm_gemv_four(products, packed, high, zero, exponent, a0, a1, a2, a3, PAIR, BITS)
    return dequant_gemm_gemv_four(products, packed, high, zero, exponent, b0, b1, b2, b3, PAIR + 2, BITS)


@triton.jit
def dequant_gemm_gemv_halves(x, BLOCK_W: tl.constexpr):
    """[BLOCK_W, 4] -> the first two columns and the last two."""
    return tl.split(tl.permute(tl.reshape(x, (BLOCK_W, 2, 2)), (0, 2, 1)))


@triton.jit
def dequant_gemm_gemv_products(packed, high, zero, exponent, x, BITS: tl.constexpr, BLOCK_W: tl.constexpr):
    """(code - zero-point) * x of all codes of a word, summed: x [places of the tile] -> [BLOCK_W, BLOCK_N]."""
    FIELDS: tl.constexpr = 16 if BITS == 3 else 32 // BITS
    even, odd = tl.split(tl.reshape(x, (BLOCK_W, FIELDS // 4, 2, 2)))  # k of a word by its bits
    x0, x2 = tl.split(even)  # [BLOCK_W, FIELDS / 4] each
    x1, x3 = tl.split(odd)
    products = tl.zeros((BLOCK_W, packed.shape[1]), dtype=tl.float32)
    if FIELDS == 4:
        x0, x1, x2, x3 = (
            tl.reshape(x0, (BLOCK_W,)),
            tl.reshape(x1, (BLOCK_W,)),
            tl.reshape(x2, (BLOCK_W,)),
            tl.reshape(x3, (BLOCK_W,)),
        )
        return dequant_gemm_gemv_four(products, packed, high, zero, exponent, x0, x1, x2, x3, 0, BITS)
    elif FIELDS == 8:
        return dequant_gemm_gemv_eight(products, packed, high, zero, exponent, x0, x1, x2, x3, 0, BITS)
    else:
        a0, b0 = dequant_gemm_gemv_halves(x0, BLOCK_W)
        a1, b1 = dequant_gemm_gemv_halves(x1, BLOCK_W)
        a2, b2 = dequant_gemm_gemv_halves(x2, BLOCK_W)
        a3, b3 = dequant_gemm_gemv_halves(x3, BLOCK_W)
        products = dequant_gemm_gemv_eight(products, packed, high, zero, exponent, a0, a1, a2, a3, 0, BITS)
        return dequant_gemm_gemv_eight(products, packed, high, zero, exponent, b0, b1, b2, b3, 4, BITS)


@triton.jit
def dequant_gemm_gemv_outliers(sums, x_ptr, x_ptrs, mask_m, rows_ptr, cols_ptr, vals_ptr, offs_n, mask_n, part, parts):
    """sums [BLOCK_TOKENS, BLOCK_N] plus a share of the outliers' products; x_ptr, x_ptrs: input 0, of each row."""
    if sums.shape[0] == 1:
        total = tl.reshape(sums, (sums.shape[1],))
        total = outlier_sums_of_one(
            total, x_ptr, rows_ptr, cols_ptr, vals_ptr, offs_n, mask_n, part, parts, OUTLIERS_AT_A_TIME
        )
        return total[None, :]
    else:
        return outlier_sums(
            sums, x_ptrs, mask_m, rows_ptr, cols_ptr, vals_ptr, offs_n, mask_n, part, parts, OUTLIERS_AT_A_TIME
        )


@triton.jit(do_not_specialize=["tokens"])
def dequant_gemm_gemv(
    out_ptr,
    partial_ptr,
    arrived_ptr,
    x_ptr,
    packed_ptr,
    high_ptr,
    scales_ptr,
    zeros_ptr,
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
    tokens,
    outputs,
    words,
    words_of_split,
    splits,
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
    STAGES: tl.constexpr,
    EARLY_TILES: tl.constexpr,
):
    """A word row is a row of `packed`. partial [splits, M, N] and arrived: None, one split.

    PAIRS, NEXT, WARPS, BY_GROUP: see `pairs_arguments`. Without PAIRS, BLOCK_TOKENS is 1.
    """
    FIELDS: tl.constexpr = 16 if BITS == 3 else 32 // BITS
    split = tl.program_id(1)
    rows = tl.arange(0, BLOCK_TOKENS)
    offs_m = rows.to(tl.int64)  # M * stride can pass 2**31
    mask_m = rows < tokens
    x_ptrs = x_ptr + offs_m[:, None] * stride_x_m
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < outputs
    first = split * words_of_split
    end = tl.minimum(first + words_of_split, words)
    prefetch_words(
        packed_ptr, stride_packed_w, first, end, tl.program_id(0) * BLOCK_N, outputs, EARLY_TILES * BLOCK_W, BLOCK_N
    )
    wait_for_earlier_launches()
    if PAIRS:
        sums = tl.zeros((BLOCK_N, BLOCK_TOKENS), dtype=tl.float32)
        offs_g = outputs_by_row(tl.program_id(0) * BLOCK_N, BLOCK_N, NEXT, WARPS)
    else:
        offs_g = offs_n
        sums = tl.zeros((BLOCK_W, BLOCK_N), dtype=tl.float32)
    for start in tl.range(first, end, BLOCK_W, num_stages=STAGES):
        cols, mask_k = inputs_at(permutation_ptr, start * FIELDS + tl.arange(0, BLOCK_W * FIELDS), end * FIELDS)
        zero, scale = group_tile(
            scales_ptr, zeros_ptr, stride_scales_g, stride_zeros_g, start, end, offs_g, offs_g < outputs,
            BITS, GROUP_WORDS, ONE_GROUP, BLOCK_W,
        )  # fmt: skip
        if PAIRS:
            mask = mask_m[:, None]
            if permutation_ptr is not None or not WHOLE:
                mask = mask & mask_k[None, :]
            x = tl.load(x_ptrs + cols[None, :], mask=mask, other=0.0)
            x = inputs_by_depth(x, BLOCK_TOKENS, BLOCK_W, BY_GROUP)
            tile = words_by_lane(
                packed_ptr,
                stride_packed_w,
                start,
                end,
                tl.program_id(0) * BLOCK_N,
                outputs,
                WHOLE,
                BLOCK_W,
                BLOCK_N,
                NEXT,
            )
            sums = with_group(
                sums, tile, x, zero, scale, exponent, BLOCK_TOKENS, BLOCK_W, BLOCK_N, NEXT, WARPS, BY_GROUP
            )
        else:
            packed, high = word_tile(
                packed_ptr, high_ptr, stride_packed_w, stride_high_w, start, end, offs_n, mask_n, BLOCK_W
            )
            x = tl.load(x_ptr + cols, mask=mask_k, other=0.0)
            products = dequant_gemm_gemv_products(packed, high, zero.to(tl.float32), exponent, x, BITS, BLOCK_W)
            sums += products * scale.to(tl.float32)
    # [BLOCK_TOKENS, BLOCK_N]
    total = tl.trans(by_output(sums, BLOCK_N, NEXT, WARPS)) if PAIRS else tl.sum(sums, axis=0)[None, :]
    if rows_ptr is not None:
        total = dequant_gemm_gemv_outliers(
            total, x_ptr, x_ptrs, mask_m, rows_ptr, cols_ptr, vals_ptr, offs_n, mask_n, split, splits
        )
    mask = mask_m[:, None] & mask_n[None, :]
    if partial_ptr is not None:
        partial_ptrs = partial_ptr + rows[:, None] * outputs + offs_n[None, :]  # splits * M * N: see `too_many_rows`
        is_last, total = summed_by_the_last(
            total, partial_ptrs, mask, arrived_ptr + tl.program_id(0), split, splits, tokens * outputs
        )
        mask = mask & is_last
    if bias_ptr is not None:
        total += tl.load(bias_ptr + offs_n, mask=mask_n).to(tl.float32)[None, :]
    out_ptrs = out_ptr + offs_m[:, None] * stride_out_m + offs_n[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)


def word_rows(config: Config, bits: int, group_size: int, pairs: bool) -> int:
    """Word rows of a tile: half as many of 16 codes, for a thread keeps the inputs of all of them; twice as many of
    pairs, which need few registers: the usual group of 128.
    """
    if pairs:
        return pair_rows(group_size, 2 * config["BLOCK_W"])
    return config["BLOCK_W"] // 2 if codes_per_word(bits) > 8 else config["BLOCK_W"]


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    outputs, bits, group_size = int(axes["N"]), int(axes["bits"]), int(axes["group_size"])
    words = (int(axes["K"]) + int(axes["padding"])) // codes_per_word(bits)
    rows = word_rows(config, bits, group_size, takes_pairs(axes, device))
    splits = triton.cdiv(words, words_per_split(words, rows, outputs, config, device, MAX_SPLITS))
    return partial_buffers(splits, (int(axes["M"]), outputs), triton.cdiv(outputs, config["BLOCK_N"]))


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    tokens = int(axes["M"])
    if tokens > MOST_TOKENS:
        return f"it takes up to {MOST_TOKENS} tokens, not M = {tokens}"
    if tokens > 1 and not takes_pairs(axes, device):
        return (
            f"it takes one token at a time, not M = {tokens}: more of 4 bits in 16-bit floats, groups of whole "
            f"{LEAST_GROUP} and rows that begin on 16 bytes alone, on NVIDIA"
        )
    if axes.get("coding", "uniform") != "uniform":
        return f"it takes uniform codes, not {axes['coding']}: lookup_gemv does"
    return needs_interleaved(axes, device)


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    outputs, block_n, tokens = weight.shape[0], run.config["BLOCK_N"], x.shape[0]
    words = weight.places // codes_per_word(weight.bits)
    pairs = takes_pairs(run.axes, run.device)
    block_w = word_rows(run.config, weight.bits, weight.group_size, pairs)
    words_of_split = words_per_split(words, block_w, outputs, run.config, run.device, MAX_SPLITS)
    splits = triton.cdiv(words, words_of_split)
    arguments = pairs_arguments(weight.dtype, block_n, run.config.num_warps, run.device)
    if not pairs:
        arguments["exponent"] = (127 + 23) << 23  # of 2**23 in fp32
    run.launch(
        dequant_gemm_gemv,
        (min(tokens, 1) * triton.cdiv(outputs, block_n), splits),
        **partial_arguments(run),
        **pointers("out[m] x[m] bias permutation", out, x, bias, weight.permutation),
        **words_arguments(weight),
        **groups_arguments(weight, block_w),
        **outliers_arguments(weight),
        tokens=tokens,
        outputs=outputs,
        words=words,
        words_of_split=words_of_split,
        splits=splits,
        **arguments,
        PAIRS=pairs,
        WHOLE=words % block_w == 0,
        BLOCK_TOKENS=1 if tokens <= 1 else MOST_TOKENS,
        BLOCK_N=block_n,
        BLOCK_W=block_w,
        STAGES=run.config.num_stages,
        EARLY_TILES=run.early_tiles,
    )


VARIANT = Variant(
    wins="one token, 8 of 4-bit codes: the weight's bytes are read once and nothing else costs",
    region={"M": (1, MOST_TOKENS)},
    launch=launch,
    configs=CONFIGS,
    # One warp over 128 outputs: each thread has 4 outputs of every row, as one 16-byte load. Where codes are multiplied
    # one by one, a row's inputs serve four weights at once and rows are added up without a shuffle: 4.4 instructions
    # for each weight on sm_90, against 5.2 and 5.8 with four warps over 256 and 128 outputs. Of pairs the tile is twice
    # as deep: 1.5 to 1.6 instructions for each weight with Triton 3.7 (2.5 with 3.6). 8 programs on each multiprocessor
    # with two tiles ahead have 64 kB in flight, 128 kB of pairs. Interpreted, tiles are small, so that shapes of the
    # tests cross them.
    default={
        "": Config(BLOCK_N=128, BLOCK_W=8, PROGRAMS_PER_SM=8, num_warps=1, num_stages=3),
        # Of 128 outputs, 12 bytes are spilled with a permutation.
        **{
            arch: Config(BLOCK_N=64, BLOCK_W=8, PROGRAMS_PER_SM=8, num_warps=1, num_stages=3)
            for arch in ("sm_86", "sm_89")
        },
        "interpreter": Config(BLOCK_N=16, BLOCK_W=4, PROGRAMS_PER_SM=1, num_warps=1),
    },
    supports=supports,
    workspace=workspace,
    key=("N", "K", "bits", "permuted", "sparse", "group_size"),
    prepare=interleaved,
    deterministic=True,
    batch_invariant=False,  # the inputs of one token are added up otherwise than those of more
)
