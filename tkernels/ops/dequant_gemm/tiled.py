"""Tiles of the output on the matrix units: each tile of codes is unpacked in registers on its way to shared memory.

Wins from a handful of tokens on: the codes are read once for BLOCK_M tokens, and the loads of the next tiles are in
flight while this one is multiplied.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.language import dot
from tkernels.ops.dequant_gemm.weight import QuantizedWeight

CONFIGS = tuple(
    Config(BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=depth, num_warps=warps, num_stages=stages)
    for rows, columns, depth, warps, stages in (
        (16, 32, 128, 4, 4),
        (16, 64, 64, 4, 4),
        (16, 64, 128, 4, 4),
        (16, 128, 64, 8, 4),
        (32, 64, 128, 4, 4),
        (64, 64, 64, 4, 4),
        (64, 64, 128, 4, 3),
        (64, 128, 64, 8, 3),
        (64, 128, 64, 8, 4),
        (128, 64, 64, 8, 4),
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
    )
)


@triton.jit
def dequant_gemm_tiled_nibble(packed, zero, scale, NIBBLE: tl.constexpr):
    """The weights of one code of each word, in fp32."""
    return (((packed >> (4 * NIBBLE)) & 15) - zero).to(tl.float32) * scale


@triton.jit
def dequant_gemm_tiled_unpack(packed, zero, scale, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Word rows [BLOCK_K / 8, BLOCK_N] -> weights [BLOCK_N, BLOCK_K] in DTYPE.

    Joins, unlike a broadcast against shifts, let a thread keep a word's 8 weights side by side, so that they reach
    shared memory as one 16-byte store, not eight of 2 bytes (seen in the machine code of every config here).
    """
    w0 = dequant_gemm_tiled_nibble(packed, zero, scale, 0)
    w1 = dequant_gemm_tiled_nibble(packed, zero, scale, 1)
    w2 = dequant_gemm_tiled_nibble(packed, zero, scale, 2)
    w3 = dequant_gemm_tiled_nibble(packed, zero, scale, 3)
    w4 = dequant_gemm_tiled_nibble(packed, zero, scale, 4)
    w5 = dequant_gemm_tiled_nibble(packed, zero, scale, 5)
    w6 = dequant_gemm_tiled_nibble(packed, zero, scale, 6)
    w7 = dequant_gemm_tiled_nibble(packed, zero, scale, 7)
    even = tl.join(tl.join(w0, w4), tl.join(w2, w6))  # [BLOCK_K / 8, BLOCK_N, 2, 2]
    odd = tl.join(tl.join(w1, w5), tl.join(w3, w7))
    side_by_side = tl.permute(tl.join(even, odd), (1, 0, 2, 3, 4))  # [BLOCK_N, BLOCK_K / 8, 2, 2, 2]
    return tl.reshape(side_by_side, (BLOCK_N, BLOCK_K)).to(DTYPE)


@triton.jit
def dequant_gemm_tiled(
    out_ptr,
    x_ptr,
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    stride_out_m,
    stride_x_m,
    stride_packed_w,
    stride_scales_g,
    stride_zeros_g,
    tokens,
    outputs,
    inputs,
    GROUP_WORDS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A word row is a row of `packed`: 8 inputs for each output."""
    BLOCK_W: tl.constexpr = BLOCK_K // 8
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # M * stride can pass 2**31
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < tokens, offs_n < outputs
    zero_shifts = (4 * (offs_n % 8))[None, :]
    x_ptrs = x_ptr + offs_m[:, None] * stride_x_m
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, inputs, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        offs_w = start // 8 + tl.arange(0, BLOCK_W)
        mask_k = offs_k < inputs
        x = tl.load(x_ptrs + offs_k[None, :], mask=mask_m[:, None] & mask_k[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
        mask = (offs_w < inputs // 8)[:, None] & mask_n[None, :]
        row_ptrs = packed_ptr + offs_w[:, None] * stride_packed_w  # below 2**31: QuantizedWeight refuses more
        packed = tl.load(row_ptrs + offs_n[None, :], mask=mask, other=0)  # [BLOCK_W, BLOCK_N]
        if ONE_GROUP:  # the whole tile shares one row of scales
            group = tl.full((1, 1), start // 8 // GROUP_WORDS, dtype=tl.int64)
            mask_g = mask_n[None, :]
        else:
            group = (offs_w // GROUP_WORDS).to(tl.int64)[:, None]
            mask_g = mask
        scale_ptrs = scales_ptr + group * stride_scales_g + offs_n[None, :]
        scale = tl.load(scale_ptrs, mask=mask_g, other=0.0).to(tl.float32)  # [1 or BLOCK_W, BLOCK_N]
        if zeros_ptr is not None:
            zero_ptrs = zeros_ptr + group * stride_zeros_g + (offs_n // 8)[None, :]
            zero = (tl.load(zero_ptrs, mask=mask_g, other=0) >> zero_shifts) & 15
        else:
            zero = 8
        weight = dequant_gemm_tiled_unpack(packed, zero, scale, x_ptr.dtype.element_ty, BLOCK_N, BLOCK_K)
        sums = dot(x, tl.trans(weight), sums)  # [BLOCK_M, BLOCK_K] @ [BLOCK_K, BLOCK_N]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + offs_n, mask=mask_n).to(tl.float32)[None, :]
    out_ptrs = out_ptr + offs_m[:, None] * stride_out_m + offs_n[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    outputs, inputs = weight.shape
    block_m, block_n, block_k = (run.config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    run.launch(
        dequant_gemm_tiled,
        # Tokens on the faster axis: the programs that run together share their tile of the weight in the L2 cache.
        (triton.cdiv(x.shape[0], block_m), triton.cdiv(outputs, block_n)),
        out_ptr=out,
        x_ptr=x,
        packed_ptr=weight.packed,
        scales_ptr=weight.scales,
        zeros_ptr=weight.zeros,
        bias_ptr=bias,
        stride_out_m=out.stride(0),
        stride_x_m=x.stride(0),
        stride_packed_w=weight.packed.stride(0),
        stride_scales_g=weight.scales.stride(0),
        stride_zeros_g=0 if weight.zeros is None else weight.zeros.stride(0),
        tokens=x.shape[0],
        outputs=outputs,
        inputs=inputs,
        GROUP_WORDS=weight.group_size // 8,
        ONE_GROUP=weight.group_size % block_k == 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )


VARIANT = Variant(
    wins="from a handful of tokens on: a tile of codes is read and unpacked once for all tokens of its rows",
    launch=launch,
    configs=CONFIGS,
    # 64 rows are the least that Hopper's asynchronous matrix units take; BLOCK_K 64 divides the usual groups of 64 and
    # 128. One config for every M, or a row's bits would depend on the batch. gfx942 has 64 kB of shared memory: two
    # stages. Interpreted, tiles are the smallest legal ones, so that shapes of the tests cross them.
    default={
        "": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3),
        "sm_90": Config(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=4),
        "gfx942": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=2),
        "interpreter": Config(BLOCK_M=16, BLOCK_N=32, BLOCK_K=32, num_warps=4, num_stages=2),
    },
    key=("N", "K", "group_size"),
    deterministic=True,
    batch_invariant=True,
)
