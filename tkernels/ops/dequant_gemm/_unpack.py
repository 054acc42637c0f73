"""Codes out of interleaved words, and numbers out of codes: what the kernels of dequant_gemm share.

A conversion from an integer runs at a quarter of the rate of other arithmetic or less on every NVIDIA GPU. So a code is
put into the low mantissa bits of a number whose last of these bits counts 1 (1024 in fp16, 128 in bf16), which makes it
1024 + code, and the same sum with the zero-point is subtracted: exact, for both are integers of few bits. Two codes at
a time, in the halves of one register, the odd one above. (Kim et al., 2022, "Who Says Elephants Can't Run"; Frantar et
al., 2024, "MARLIN", whose kernels do it in assembly, as does NVIDIA's FasterTransformer.) 4-bit codes that go to the
matrix units pair by pair have a better way: see _pairs.py.

bf16 has 7 bits of mantissa, too few for codes of 8: those go through fp32, as everything of fp32 does, and are rounded
once. A table's entry is picked by `tl.gather`, which becomes one shuffle for each weight: 8.7 instructions on sm_90 for
16 entries in a matrix-vector product, where a tree of selections takes 9.8 for 8 entries and twice that for 16.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tkernels.language import INTERPRETING, prefetch_rows
from tkernels.quantized.codes import codes_per_word
from tkernels.quantized.weight import QuantizedWeight


def magic_of(dtype: torch.dtype) -> int:
    """In both halves of a word, the bits of the smallest number of a dtype whose mantissa's last bit counts 1: 1024 in
    fp16, 128 in bf16; 0 for fp32, which has no use for it.

    A kernel takes it as an argument, not as a constant: with mask and magic both written into the instruction, ptxas
    makes two of what is one with the magic in a register, and LLVM computes the halves of the word apart (seen on
    sm_90: 5.8 instructions for each weight in split_k, against 4.9).
    """
    return {torch.float16: 0x64006400, torch.bfloat16: 0x43004300}.get(dtype, 0)


def words_arguments(weight: QuantizedWeight) -> dict[str, Any]:
    """What `word_tile` reads, as kernels take it."""
    high = weight.high
    return {
        "packed_ptr": weight.packed,
        "high_ptr": high,
        "stride_packed_w": weight.packed.stride(0),
        "stride_high_w": 0 if high is None else high.stride(0),
        "BITS": weight.bits,
    }


def groups_arguments(weight: QuantizedWeight, block_w: int) -> dict[str, Any]:
    """What `group_tile` reads in tiles of `block_w` word rows, as kernels take it; None of a lookup."""
    scales, zeros = weight.scales, weight.zeros
    group_words = weight.group_size // codes_per_word(weight.bits)
    return {
        "scales_ptr": scales,
        "zeros_ptr": zeros,
        "stride_scales_g": 0 if scales is None else scales.stride(0),
        "stride_zeros_g": 0 if zeros is None else zeros.stride(0),
        "GROUP_WORDS": group_words,
        "ONE_GROUP": group_words % block_w == 0,
    }


def table_arguments(weight: QuantizedWeight) -> dict[str, Any]:
    """What `table_tile` and `looked_up` read, as kernels take it; None of uniform codes."""
    table = weight.table
    return {"table_ptr": table, "stride_table_c": 0 if table is None else table.stride(0)}


@triton.jit
def word_tile(
    packed_ptr,
    high_ptr,
    stride_packed_w,
    stride_high_w,
    first,
    end,
    offs_n,
    mask_n,
    BLOCK_W: tl.constexpr,
):
    """Word rows first .. first + BLOCK_W, those before `end`: packed [BLOCK_W, N], and of 3-bit codes the third bits of
    the same 16 places, from bit 0 and bit 16 on.
    """
    offs_w = first + tl.arange(0, BLOCK_W)
    mask = (offs_w < end)[:, None] & mask_n[None, :]
    # Offsets are below 2**31: QuantizedWeight refuses more.
    packed = tl.load(packed_ptr + offs_w[:, None] * stride_packed_w + offs_n[None, :], mask=mask, other=0)
    high = packed  # nobody reads it, and None does not go through a tuple
    if high_ptr is not None:
        # A word of third bits is for two rows: the second load of it hits the L1 cache.
        high = tl.load(high_ptr + (offs_w // 2)[:, None] * stride_high_w + offs_n[None, :], mask=mask, other=0)
        high = high >> (8 * (offs_w % 2))[:, None]
    return packed, high


@triton.jit
def prefetch_words(
    packed_ptr, stride_packed_w, first, end, first_n, outputs, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Asks for the first word rows of a program, before it has to wait: see `prefetch_rows`."""
    if ROWS > 0:
        offs_w = first + tl.arange(0, ROWS)
        row_ptrs = packed_ptr + offs_w[:, None] * stride_packed_w
        prefetch_rows(row_ptrs, (offs_w < end)[:, None], first_n, outputs, BLOCK_N)


