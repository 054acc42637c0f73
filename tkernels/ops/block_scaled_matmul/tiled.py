"""Tiles of the output on the matrix units in e4m3 codes; the sums of each group of inputs leave them to be scaled.

Wins wherever there are many tokens: half the bytes of 16-bit floats at twice the rate, for one multiply-add in fp32 of
each output and group of 128 inputs.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.ops.code_sums import sums_are_short, unsupported_sums, with_products, zero_sums
from tkernels.ops.products import order_of_tile, tile_configs, tile_grid
from tkernels.quantized.row_codes import BLOCK

CONFIGS = tile_configs(
    (
        (16, 64, 128, 4, 4),
        (32, 64, 128, 4, 4),
        (64, 64, 128, 4, 3),
        (64, 64, 128, 4, 4),
        (64, 128, 128, 8, 3),
        (64, 128, 128, 8, 4),
        (128, 64, 128, 8, 3),
        (128, 128, 128, 8, 3),
    )
)


@triton.jit(do_not_specialize=["tokens"])
def block_scaled_matmul_tiled(
    out_ptr,
    q_ptr,
    scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    stride_out_m,
    stride_q_m,
    stride_scale_m,
    stride_weight_n,
    stride_weight_scale_b,
    tokens,
    outputs,
    inputs,
    SHORT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N and BLOCK_K divide GROUP, and GROUP inputs: what a tile reads of the weight is of one block."""
    # M * stride and N * stride can pass 2**31.
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_n = tl.program_id(1).to(tl.int64) * BLOCK_N
    offs_n = first_n + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < tokens, offs_n < outputs
    q_ptrs = q_ptr + offs_m[:, None] * stride_q_m
    weight_ptrs = weight_ptr + offs_n[:, None] * stride_weight_n
    scale_ptrs = scale_ptr + offs_m * stride_scale_m
    weight_scale_ptr += (first_n // GROUP) * stride_weight_scale_b
    out = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, inputs, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        # Rows and columns that are masked off are not stored, whatever is read of them.
        q = tl.load(q_ptrs + offs_k[None, :], mask=mask_m[:, None])  # [BLOCK_M, BLOCK_K]
        weight = tl.load(weight_ptrs + offs_k[None, :], mask=mask_n[:, None])  # [BLOCK_N, BLOCK_K]
        scale = tl.load(scale_ptrs + start // GROUP, mask=mask_m)
        weight_scale = tl.load(weight_scale_ptr + start // GROUP)
        sums = with_products(zero_sums(BLOCK_M, BLOCK_N, q_ptr.dtype.element_ty), q, tl.trans(weight), SHORT)
        # The token's scale first: two scales' product can be too small for fp32 where that of all three is not.
        out += sums * scale[:, None] * weight_scale
    if bias_ptr is not None:
        out += tl.load(bias_ptr + offs_n, mask=mask_n).to(tl.float32)[None, :]
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
    layout = "out[m] q[m] scale[m] weight[n] weight_scale[b] bias"
    run.launch(
        block_scaled_matmul_tiled,
        tile_grid(tokens, outputs, run.config["BLOCK_M"], run.config["BLOCK_N"]),
        **pointers(layout, out, q, scale, weight, weight_scale, bias),
        tokens=tokens,
        outputs=outputs,
        inputs=inputs,
        SHORT=sums_are_short(run.device),
        GROUP=BLOCK,
        **run.config,
    )


VARIANT = Variant(
    wins="from a few dozen tokens on: 8-bit products at the matrix units' full rate, one scaling for 128 of them",
    region={"M": (65, 2**31 - 1)},
    launch=launch,
    configs=CONFIGS,
    # By reasoning, not measured. 128 deep is a group and a line of 128 bytes for each row of codes. Two tiles of sums
    # are kept, the group's and the total, which 8 warps hold for 64 x 128. One default for every M, or a row's bits
    # would depend on the batch. gfx942 has 64 kB of shared memory: two stages.
    default={
        "": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=3),
        "sm_90": Config(BLOCK_M=64, BLOCK_N=128, BLOCK_K=128, num_warps=8, num_stages=4),
        "gfx942": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=2),
        "interpreter": Config(BLOCK_M=16, BLOCK_N=32, BLOCK_K=64, num_warps=4, num_stages=2),
    },
    limits={"BLOCK_N": (16, BLOCK), "BLOCK_K": (16, BLOCK)},
    supports=unsupported_sums,
    key=("M", "N", "K"),
    sum_order=order_of_tile,
    deterministic=True,
    batch_invariant=True,
)
