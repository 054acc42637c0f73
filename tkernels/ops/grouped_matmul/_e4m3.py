"""Products with experts' e4m3 codes, on the device: numbers out of codes, a tile of rows, and one row from registers.

Codes are read as bytes, so that devices without fp8 of their own read them like others. A code's exponent and mantissa
become the lowest of the exponent and the highest of the mantissa of a float of 32 bits, its sign that one's sign: the
code's value times a power of two, subnormal codes included. One product takes the power of two out, exactly. 16-bit
floats hold every code, so what goes to the matrix units is exact too; scales are multiplied with fp32 sums.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tkernels.language import dot
from tkernels.ops.arguments import pointers
from tkernels.quantized.row_codes import BLOCK
from tkernels.quantized.stacked_scaled import StackedScaledWeight

_FROM_FP32 = tl.constexpr(2.0**120)


def blocks_arguments(weight: StackedScaledWeight) -> dict[str, Any]:
    """Experts' e4m3 codes, as bytes, and their scales, as kernels take them."""
    codes = weight.values.view(torch.int8)
    return {**pointers("codes[en] scales[en]", codes, weight.scales), "inputs": weight.shape[2], "GROUP": BLOCK}


@triton.jit
def e4m3_values(codes):
    """Codes [...] as int8 -> their values in fp32. No code is NaN: whoever reads a checkpoint has seen to it."""
    return ((codes.to(tl.int32) << 20) & -0x78100000).to(tl.float32, bitcast=True) * _FROM_FP32


@triton.jit
def expert_block_sums(
    x_ptrs, mask_m, codes_ptr, scales_ptr, stride_codes_e, stride_codes_n, stride_scales_e, stride_scales_n, expert,
    first_n, mask_n, inputs, DTYPE: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows of x times an expert's outputs first_n .. first_n + BLOCK_N, in fp32: [BLOCK_M, BLOCK_N]. x_ptrs: of input
    0, with a last dim of 1.

    BLOCK_N and BLOCK_K divide GROUP, and GROUP inputs and first_n's beginning: what a tile reads is of one block.
    """
    expert = expert.to(tl.int64)  # times a stride it can pass 2**31
    offs_n = first_n.to(tl.int64) + tl.arange(0, BLOCK_N)  # likewise
    codes_ptrs = codes_ptr + expert * stride_codes_e + offs_n[:, None] * stride_codes_n
    scales_ptr += expert * stride_scales_e + first_n // GROUP * stride_scales_n
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, inputs, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptrs + offs_k[None, :], mask=mask_m[:, None], other=0.0)  # [BLOCK_M, BLOCK_K]
        codes = tl.load(codes_ptrs + offs_k[None, :], mask=mask_n[:, None], other=0)  # [BLOCK_N, BLOCK_K]
        weight = e4m3_values(codes).to(DTYPE)
        products = dot(x, tl.trans(weight), tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32))
        sums += products * tl.load(scales_ptr + start // GROUP)
    return sums


@triton.jit
def row_times_blocks(
    x_ptr, codes_ptr, scales_ptr, stride_codes_e, stride_codes_n, stride_scales_e, stride_scales_n, expert, first_n,
    mask_n, inputs, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A row of x times an expert's outputs first_n .. first_n + BLOCK_N, in fp32: [BLOCK_N]. Blocks as there."""
    expert = expert.to(tl.int64)  # times a stride it can pass 2**31
    offs_n = first_n.to(tl.int64) + tl.arange(0, BLOCK_N)  # likewise
    codes_ptrs = codes_ptr + expert * stride_codes_e + offs_n[:, None] * stride_codes_n
    scales_ptr += expert * stride_scales_e + first_n // GROUP * stride_scales_n
    sums = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
        offs_k = start + tl.arange(0, BLOCK_K)
        codes = tl.load(codes_ptrs + offs_k[None, :], mask=mask_n[:, None], other=0)
        x = tl.load(x_ptr + offs_k).to(tl.float32) * tl.load(scales_ptr + start // GROUP)
        sums += e4m3_values(codes) * x[None, :]
    return tl.sum(sums, axis=1)
