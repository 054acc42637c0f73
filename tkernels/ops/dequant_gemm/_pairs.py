"""Four-bit codes as pairs of 16-bit floats in the registers in which the matrix units take them.

A word's eight codes become four registers of two codes each by a shift, a mask and an exponent: seven instructions for
eight weights, and nothing else is done to a weight. The exponent makes the number `offset` + code in steps of `step`:
128 + code in bf16; in fp16, whose subnormal numbers the matrix units take at the full rate (Fasi et al., 2021,
"Numerical behavior of NVIDIA tensor cores"), code * 2**-24. What is to be subtracted is the same for a whole group:

    sum((code - zero) * scale * x) = scale * (sum((offset + code) * x) - (offset + zero) * sum(x))

so the sum of a group's inputs, which all outputs share, is taken once, and no weight is rounded. Of many tokens it is
subtracted from the numbers instead, a pair by one instruction and as exact: see `with_group`.

A pair's codes come from the two halves of one word, so they have to be neighbours on the product's depth; and the words
that a thread has are those it multiplies, or every weight would pass through shared memory. Which these are follows
from how the matrix units deal a tile out to 32 lanes, eight rows of four lanes: lane 4 g + t has of the rows g and
g + 8, of every 16 on the depth, the pairs t and t + 4. Hence the orders here. A lane loads `NEXT` neighbouring outputs
of word row t, of four: output (h, w, g, j1, j0) is row (h, j1, w, j0, g), for warp w. Its words' pairs are spread over
the depth as (a, t, b) where the inputs have (t, b, a), and as (b, a, t) for Hopper's warp groups, to which Triton deals
pairs singly: there is a reordering of the product's rows and depth, and none in memory. That a compiler deals otherwise
costs time, not correctness.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tkernels import Axes, DeviceFacts
from tkernels.language import INTERPRETING, dot
from tkernels.quantized.codes import codes_per_word

LEAST_GROUP = 32
"""Places: four words, the fewest whose pairs the four lanes of a row have."""


def takes_pairs(axes: Axes, device: DeviceFacts) -> bool:
    """Whether the functions here serve a weight: AMD's matrix units deal a tile out otherwise, and rows that begin
    anywhere are read by the word, of which there would be too many for a thread's registers.
    """
    is_plain = axes["bits"] == 4 and axes.get("coding", "uniform") == "uniform" and axes["weight"] != "float32"
    is_whole = int(axes["group_size"]) % LEAST_GROUP == 0 and bool(axes.get("weight_aligned", True))
    return is_plain and is_whole and not device.arch.startswith("gfx")


def pair_rows(group_size: int, most: int) -> int:
    """Word rows of a tile: those of a group, or its largest power of two that is no more than `most`."""
    words = group_size // codes_per_word(4)
    return min(words & -words, most)


def pairs_arguments(dtype: torch.dtype, block_n: int, num_warps: int, device: DeviceFacts) -> dict[str, Any]:
    """What the functions here take beside the tile's sizes, as kernels take it."""
    warps = max(min(num_warps, block_n // 16), 1)
    return {
        "exponent": 0x43004300 if dtype == torch.bfloat16 else 0,
        "NEXT": 4 if block_n >= 32 * warps else 2,
        "WARPS": warps,
        # Hopper's warp groups of 4 multiply 64 rows at once.
        "BY_GROUP": device.arch == "sm_90" and num_warps % 4 == 0 and block_n >= 64,
    }


@triton.jit
def words_by_lane(
    packed_ptr,
    stride_packed_w,
    first,
    end,
    first_n,
    outputs,
    WHOLE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NEXT: tl.constexpr,
):
    """Word rows first .. first + BLOCK_W, those before `end` (all of them, if WHOLE), of BLOCK_N outputs from first_n:
    [BLOCK_W / 4, BLOCK_N / (8 NEXT), 8, 4, NEXT], by row / 4, output / NEXT in two dims, row % 4 and output % NEXT.
    """
    rows = tl.arange(0, BLOCK_W // 4)[:, None, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, :, None]
    eights = tl.arange(0, BLOCK_N // (8 * NEXT))[None, :, None, None, None] * (8 * NEXT)
    lanes = tl.arange(0, 8)[None, None, :, None, None] * NEXT
    offs_n = first_n + eights + lanes + tl.arange(0, NEXT)[None, None, None, None, :]
    mask = offs_n < outputs
    if not WHOLE:
        mask = mask & (first + rows < end)
    # Offsets are below 2**31: QuantizedWeight refuses more.
    return tl.load(packed_ptr + (first + rows) * stride_packed_w + offs_n, mask=mask, other=0)


@triton.jit
def outputs_by_row(first_n, BLOCK_N: tl.constexpr, NEXT: tl.constexpr, WARPS: tl.constexpr):
    """The outputs first_n .. first_n + BLOCK_N, [BLOCK_N], as the product has its rows."""
    rows = tl.arange(0, BLOCK_N)
    g, j0, w = rows % 8, rows // 8 % 2, rows // 16 % WARPS
    j1, h = rows // (16 * WARPS) % (NEXT // 2), rows // (8 * NEXT * WARPS)
    return first_n + ((h * WARPS + w) * 8 + g) * NEXT + j1 * 2 + j0


@triton.jit
def by_output(sums, BLOCK_N: tl.constexpr, NEXT: tl.constexpr, WARPS: tl.constexpr):
    """sums [BLOCK_N, columns] by the product's rows, by output."""
    split = tl.reshape(sums, (BLOCK_N // (8 * NEXT * WARPS), NEXT // 2, WARPS, 2, 8, sums.shape[1]))
    return tl.reshape(tl.permute(split, (0, 2, 4, 1, 3, 5)), (BLOCK_N, sums.shape[1]))


@triton.jit
def inputs_by_depth(x, ROWS: tl.constexpr, BLOCK_W: tl.constexpr, BY_GROUP: tl.constexpr):
    """x [ROWS, 8 BLOCK_W] by place, as the product has its depth."""
    split = tl.reshape(x, (ROWS, BLOCK_W // 4, 4, 2, 2, 2))  # by four words, t, b, a, which of the pair
    if BY_GROUP:
        return tl.reshape(tl.permute(split, (0, 1, 3, 4, 2, 5)), (ROWS, 8 * BLOCK_W))
    else:
        return tl.reshape(tl.permute(split, (0, 1, 4, 2, 3, 5)), (ROWS, 8 * BLOCK_W))


@triton.jit
def places_by_depth(BLOCK_W: tl.constexpr, BY_GROUP: tl.constexpr):
    """The place of each of the product's depth, [8 BLOCK_W], for inputs that are gathered anyway. (Triton 3.6 does not
    compile `inputs_by_depth` of those.)
    """
    depth = tl.arange(0, 8 * BLOCK_W)
    if BY_GROUP:
        t, b, a = depth // 2 % 4, depth // 16 % 2, depth // 8 % 2
    else:
        t, b, a = depth // 4 % 4, depth // 2 % 2, depth // 16 % 2
    return depth // 32 * 32 + t * 8 + b * 4 + a * 2 + depth % 2


@triton.jit
def codes_by_depth(
    words,
    exponent,
    DTYPE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NEXT: tl.constexpr,
    WARPS: tl.constexpr,
    BY_GROUP: tl.constexpr,
):
    """Words of `words_by_lane` as the codes' numbers by the product's rows and depth: [BLOCK_N, 8 BLOCK_W] in DTYPE.

    exponent: see `pairs_arguments`.
    """
    pairs = tl.join(tl.join(words, words >> 8), tl.join(words >> 4, words >> 12)) & 0x000F000F
    pairs = pairs | exponent
    codes = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).to(DTYPE, bitcast=True)
    split = tl.reshape(
        codes, (BLOCK_W // 4, BLOCK_N // (8 * NEXT * WARPS), WARPS, 8, 4, NEXT // 2, 2, 2, 2, 2)
    )  # by four words, h, w, g, t, j1, j0, b, a, which of the pair
    if BY_GROUP:
        return tl.reshape(tl.permute(split, (1, 5, 2, 6, 3, 0, 7, 8, 4, 9)), (BLOCK_N, 8 * BLOCK_W))
    else:
        return tl.reshape(tl.permute(split, (1, 5, 2, 6, 3, 0, 8, 4, 7, 9)), (BLOCK_N, 8 * BLOCK_W))


@triton.jit
def differences(codes, zero, exponent):
    """codes - zero, exact: of codes [rows, depth] as `codes_by_depth` makes them, zero-points [rows, 1] as integers.

    Two by an instruction.
    """
    zero = (zero | exponent).to(tl.int16).to(codes.dtype, bitcast=True)
    zero = tl.broadcast_to(zero, codes.shape)
    if INTERPRETING:
        return (codes.to(tl.float32) - zero.to(tl.float32)).to(codes.dtype)
    elif codes.dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [codes, zero], dtype=tl.float16, is_pure=True, pack=2
        )
    else:  # sm_80 has no other arithmetic on pairs of bf16
        return tl.inline_asm_elementwise(
            "{ .reg .b32 less; mov.b32 less, 0xBF80BF80; fma.rn.bf16x2 $0, $2, less, $1; }",
            "=r,r,r",
            [codes, zero],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def with_group(
    sums,
    words,
    x,
    zero,
    scale,
    exponent,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NEXT: tl.constexpr,
    WARPS: tl.constexpr,
    BY_GROUP: tl.constexpr,
):
    """sums [BLOCK_N, ROWS], by the product's rows, plus the products of words of one group with inputs x [ROWS, depth].

    words: of `words_by_lane`. x: of `inputs_by_depth`, or at `places_by_depth`. zero (integers), scale: [1, BLOCK_N],
    of `outputs_by_row`.
    """
    HALF: tl.constexpr = x.dtype == tl.float16
    OFFSET: tl.constexpr = 0.0 if HALF else 128.0
    STEP: tl.constexpr = 2.0**-24 if HALF else 1.0
    codes = codes_by_depth(words, exponent, x.dtype, BLOCK_W, BLOCK_N, NEXT, WARPS, BY_GROUP)
    inputs = tl.trans(x)
    products = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    zero = tl.reshape(zero, (BLOCK_N,))[:, None]
    scale = tl.reshape(scale, (BLOCK_N,))[:, None].to(tl.float32) * (1.0 / STEP)
    if ROWS <= 8:
        products = dot(codes, inputs, products)  # [BLOCK_N, 8 BLOCK_W] @ [8 BLOCK_W, ROWS]
        if ROWS == 1:
            totals = tl.sum(x.to(tl.float32), axis=1)[None, :]
        else:
            # One more tile for the matrix units, the same for all outputs, where adding up takes two instructions for
            # every input of every thread.
            ones = tl.full((BLOCK_N, 8 * BLOCK_W), 1.0, dtype=tl.float32).to(x.dtype)
            totals = dot(ones, inputs, tl.zeros((BLOCK_N, ROWS), dtype=tl.float32))
        return sums + (products - (zero.to(tl.float32) + OFFSET) * STEP * totals) * scale
    else:
        # Half an instruction for each weight, where one for each sum and the totals' would be more of 32 rows, and
        # twice the matrix units' work.
        return sums + dot(differences(codes, zero, exponent), inputs, products) * scale
