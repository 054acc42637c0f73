"""Products with experts' codes, on the device: a tile of rows on the matrix units, and one row from registers."""

from typing import Any

import triton
import triton.language as tl

from tkernels.config import Config
from tkernels.device import DeviceFacts
from tkernels.language import dot
from tkernels.ops.dequant_gemm._pairs import (
    by_output,
    inputs_by_depth,
    outputs_by_row,
    pair_rows,
    pairs_arguments,
    with_group,
    words_by_lane,
)
from tkernels.ops.dequant_gemm._unpack import group_tile, inputs_at, unpacked, word_tile
from tkernels.ops.dequant_gemm.gemv import dequant_gemm_gemv_products
from tkernels.ops.grouped_matmul._e2m1 import e2m1_products, unpacked_e2m1
from tkernels.quantized.codes import codes_per_word
from tkernels.quantized.stacked import StackedWeight


def codes_arguments(weight: StackedWeight, block_w: int) -> dict[str, Any]:
    """Experts' codes as kernels take them that read `block_w` word rows at a time."""
    arguments: dict[str, Any] = {}
    for name in ("packed", "high", "scales", "zeros"):
        part = getattr(weight, name)
        strides = (0, 0) if part is None else part.stride()[:2]
        arguments |= {f"{name}_ptr": part, f"stride_{name}_e": strides[0], f"stride_{name}_w": strides[1]}
    permutation, group_words = weight.permutation, weight.group_size // codes_per_word(weight.bits)
    return arguments | {
        "permutation_ptr": permutation,
        "stride_permutation_e": 0 if permutation is None else permutation.stride(0),
        "BITS": weight.bits,
        "E2M1": weight.e2m1,
        "GROUP_WORDS": group_words,
        "ONE_GROUP": group_words % block_w == 0,
    }


