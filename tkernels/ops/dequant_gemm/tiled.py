"""Tiles of the output on the matrix units: each tile of codes is unpacked in registers on its way to shared memory.

Wins from a handful of tokens on: the codes are read once for BLOCK_M tokens, and the loads of the next tiles are in
flight while this one is multiplied.
"""

import torch
import triton
import triton.language as tl

from tkernels import Axes, Config, DeviceFacts, Run, Variant
from tkernels.language import dot
from tkernels.ops.dequant_gemm.argument import only_plain
from tkernels.ops.dequant_gemm.unpack import magic_of, unpacked, weight_arguments, weight_tile
from tkernels.ops.dequant_gemm.weight import QuantizedWeight, interleaved

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
        (64, 64, 128, 4, 4),
        (64, 128, 128, 8, 3),
        (64, 256, 64, 8, 3),
        (64, 128, 64, 8, 3),
        (64, 128, 64, 8, 4),
        (128, 64, 64, 8, 4),
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 128, 128, 8, 3),
    )
)


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
    magic,
    GROUP_WORDS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A word row is a row of `packed`: 8 inputs for each output."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # M * stride can pass 2**31
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < tokens, offs_n < outputs
    x_ptrs = x_ptr + offs_m[:, None] * stride_x_m
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, inputs, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = offs_k < inputs
        x = tl.load(x_ptrs + offs_k[None, :], mask=mask_m[:, None] & mask_k[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
        packed, zero, scale = weight_tile(
            packed_ptr, scales_ptr, zeros_ptr, stride_packed_w, stride_scales_g, stride_zeros_g,
            start // 8, inputs // 8, offs_n, mask_n, GROUP_WORDS, ONE_GROUP, BLOCK_K // 8,
        )  # fmt: skip
        weight = unpacked(packed, zero, scale, magic, x_ptr.dtype.element_ty, BLOCK_N, BLOCK_K)
        sums = dot(x, tl.trans(weight), sums)  # [BLOCK_M, BLOCK_K] @ [BLOCK_K, BLOCK_N]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + offs_n, mask=mask_n).to(tl.float32)[None, :]
    out_ptrs = out_ptr + offs_m[:, None] * stride_out_m + offs_n[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return only_plain(axes)


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    outputs, inputs = weight.shape
    block_m, block_n, block_k = (run.config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    if x.dtype == torch.float32:
        # It has no matrix unit that multiplies it exactly: a larger product, unrolled in registers, spills (1.6 kB for
        # 64 x 64 x 64 on sm_80 to sm_90).
        block_m, block_n, block_k = min(block_m, 32), min(block_n, 64), min(block_k, 32)
    run.launch(
        dequant_gemm_tiled,
        # Tokens on the faster axis: the programs that run together share their tile of the weight in the L2 cache.
        (triton.cdiv(x.shape[0], block_m), triton.cdiv(outputs, block_n)),
        out_ptr=out,
        x_ptr=x,
        bias_ptr=bias,
        stride_out_m=out.stride(0),
        stride_x_m=x.stride(0),
        tokens=x.shape[0],
        outputs=outputs,
        inputs=inputs,
        magic=magic_of(weight.dtype),
        **weight_arguments(weight, block_k // 8),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )


VARIANT = Variant(
    wins="from a handful of tokens on: a tile of codes is read and unpacked once for all tokens of its rows",
    launch=launch,
    configs=CONFIGS,
    # 64 rows are the least that Hopper's asynchronous matrix units take. There, a tile of 64 outputs, so that 64 tokens
    # at N = 8192 are 128 programs, and one group of 128 deep: 5.3 instructions for each weight, 7.2 at half the depth.
    # BLOCK_K 64 divides the usual groups of 64 and 128. One config for every M, or a row's bits would depend on the
    # batch. gfx942 has 64 kB of shared memory: two stages. Interpreted, tiles are the smallest legal ones, so that
    # shapes of the tests cross them.
    default={
        "": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3),
        "sm_90": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=4),
        "gfx942": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=2),
        "interpreter": Config(BLOCK_M=16, BLOCK_N=32, BLOCK_K=32, num_warps=4, num_stages=2),
    },
    supports=supports,
    prepare=interleaved,
    key=("N", "K", "group_size"),
    deterministic=True,
    batch_invariant=True,
)
