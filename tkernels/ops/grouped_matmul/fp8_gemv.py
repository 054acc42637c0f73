"""gemv_per_pair with the weights as e4m3 codes: the codes of a pair's expert stream through registers once.

Wins at a few tokens, which meet different experts. A step is a line of 128 bytes of each row, which is a block's, so a
row of x is scaled before it meets them. Where a token's choices become one, a program takes them one after the other.
"""

import torch
import triton
import triton.language as tl

from tkernels import Axes, Config, DeviceFacts, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.ops.grouped_matmul._argument import needs_e4m3
from tkernels.ops.grouped_matmul._e4m3 import blocks_arguments, row_times_blocks
from tkernels.ops.grouped_matmul._tiles import pairs_of_row
from tkernels.quantized.row_codes import BLOCK
from tkernels.quantized.stacked_scaled import StackedScaledWeight

CONFIGS = tuple(
    Config(BLOCK_N=rows, BLOCK_K=BLOCK, num_warps=warps, num_stages=stages)
    for rows, warps in ((4, 1), (8, 1), (16, 1), (16, 2), (32, 2), (32, 4))
    for stages in (2, 4)
)


@triton.jit
def row_and_bias(
    x_ptr, codes_ptr, scales_ptr, bias_ptr, stride_codes_e, stride_codes_n, stride_scales_e, stride_scales_n,
    stride_bias_e, expert, first_n, outputs, inputs, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A row of x times an expert's outputs first_n .. first_n + BLOCK_N, and their bias: [BLOCK_N] in fp32."""
    offs_n = first_n + tl.arange(0, BLOCK_N)
    mask_n = offs_n < outputs
    total = row_times_blocks(
        x_ptr, codes_ptr, scales_ptr, stride_codes_e, stride_codes_n, stride_scales_e, stride_scales_n, expert, first_n,
        mask_n, inputs, GROUP, BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
    if bias_ptr is not None:
        bias_ptr += expert.to(tl.int64) * stride_bias_e
        total += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["pairs_of_row"])
def grouped_matmul_fp8_gemv(
    out_ptr, x_ptr, codes_ptr, scales_ptr, bias_ptr, experts_ptr, combine_ptr, stride_out_m, stride_x_m, stride_codes_e,
    stride_codes_n, stride_scales_e, stride_scales_n, stride_bias_e, stride_experts_t, stride_combine_t, outputs,
    inputs, top_k, pairs_of_row, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program for each pair and tile of outputs; with `combine` for each token and tile."""
    first_n = tl.program_id(1) * BLOCK_N
    offs_n = first_n + tl.arange(0, BLOCK_N)
    row = tl.program_id(0).to(tl.int64)  # of the result: T K * stride can pass 2**31
    if combine_ptr is None:
        expert = tl.load(experts_ptr + row // top_k * stride_experts_t + row % top_k)
        if expert >= 0:
            total = row_and_bias(
                x_ptr + row // pairs_of_row * stride_x_m, codes_ptr, scales_ptr, bias_ptr, stride_codes_e,
                stride_codes_n, stride_scales_e, stride_scales_n, stride_bias_e, expert, first_n, outputs, inputs,
                GROUP, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
            tl.store(out_ptr + row * stride_out_m + offs_n, total.to(out_ptr.dtype.element_ty), mask=offs_n < outputs)
    else:
        sums = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for choice in range(top_k):
            expert = tl.load(experts_ptr + row * stride_experts_t + choice)
            if expert >= 0:
                total = row_and_bias(
                    x_ptr + (row * top_k + choice) // pairs_of_row * stride_x_m, codes_ptr, scales_ptr, bias_ptr,
                    stride_codes_e, stride_codes_n, stride_scales_e, stride_scales_n, stride_bias_e, expert, first_n,
                    outputs, inputs, GROUP, BLOCK_N, BLOCK_K, STAGES,
                )  # fmt: skip
                sums += total * tl.load(combine_ptr + row * stride_combine_t + choice)
        tl.store(out_ptr + row * stride_out_m + offs_n, sums.to(out_ptr.dtype.element_ty), mask=offs_n < outputs)


def launch_fp8_pairs(
    run: Run,
    out: torch.Tensor,
    x: torch.Tensor,
    weight: StackedScaledWeight,
    experts: torch.Tensor,
    bias: torch.Tensor | None,
    combine: torch.Tensor | None,
) -> None:
    """Launches the products of all pairs, or the sums of each token's."""
    run.launch(
        grouped_matmul_fp8_gemv,
        (out.shape[0], triton.cdiv(weight.shape[1], run.config["BLOCK_N"])),
        **pointers("out[m] x[m] bias experts[t] combine", out, x, bias, experts, combine),
        **blocks_arguments(weight),
        stride_bias_e=0 if bias is None else bias.stride(0),
        stride_combine_t=0 if combine is None else combine.stride(0),
        outputs=weight.shape[1],
        top_k=experts.shape[1],
        pairs_of_row=pairs_of_row(x, experts),
        **run.config,
        STAGES=run.config.num_stages,
    )


def launch(
    run: Run,
    out: torch.Tensor,
    x: torch.Tensor,
    weight: StackedScaledWeight,
    experts: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    tile: int,
    tile_expert: torch.Tensor,
    tile_start: torch.Tensor,
    bias: torch.Tensor | None,
    combine: torch.Tensor | None,
) -> None:
    launch_fp8_pairs(run, out, x, weight, experts, bias, combine)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return needs_e4m3(axes)


VARIANT = Variant(
    wins="e4m3 codes at a few tokens: they are read once and nothing else costs",
    region={"T": (0, 8)},
    launch=launch,
    configs=CONFIGS,
    supports=supports,
    # By reasoning, not measured: one warp over 8 rows, of which every lane has 16 bytes of two. Eight pairs of
    # Qwen3-30B-A3B are 1536 programs of its first product and 256 of its second.
    default={
        "": Config(BLOCK_N=8, BLOCK_K=BLOCK, num_warps=1, num_stages=4),
        "gfx942": Config(BLOCK_N=8, BLOCK_K=BLOCK, num_warps=1, num_stages=2),
        "interpreter": Config(BLOCK_N=16, BLOCK_K=BLOCK),
    },
    limits={"BLOCK_N": (1, BLOCK), "BLOCK_K": (1, BLOCK)},
    key=("N", "C"),
    deterministic=True,
    batch_invariant=True,
)
