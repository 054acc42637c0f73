"""gemv_per_pair with the weights as codes: the codes of a pair's expert stream through registers once.

Wins at a few tokens, which meet different experts.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.ops.activations import limit_arguments
from tkernels.ops.arguments import pointers
from tkernels.ops.dequant_gemm._pairs import takes_pairs
from tkernels.ops.grouped_matmul._codes import row_arguments, row_times_codes
from tkernels.ops.grouped_matmul._tiles import combine_products
from tkernels.ops.grouped_matmul.dequant_gemv import launch_pairs
from tkernels.ops.grouped_matmul.padded_tiles import grouped_matmul_combine
from tkernels.ops.moe_mlp._shared import activated, fused_buffers, supports_codes
from tkernels.quantized.stacked import StackedWeight, interleaved_experts

CONFIGS = tuple(
    Config(BLOCK_N=columns, BLOCK_W=words, num_warps=warps, num_stages=stages)
    for columns, words, warps in ((32, 8, 1), (32, 16, 1), (64, 8, 1), (64, 16, 1), (128, 16, 2))
    for stages in (2, 3)
)


@triton.jit
def moe_mlp_dequant_gemv(
    activated_ptr, x_ptr, packed_ptr, high_ptr, scales_ptr, zeros_ptr, permutation_ptr, bias_ptr, experts_ptr,
    stride_activated_p, stride_x_t, stride_packed_e, stride_packed_w, stride_high_e, stride_high_w, stride_scales_e,
    stride_scales_w, stride_zeros_e, stride_zeros_w, stride_permutation_e, stride_bias_e, stride_experts_t, width,
    words, top_k, exponent, limit, CLAMPED: tl.constexpr, BITS: tl.constexpr, E2M1: tl.constexpr,
    GROUP_WORDS: tl.constexpr, ONE_GROUP: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr, NEXT: tl.constexpr,
    WARPS: tl.constexpr, BY_GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)  # T K * stride can pass 2**31
    token = pair // top_k
    expert = tl.load(experts_ptr + token * stride_experts_t + pair % top_k)
    if expert >= 0:
        x_ptr += token * stride_x_t
        first_n = tl.program_id(1) * BLOCK_N
        gate = row_times_codes(
            x_ptr, packed_ptr, high_ptr, scales_ptr, zeros_ptr, permutation_ptr, stride_packed_e, stride_packed_w,
            stride_high_e, stride_high_w, stride_scales_e, stride_scales_w, stride_zeros_e, stride_zeros_w,
            stride_permutation_e, expert, first_n, width, words, exponent, BITS, E2M1, GROUP_WORDS, ONE_GROUP, PAIRS,
            WHOLE, NEXT, WARPS, BY_GROUP, BLOCK_N, BLOCK_W, STAGES,
        )  # fmt: skip
        up = row_times_codes(
            x_ptr, packed_ptr, high_ptr, scales_ptr, zeros_ptr, permutation_ptr, stride_packed_e, stride_packed_w,
            stride_high_e, stride_high_w, stride_scales_e, stride_scales_w, stride_zeros_e, stride_zeros_w,
            stride_permutation_e, expert, width + first_n, 2 * width, words, exponent, BITS, E2M1, GROUP_WORDS,
            ONE_GROUP, PAIRS, WHOLE, NEXT, WARPS, BY_GROUP, BLOCK_N, BLOCK_W, STAGES,
        )  # fmt: skip
        offs_n = first_n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < width
        out = activated(gate, up, bias_ptr, stride_bias_e, expert, offs_n, mask_n, width, limit, CLAMPED)
        out_ptrs = activated_ptr + pair * stride_activated_p + offs_n
        tl.store(out_ptrs, out.to(activated_ptr.dtype.element_ty), mask=mask_n)


def launch(
    run: Run,
    out: torch.Tensor,
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: StackedWeight,
    down: StackedWeight,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    limit: float | None,
) -> None:
    activations, width = run.workspace["activated"], down.shape[2]
    with run.section("up"):
        run.launch(
            moe_mlp_dequant_gemv,
            (experts.numel(), triton.cdiv(width, run.config["BLOCK_N"])),
            **pointers("activated[p] x[t] bias experts[t]", activations, x, gate_up_bias, experts),
            **row_arguments(gate_up, _takes_pairs(run, "gate_up_"), run.config, run.device),
            stride_bias_e=0 if gate_up_bias is None else gate_up_bias.stride(0),
            width=width,
            top_k=experts.shape[1],
            **limit_arguments(limit),
        )
    with run.section("down"):
        products = run.workspace["products"]
        launch_pairs(run, products, activations, down, experts, down_bias, _takes_pairs(run, "down_"))
        combine_products(run, grouped_matmul_combine, out, experts, weights)


def _takes_pairs(run: Run, prefix: str) -> bool:
    """Whether one of the weights goes through the matrix units: see there."""
    own = {"group_size": run.axes[f"{prefix}group_size"], "weight_aligned": run.axes[f"{prefix}aligned"]}
    return takes_pairs({**run.axes, **own}, run.device)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    return fused_buffers(axes, None, device)


VARIANT = Variant(
    wins="codes at a few tokens: they are read once and nothing else costs",
    region={"T": (0, 8)},
    launch=launch,
    configs=CONFIGS,
    workspace=workspace,
    supports=supports_codes,
    prepare=interleaved_experts,
    # By reasoning, not measured, as grouped_matmul's dequant_gemv.
    default={
        "": Config(BLOCK_N=32, BLOCK_W=8, num_warps=1, num_stages=3),
        "interpreter": Config(BLOCK_N=64, BLOCK_W=4, num_warps=1),
    },
    key=("H", "I", "bits", "gate_up_group_size", "down_group_size"),
    deterministic=True,
    batch_invariant=True,
)