@triton.jit
def expert_code_sums(
    x_ptrs, mask_m, packed_ptr, high_ptr, scales_ptr, zeros_ptr, permutation_ptr, stride_packed_e, stride_packed_w,
    stride_high_e, stride_high_w, stride_scales_e, stride_scales_w, stride_zeros_e, stride_zeros_w,
    stride_permutation_e, expert, offs_n, mask_n, places, magic, DTYPE: tl.constexpr, BITS: tl.constexpr,
    E2M1: tl.constexpr, GROUP_WORDS: tl.constexpr, ONE_GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows of x times one expert's weight, in fp32: [BLOCK_M, BLOCK_N]. x_ptrs: of input 0, with a last dim of 1."""
    FIELDS: tl.constexpr = 16 if BITS == 3 else 32 // BITS
    expert = expert.to(tl.int64)  # times a stride it can pass 2**31
    packed_ptr += expert * stride_packed_e
    scales_ptr += expert * stride_scales_e
    if high_ptr is not None:
        high_ptr += expert * stride_high_e
    if zeros_ptr is not None:
        zeros_ptr += expert * stride_zeros_e
    if permutation_ptr is not None:
        permutation_ptr += expert * stride_permutation_e
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, places, BLOCK_K):
        cols, mask_k = inputs_at(permutation_ptr, start + tl.arange(0, BLOCK_K), places)
        x = tl.load(x_ptrs + cols[None, :], mask=mask_m[:, None] & mask_k[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
        first, end = start // FIELDS, places // FIELDS
        packed, high = word_tile(
            packed_ptr, high_ptr, stride_packed_w, stride_high_w, first, end, offs_n, mask_n, BLOCK_K // FIELDS
        )
        zero, scale = group_tile(
            scales_ptr, zeros_ptr, stride_scales_w, stride_zeros_w, first, end, offs_n, mask_n,
            BITS, GROUP_WORDS, ONE_GROUP, BLOCK_K // FIELDS,
        )  # fmt: skip
        if E2M1:
            weight = unpacked_e2m1(packed, scale, DTYPE, BLOCK_N, BLOCK_K)
        else:
            weight = unpacked(packed, high, zero, scale, magic, DTYPE, BITS, BLOCK_N, BLOCK_K)
        sums = dot(x, tl.trans(weight), sums)  # [BLOCK_M, BLOCK_K] @ [BLOCK_K, BLOCK_N]
    return sums


def row_arguments(weight: StackedWeight, pairs: bool, config: Config, device: DeviceFacts) -> dict[str, Any]:
    """What `row_times_codes` takes of experts' codes and a config. pairs: see `takes_pairs`."""
    block_w = pair_rows(weight.group_size, 2 * config["BLOCK_W"]) if pairs else config["BLOCK_W"]
    if not pairs and codes_per_word(weight.bits) > 8:
        block_w //= 2  # a thread keeps the inputs of all codes
    words = weight.places // codes_per_word(weight.bits)
    how = pairs_arguments(weight.dtype, config["BLOCK_N"], config.num_warps, device)
    if not pairs:
        how["exponent"] = (127 + 23) << 23  # of 2**23 in fp32
    return {
        **codes_arguments(weight, block_w),
        **how,
        "words": words,
        "PAIRS": pairs,
        "WHOLE": words % block_w == 0,
        "BLOCK_N": config["BLOCK_N"],
        "BLOCK_W": block_w,
        "STAGES": config.num_stages,
    }


@triton.jit
def row_times_codes(
    x_ptr, packed_ptr, high_ptr, scales_ptr, zeros_ptr, permutation_ptr, stride_packed_e, stride_packed_w,
    stride_high_e, stride_high_w, stride_scales_e, stride_scales_w, stride_zeros_e, stride_zeros_w,
    stride_permutation_e, expert, first_n, outputs, words, exponent, BITS: tl.constexpr, E2M1: tl.constexpr,
    GROUP_WORDS: tl.constexpr, ONE_GROUP: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr, NEXT: tl.constexpr,
    WARPS: tl.constexpr, BY_GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A row of x times an expert's outputs first_n .. first_n + BLOCK_N, in fp32: [BLOCK_N]. As dequant_gemm's gemv."""
    FIELDS: tl.constexpr = 16 if BITS == 3 else 32 // BITS
    expert = expert.to(tl.int64)  # times a stride it can pass 2**31
    packed_ptr += expert * stride_packed_e
    scales_ptr += expert * stride_scales_e
    if high_ptr is not None:
        high_ptr += expert * stride_high_e
    if zeros_ptr is not None:
        zeros_ptr += expert * stride_zeros_e
    if permutation_ptr is not None:
        permutation_ptr += expert * stride_permutation_e
    offs_n = first_n + tl.arange(0, BLOCK_N)
    mask_n = offs_n < outputs
    if PAIRS:
        sums = tl.zeros((BLOCK_N, 1), dtype=tl.float32)
        offs_g = outputs_by_row(first_n, BLOCK_N, NEXT, WARPS)
    else:
        sums = tl.zeros((BLOCK_W, BLOCK_N), dtype=tl.float32)
        offs_g = offs_n
    for start in tl.range(0, words, BLOCK_W, num_stages=STAGES):
        cols, mask_k = inputs_at(permutation_ptr, start * FIELDS + tl.arange(0, BLOCK_W * FIELDS), words * FIELDS)
        zero, scale = group_tile(
            scales_ptr, zeros_ptr, stride_scales_w, stride_zeros_w, start, words, offs_g, offs_g < outputs,
            BITS, GROUP_WORDS, ONE_GROUP, BLOCK_W,
        )  # fmt: skip
        x = tl.load(x_ptr + cols, mask=mask_k, other=0.0)
        if PAIRS:
            tile = words_by_lane(
                packed_ptr, stride_packed_w, start, words, first_n, outputs, WHOLE, BLOCK_W, BLOCK_N, NEXT
            )
            x = inputs_by_depth(x[None, :], 1, BLOCK_W, BY_GROUP)
            sums = with_group(sums, tile, x, zero, scale, exponent, 1, BLOCK_W, BLOCK_N, NEXT, WARPS, BY_GROUP)
        else:
            packed, high = word_tile(
                packed_ptr, high_ptr, stride_packed_w, stride_high_w, start, words, offs_n, mask_n, BLOCK_W
            )
            if E2M1:
                products = e2m1_products(packed, x.to(tl.float32), BLOCK_W)
            else:
                products = dequant_gemm_gemv_products(packed, high, zero.to(tl.float32), exponent, x, BITS, BLOCK_W)
            sums += products * scale.to(tl.float32)
    if PAIRS:
        return tl.reshape(by_output(sums, BLOCK_N, NEXT, WARPS), (BLOCK_N,))
    else:
        return tl.sum(sums, axis=0)
