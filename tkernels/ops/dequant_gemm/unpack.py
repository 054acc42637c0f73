"""Codes out of interleaved words, and numbers out of codes: what the tiled kernels of dequant_gemm share.

A conversion from an integer runs at a quarter of the rate of other arithmetic or less on every NVIDIA GPU. So a code is
put into the low mantissa bits of a number whose last of these bits counts 1 (1024 in fp16, 128 in bf16), which makes it
1024 + code, and the same sum with the zero-point is subtracted: exact, for both are integers of few bits. Two codes at
a time, in the halves of one register, the even one above: the order in which ptxas pairs the two subtractions, so that
it need not turn the pair around. (Kim et al., 2022, "Who Says Elephants Can't Run"; Frantar et al., 2024,
"MARLIN", whose kernels do it in assembly, as does NVIDIA's FasterTransformer.)
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tkernels.language import INTERPRETING
from tkernels.ops.dequant_gemm.weight import QuantizedWeight


def magic_of(dtype: torch.dtype) -> int:
    """In both halves of a word, the bits of the smallest number of a dtype whose mantissa's last bit counts 1: 1024 in
    fp16, 128 in bf16; 0 for fp32, which has no use for it.

    A kernel takes it as an argument, not as a constant: with mask and magic both written into the instruction, ptxas
    makes two of what is one with the magic in a register, and LLVM computes the halves of the word apart (seen on
    sm_90: 5.8 instructions for each weight in split_k, against 4.9).
    """
    return {torch.float16: 0x64006400, torch.bfloat16: 0x43004300}.get(dtype, 0)


def weight_arguments(weight: QuantizedWeight, block_w: int) -> dict[str, Any]:
    """A weight's parts as kernels take them, and what `weight_tile` is compiled for at tiles of `block_w` word rows."""
    scales, zeros = weight.scales, weight.zeros
    group_words = weight.group_size // 8
    return {
        "packed_ptr": weight.packed,
        "scales_ptr": scales,
        "zeros_ptr": zeros,
        "stride_packed_w": weight.packed.stride(0),
        "stride_scales_g": 0 if scales is None else scales.stride(0),
        "stride_zeros_g": 0 if zeros is None else zeros.stride(0),
        "GROUP_WORDS": group_words,
        "ONE_GROUP": group_words % block_w == 0,
    }


@triton.jit
def for_each_code(values, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """One value for each word, [BLOCK_K / 8, BLOCK_N], or for each output, [1, BLOCK_N] -> what broadcasts to
    [BLOCK_N, BLOCK_K].
    """
    if values.shape[0] == 1:
        return tl.trans(values)
    else:
        repeated = tl.broadcast_to(values[:, :, None], (BLOCK_K // 8, BLOCK_N, 8))
        return tl.reshape(tl.permute(repeated, (1, 0, 2)), (BLOCK_N, BLOCK_K))


@triton.jit
def unpacked(packed, zero, scale, magic, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """(code - zero-point) * scale as a tile of the weight, [BLOCK_N, BLOCK_K] in DTYPE, rounded once.

    packed [BLOCK_K / 8, BLOCK_N]; zero (integers) and scale (in DTYPE; None stands for 1) [BLOCK_K / 8 or 1, BLOCK_N];
    magic: magic_of(DTYPE).
    """
    # Joins, unlike a broadcast against shifts, let a thread keep a word's 8 weights side by side, so that they reach
    # shared memory as one 16-byte store, not eight of 2 bytes (seen in the machine code of the configs here).
    pairs = tl.join(tl.join(packed, packed >> 8), tl.join(packed >> 4, packed >> 12)) & 0x000F000F
    zero = for_each_code(zero, BLOCK_N, BLOCK_K)
    if tl.float32 == DTYPE:
        codes = tl.join(pairs >> 16, pairs & 15)
    else:
        pairs = pairs | magic
        codes = tl.join((pairs >> 16).to(tl.int16), pairs.to(tl.int16)).to(DTYPE, bitcast=True)
        zero = (zero | magic).to(tl.int16).to(DTYPE, bitcast=True)
        if INTERPRETING:  # it has no arithmetic on bf16
            codes, zero = codes.to(tl.float32), zero.to(tl.float32)
    # The bits of k within its word are the last three dims: [BLOCK_N, BLOCK_K / 8, 2, 2, 2].
    codes = tl.reshape(tl.permute(codes, (1, 0, 2, 3, 4)), (BLOCK_N, BLOCK_K))
    weight = codes - zero
    if tl.float32 == DTYPE:
        weight = weight.to(tl.float32)
    if scale is not None:
        weight = weight * for_each_code(scale, BLOCK_N, BLOCK_K).to(weight.dtype)
    return weight.to(DTYPE)


@triton.jit
def weight_tile(
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    stride_packed_w,
    stride_scales_g,
    stride_zeros_g,
    first,
    end,
    offs_n,
    mask_n,
    GROUP_WORDS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Word rows first .. first + BLOCK_W, those before `end`: packed [BLOCK_W, N], zero-points (integers) and scales.

    ONE_GROUP, the whole tile shares one row of scales: zero-points and scales are [1, N]; else [BLOCK_W, N].
    """
    offs_w = first + tl.arange(0, BLOCK_W)
    mask = (offs_w < end)[:, None] & mask_n[None, :]
    row_ptrs = packed_ptr + offs_w[:, None] * stride_packed_w  # below 2**31: QuantizedWeight refuses more
    packed = tl.load(row_ptrs + offs_n[None, :], mask=mask, other=0)
    if ONE_GROUP:
        group = tl.full((1, 1), first // GROUP_WORDS, dtype=tl.int64)
        mask = mask_n[None, :]
    else:
        group = (offs_w // GROUP_WORDS).to(tl.int64)[:, None]
    scale = tl.load(scales_ptr + group * stride_scales_g + offs_n[None, :], mask=mask, other=0.0)
    if zeros_ptr is not None:
        zero = tl.load(zeros_ptr + group * stride_zeros_g + offs_n[None, :], mask=mask, other=0).to(tl.int32)
    else:
        zero = tl.full((1, offs_n.shape[0]), 8, dtype=tl.int32)
    return packed, zero, scale
