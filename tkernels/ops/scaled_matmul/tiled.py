"""Tiles of the output on the matrix units, 8-bit codes all the way: twice the rate and half the bytes of 16-bit floats.

Wins from a few dozen tokens on: both operands go from memory through shared memory to the matrix units as they are, and
the scales are left to the sums, of which there are far fewer.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.ops.code_sums import (
    rescaled,
    sums_are_short,
    unsupported_sums,
    with_products,
    zero_sums,
)
from tkernels.ops.products import order_of_tile, tile_configs, tile_grid

CONFIGS = tile_configs(
    (
        (16, 64, 128, 4, 4),
        (32, 64, 128, 4, 4),
        (64, 64, 128, 4, 3),
        (64, 64, 128, 4, 4),
        (64, 128, 64, 4, 4),
        (64, 128, 128, 4, 3),
        (64, 128, 128, 4, 4),
        (128, 64, 128, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 128, 128, 8, 3),
        (128, 256, 128, 8, 3),
    )
)


@triton.jit(do_not_specialize=["tokens"])
def scaled_matmul_tiled(
    out_ptr,
    q_ptr,
    scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    stride_out_m,
    stride_q_m,
    stride_weight_n,
    tokens,
    outputs,
    inputs,
    SHORT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # M * stride and N * stride can pass 2**31.
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < tokens, offs_n < outputs
    q_ptrs = q_ptr + offs_m[:, None] * stride_q_m
    weight_ptrs = weight_ptr + offs_n[:, None] * stride_weight_n
    sums = zero_sums(BLOCK_M, BLOCK_N, q_ptr.dtype.element_ty)
    for start in range(0, inputs, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = (offs_k < inputs)[None, :]
        q = tl.load(q_ptrs + offs_k[None, :], mask=mask_m[:, None] & mask_k, other=0.0)  # [BLOCK_M, BLOCK_K]
        weight = tl.load(weight_ptrs + offs_k[None, :], mask=mask_n[:, None] & mask_k, other=0.0)
        sums = with_products(sums, q, tl.trans(weight), SHORT)  # [BLOCK_M, BLOCK_K] @ [BLOCK_K, BLOCK_N]
    out = rescaled(sums, scale_ptr, weight_scale_ptr, bias_ptr, offs_m, offs_n, mask_m, mask_n)
    out_ptrs = out_ptr + offs_m[:, None] * stride_out_m + offs_n[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


def launch(
    run: Run,
    out: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    (tokens, inputs), outputs = q.shape, weight.shape[0]
    run.launch(
        scaled_matmul_tiled,
        tile_grid(tokens, outputs, run.config["BLOCK_M"], run.config["BLOCK_N"]),
        **pointers("out[m] q[m] scale weight[n] weight_scale bias", out, q, scale, weight, weight_scale, bias),
        tokens=tokens,
        outputs=outputs,
        inputs=inputs,
        SHORT=sums_are_short(run.device),
        **run.config,
    )


VARIANT = Variant(
    wins="from a few dozen tokens on: 8-bit products at the matrix units' full rate",
    region={"M": (65, 2**31 - 1)},
    launch=launch,
    configs=CONFIGS,
    # By reasoning, not measured. 64 rows are the least that Hopper's asynchronous matrix units take, and 128 deep is a
    # line of 128 bytes for each row of codes. One default for every M, or a row's bits would depend on the batch.
    # gfx942 has 64 kB of shared memory: two stages. Interpreted, tiles are the smallest legal ones, so that shapes of
    # the tests cross them.
    default={
        "": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=3),
        "sm_90": Config(BLOCK_M=64, BLOCK_N=128, BLOCK_K=128, num_warps=4, num_stages=4),
        "gfx942": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=2),
        "interpreter": Config(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, num_warps=4, num_stages=2),
    },
    supports=unsupported_sums,
    key=("M", "N", "K"),
    sum_order=order_of_tile,
    deterministic=True,
    batch_invariant=True,
)
