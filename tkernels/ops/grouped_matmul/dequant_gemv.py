"""gemv_per_pair with the weights as codes: the codes of a pair's expert stream through registers once.

Wins at a few tokens, which meet different experts. Codes of 4 bits in 16-bit floats go through the matrix units, as in
dequant_gemm's gemv; all others are multiplied one by one in fp32.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.ops.dequant_gemm._pairs import takes_pairs
from tkernels.ops.grouped_matmul._argument import needs_codes
from tkernels.ops.grouped_matmul._codes import row_arguments, row_times_codes
from tkernels.ops.grouped_matmul._tiles import (
    combine_products,
    pairs_of_row,
    products_of,
    products_workspace,
)
from tkernels.ops.grouped_matmul.padded_tiles import grouped_matmul_combine
from tkernels.quantized.stacked import StackedWeight, interleaved_experts

CONFIGS = tuple(
    Config(BLOCK_N=columns, BLOCK_W=words, num_warps=warps, num_stages=stages)
    for columns, words, warps in ((32, 8, 1), (32, 16, 1), (64, 8, 1), (64, 16, 1), (128, 8, 1), (128, 16, 2))
    for stages in (2, 3)
)


@triton.jit(do_not_specialize=["pairs_of_row"])
def grouped_matmul_dequant_gemv(
    out_ptr, x_ptr, packed_ptr, high_ptr, scales_ptr, zeros_ptr, permutation_ptr, bias_ptr, experts_ptr, stride_out_m,
    stride_x_m, stride_packed_e, stride_packed_w, stride_high_e, stride_high_w, stride_scales_e, stride_scales_w,
    stride_zeros_e, stride_zeros_w, stride_permutation_e, stride_bias_e, stride_experts_t, outputs, words, top_k,
    pairs_of_row, exponent, BITS: tl.constexpr, E2M1: tl.constexpr, GROUP_WORDS: tl.constexpr, ONE_GROUP: tl.constexpr,
    PAIRS: tl.constexpr, WHOLE: tl.constexpr, NEXT: tl.constexpr, WARPS: tl.constexpr, BY_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)  # T K * stride can pass 2**31
    expert = tl.load(experts_ptr + pair // top_k * stride_experts_t + pair % top_k)
    if expert >= 0:
        first_n = tl.program_id(1) * BLOCK_N
        total = row_times_codes(
            x_ptr + pair // pairs_of_row * stride_x_m, packed_ptr, high_ptr, scales_ptr, zeros_ptr, permutation_ptr,
            stride_packed_e, stride_packed_w, stride_high_e, stride_high_w, stride_scales_e, stride_scales_w,
            stride_zeros_e, stride_zeros_w, stride_permutation_e, expert, first_n, outputs, words, exponent, BITS, E2M1,
            GROUP_WORDS, ONE_GROUP, PAIRS, WHOLE, NEXT, WARPS, BY_GROUP, BLOCK_N, BLOCK_W, STAGES,
        )  # fmt: skip
        offs_n = first_n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < outputs
        if bias_ptr is not None:
            bias_ptr += expert.to(tl.int64) * stride_bias_e
            total += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        tl.store(out_ptr + pair * stride_out_m + offs_n, total.to(out_ptr.dtype.element_ty), mask=mask_n)


def launch_pairs(
    run: Run,
    out: torch.Tensor,
    x: torch.Tensor,
    weight: StackedWeight,
    experts: torch.Tensor,
    bias: torch.Tensor | None,
    through_units: bool,
) -> None:
    """Launches the products of all pairs, [T K, N]. through_units: see `takes_pairs`."""
    run.launch(
        grouped_matmul_dequant_gemv,
        (experts.numel(), triton.cdiv(weight.shape[1], run.config["BLOCK_N"])),
        **pointers("out[m] x[m] bias experts[t]", out, x, bias, experts),
        **row_arguments(weight, through_units, run.config, run.device),
        stride_bias_e=0 if bias is None else bias.stride(0),
        outputs=weight.shape[1],
        top_k=experts.shape[1],
        pairs_of_row=pairs_of_row(x, experts),
    )


def launch(
    run: Run,
    out: torch.Tensor,
    x: torch.Tensor,
    weight: StackedWeight,
    experts: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    tile: int,
    tile_expert: torch.Tensor,
    tile_start: torch.Tensor,
    bias: torch.Tensor | None,
    combine: torch.Tensor | None,
) -> None:
    products, through_units = products_of(run, out, combine), takes_pairs(run.axes, run.device)
    launch_pairs(run, products, x, weight, experts, bias, through_units)
    combine_products(run, grouped_matmul_combine, out, experts, combine)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    return products_workspace(axes)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return needs_codes(axes)


VARIANT = Variant(
    wins="codes at a few tokens: they are read once and nothing else costs",
    region={"T": (0, 8)},
    launch=launch,
    configs=CONFIGS,
    workspace=workspace,
    supports=supports,
    prepare=interleaved_experts,
    # By reasoning, not measured: one warp over 32 outputs, a line of 128 bytes of each word row, so that 8 pairs of
    # Qwen3-30B-A3B are 384 programs of its first product and 512 of its second.
    default={
        "": Config(BLOCK_N=32, BLOCK_W=8, num_warps=1, num_stages=3),
        "interpreter": Config(BLOCK_N=16, BLOCK_W=4, num_warps=1),
    },
    key=("N", "C", "bits", "permuted", "group_size"),
    deterministic=True,
    batch_invariant=True,
)