@triton.jit
def group_tile(
    scales_ptr,
    zeros_ptr,
    stride_scales_g,
    stride_zeros_g,
    first,
    end,
    offs_n,
    mask_n,
    BITS: tl.constexpr,
    GROUP_WORDS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Zero-points (integers) and scales of word rows first .. first + BLOCK_W, those before `end`: [BLOCK_W, N]; or,
    ONE_GROUP, the whole tile shares one row of them, [1, N].
    """
    if ONE_GROUP:
        group = tl.full((1, 1), first // GROUP_WORDS, dtype=tl.int64)
        mask = mask_n[None, :]
    else:
        offs_w = first + tl.arange(0, BLOCK_W)
        group = (offs_w // GROUP_WORDS).to(tl.int64)[:, None]
        mask = (offs_w < end)[:, None] & mask_n[None, :]
    scale = tl.load(scales_ptr + group * stride_scales_g + offs_n[None, :], mask=mask, other=0.0)
    if zeros_ptr is not None:
        zero = tl.load(zeros_ptr + group * stride_zeros_g + offs_n[None, :], mask=mask, other=0).to(tl.int32)
    else:
        zero = tl.full((1, offs_n.shape[0]), 2 ** (BITS - 1), dtype=tl.int32)
    return zero, scale


@triton.jit
def table_tile(table_ptr, stride_table_c, offs_n, mask_n, BITS: tl.constexpr):
    """Each output's own values, [BLOCK_N, 2**BITS]. Of uniform codes, and of 8 bits, whose 256 are too many for
    registers, something that nobody reads: Triton 3.6 takes no None from a function.
    """
    if table_ptr is None or BITS == 8:
        return offs_n
    else:
        entries = tl.arange(0, 2**BITS)
        table_ptrs = table_ptr + entries[None, :] * stride_table_c + offs_n[:, None]
        return tl.load(table_ptrs, mask=mask_n[:, None], other=0.0)


@triton.jit
def for_each_code(values, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """One value for each word, [BLOCK_W, BLOCK_N], or for each output, [1, BLOCK_N] -> what broadcasts to
    [BLOCK_N, BLOCK_K].
    """
    if values.shape[0] == 1:
        return tl.trans(values)
    else:
        FIELDS: tl.constexpr = BLOCK_K // values.shape[0]
        repeated = tl.broadcast_to(values[:, :, None], (values.shape[0], BLOCK_N, FIELDS))
        return tl.reshape(tl.permute(repeated, (1, 0, 2)), (BLOCK_N, BLOCK_K))


@triton.jit
def pairs_in(packed, high, BITS: tl.constexpr):
    """Words [BLOCK_W, BLOCK_N] -> pairs of neighbouring codes in 16 bits each, the odd one above: two dims for 8 bits,
    three for 4, four for fewer, of which the later ones are the lower bits of the pair's place.
    """
    # Joins, unlike a broadcast against shifts, let a thread keep a word's weights side by side, so that they reach
    # shared memory as 16-byte stores, not as many of 2 bytes (seen in the machine code of the configs here).
    if BITS == 8:
        return tl.join(packed, packed >> 8) & 0x00FF00FF
    elif BITS == 4:
        return tl.join(tl.join(packed, packed >> 8), tl.join(packed >> 4, packed >> 12)) & 0x000F000F
    else:
        even = tl.join(tl.join(packed, packed >> 8), tl.join(packed >> 4, packed >> 12))
        odd = tl.join(tl.join(packed >> 2, packed >> 10), tl.join(packed >> 6, packed >> 14))
        pairs = tl.join(even, odd) & 0x00030003
        if BITS == 3:
            even = tl.join(tl.join(high << 2, high >> 2), tl.join(high, high >> 4))
            odd = tl.join(tl.join(high << 1, high >> 3), tl.join(high >> 1, high >> 5))
            pairs = pairs | (tl.join(even, odd) & 0x00040004)
        return pairs


@triton.jit
def by_output(codes, BITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Codes as `pairs_in` lays them out, with which of a pair as the last dim -> [BLOCK_N, BLOCK_K]."""
    if BITS == 8:
        codes = tl.permute(codes, (1, 0, 2, 3))
    elif BITS == 4:
        codes = tl.permute(codes, (1, 0, 2, 3, 4))
    else:
        codes = tl.permute(codes, (1, 0, 2, 3, 4, 5))
    return tl.reshape(codes, (BLOCK_N, BLOCK_K))


@triton.jit
def unpacked(
    packed,
    high,
    zero,
    scale,
    magic,
    DTYPE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(code - zero-point) * scale as a tile of the weight, [BLOCK_N, BLOCK_K] in DTYPE, rounded once.

    packed, high: see word_tile. zero (integers) and scale (in DTYPE; None stands for 1): see group_tile. magic:
    magic_of(DTYPE).
    """
    pairs = pairs_in(packed, high, BITS)
    zero = for_each_code(zero, BLOCK_N, BLOCK_K)
    if tl.float32 == DTYPE or (tl.bfloat16 == DTYPE and BITS == 8):
        codes = by_output(tl.join(pairs & 0xFFFF, pairs >> 16), BITS, BLOCK_N, BLOCK_K)
        # 0x4B000000 is 2**23 in fp32, whose last bit counts 1.
        weight = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (zero.to(tl.float32) + 8388608.0)
    else:
        pairs = pairs | magic
        codes = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).to(DTYPE, bitcast=True)
        zero = (zero | magic).to(tl.int16).to(DTYPE, bitcast=True)
        if INTERPRETING:  # it has no arithmetic on bf16
            codes, zero = codes.to(tl.float32), zero.to(tl.float32)
        weight = by_output(codes, BITS, BLOCK_N, BLOCK_K) - zero
    if scale is not None:
        weight = weight * for_each_code(scale, BLOCK_N, BLOCK_K).to(weight.dtype)
    return weight.to(DTYPE)


@triton.jit
def looked_up(
    packed,
    high,
    table,
    table_ptr,
    stride_table_c,
    offs_n,
    mask_n,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Each code's value, as a tile of the weight, [BLOCK_N, BLOCK_K]. packed, high, table: see the functions above."""
    pairs = pairs_in(packed, high, BITS)
    codes = by_output(tl.join(pairs & 0xFFFF, pairs >> 16), BITS, BLOCK_N, BLOCK_K)
    if BITS == 8:
        # The table of 64 outputs is 32 kB of the L1 cache. Offsets are below 2**31: QuantizedWeight refuses more.
        return tl.load(table_ptr + codes * stride_table_c + offs_n[:, None], mask=mask_n[:, None], other=0.0)
    else:
        return tl.gather(table, codes, 1)


@triton.jit
def inputs_at(permutation_ptr, offs_k, end):
    """The inputs that places offs_k stand for, [BLOCK_K], and which of them are: those before `end` and no padding."""
    mask = offs_k < end
    if permutation_ptr is None:
        return offs_k, mask
    else:
        inputs = tl.load(permutation_ptr + offs_k, mask=mask, other=-1)
        return inputs, inputs >= 0
