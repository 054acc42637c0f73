"""One program multiplies a pair's row with a tile of its expert's outputs, in fp32, from registers.

Wins at a few tokens, which meet different experts: the weights stream through once, every lane reads 16 bytes of a row
at once, and nothing waits for a sorted order. Where a token's choices become one, a program takes them one after the
other, and no product goes to memory.
"""

import torch
import triton
import triton.language as tl

from tkernels import Axes, Config, DeviceFacts, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.ops.grouped_matmul._argument import needs_dense
from tkernels.ops.grouped_matmul._tiles import pairs_of_row

CONFIGS = tuple(
    Config(BLOCK_N=rows, BLOCK_K=256 * warps, num_warps=warps, num_stages=stages)
    for rows in (4, 8, 16)
    for warps in (1, 2, 4)
    for stages in (2, 3)
)


@triton.jit
def row_times_expert(
    x_ptr,
    weight_ptr,
    bias_ptr,
    stride_weight_e,
    stride_weight_n,
    stride_bias_e,
    expert,
    offs_n,
    mask_n,
    inputs,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A row of x times an expert's outputs offs_n, and their bias: [BLOCK_N] in fp32."""
    # Experts and their rows times their strides can pass 2**31.
    weight_ptrs = weight_ptr + expert.to(tl.int64) * stride_weight_e + offs_n.to(tl.int64)[:, None] * stride_weight_n
    sums = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = offs_k < inputs
        weight = tl.load(weight_ptrs + offs_k[None, :], mask=mask_n[:, None] & mask_k[None, :], other=0.0)
        x = tl.load(x_ptr + offs_k, mask=mask_k, other=0.0)
        sums += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    total = tl.sum(sums, axis=1)
    if bias_ptr is not None:
        bias_ptr += expert.to(tl.int64) * stride_bias_e
        total += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["pairs_of_row"])
def grouped_matmul_gemv_per_pair(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    experts_ptr,
    combine_ptr,
    stride_out_m,
    stride_x_m,
    stride_weight_e,
    stride_weight_n,
    stride_experts_t,
    stride_bias_e,
    stride_combine_t,
    outputs,
    inputs,
    top_k,
    pairs_of_row,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program for each pair and tile of outputs; with `combine` for each token and tile."""
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < outputs
    row = tl.program_id(0).to(tl.int64)  # of the result: T K * stride can pass 2**31
    if combine_ptr is None:
        expert = tl.load(experts_ptr + row // top_k * stride_experts_t + row % top_k)
        if expert >= 0:
            total = row_times_expert(
                x_ptr + row // pairs_of_row * stride_x_m, weight_ptr, bias_ptr, stride_weight_e, stride_weight_n,
                stride_bias_e, expert, offs_n, mask_n, inputs, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
            tl.store(out_ptr + row * stride_out_m + offs_n, total.to(out_ptr.dtype.element_ty), mask=mask_n)
    else:
        sums = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for choice in range(top_k):
            expert = tl.load(experts_ptr + row * stride_experts_t + choice)
            if expert >= 0:
                total = row_times_expert(
                    x_ptr + (row * top_k + choice) // pairs_of_row * stride_x_m, weight_ptr, bias_ptr, stride_weight_e,
                    stride_weight_n, stride_bias_e, expert, offs_n, mask_n, inputs, BLOCK_N, BLOCK_K, STAGES,
                )  # fmt: skip
                sums += total * tl.load(combine_ptr + row * stride_combine_t + choice)
        tl.store(out_ptr + row * stride_out_m + offs_n, sums.to(out_ptr.dtype.element_ty), mask=mask_n)


def launch_pairs(
    run: Run,
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    experts: torch.Tensor,
    bias: torch.Tensor | None,
    combine: torch.Tensor | None,
) -> None:
    """Launches the products of all pairs, or the sums of each token's."""
    run.launch(
        grouped_matmul_gemv_per_pair,
        (out.shape[0], triton.cdiv(weight.shape[1], run.config["BLOCK_N"])),
        **pointers("out[m] x[m] weight[en] experts[t]", out, x, weight, experts),
        **pointers("bias combine", bias, combine),
        stride_bias_e=0 if bias is None else bias.stride(0),
        stride_combine_t=0 if combine is None else combine.stride(0),
        outputs=weight.shape[1],
        inputs=weight.shape[2],
        top_k=experts.shape[1],
        pairs_of_row=pairs_of_row(x, experts),
        **run.config,
        STAGES=run.config.num_stages,
    )


def launch(
    run: Run,
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    experts: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    tile: int,
    tile_expert: torch.Tensor,
    tile_start: torch.Tensor,
    bias: torch.Tensor | None,
    combine: torch.Tensor | None,
) -> None:
    launch_pairs(run, out, x, weight, experts, bias, combine)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return needs_dense(axes)


VARIANT = Variant(
    wins="a few tokens: experts' weights are read once and nothing else costs",
    region={"T": (0, 8)},
    launch=launch,
    configs=CONFIGS,
    supports=supports,
    # By reasoning, not measured, as matmul's gemv: one warp over 256 inputs, each lane 16 bytes of every row. Eight
    # pairs of Qwen3-30B-A3B are 1536 programs of its first product and 256 of its second. gfx942's warps have 64 lanes.
    default={
        "": Config(BLOCK_N=8, BLOCK_K=256, num_warps=1, num_stages=3),
        "gfx942": Config(BLOCK_N=4, BLOCK_K=512, num_warps=1, num_stages=2),
        "interpreter": Config(BLOCK_N=16, BLOCK_K=32),
    },
    key=("N", "C"),
    deterministic=True,
    batch_invariant=True,
)
