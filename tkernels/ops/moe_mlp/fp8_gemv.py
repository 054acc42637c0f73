"""gemv_per_pair with the weights as e4m3 codes: the codes of a pair's expert stream through registers once.

Wins at a few tokens, which meet different experts: two launches, and no sort.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.ops.activations import limit_arguments
from tkernels.ops.arguments import pointers
from tkernels.ops.grouped_matmul._e4m3 import blocks_arguments, row_times_blocks
from tkernels.ops.grouped_matmul.fp8_gemv import launch_fp8_pairs
from tkernels.ops.moe_mlp._shared import activated, fused_buffers, supports_e4m3
from tkernels.quantized.row_codes import BLOCK
from tkernels.quantized.stacked_scaled import StackedScaledWeight

CONFIGS = tuple(
    Config(BLOCK_N=rows, BLOCK_K=BLOCK, num_warps=warps, num_stages=stages)
    for rows, warps in ((4, 1), (8, 1), (16, 1), (16, 2), (32, 2))
    for stages in (2, 4)
)


@triton.jit
def moe_mlp_fp8_gemv(
    activated_ptr, x_ptr, codes_ptr, scales_ptr, bias_ptr, experts_ptr, stride_activated_p, stride_x_t, stride_codes_e,
    stride_codes_n, stride_scales_e, stride_scales_n, stride_bias_e, stride_experts_t, width, inputs, top_k, limit,
    CLAMPED: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """GROUP divides width, as it has to where the second product's inputs are these: gate and up share no block."""
    pair = tl.program_id(0).to(tl.int64)  # T K * stride can pass 2**31
    token = pair // top_k
    expert = tl.load(experts_ptr + token * stride_experts_t + pair % top_k)
    if expert >= 0:
        x_ptr += token * stride_x_t
        first_n = tl.program_id(1) * BLOCK_N
        offs_n = first_n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < width
        gate = row_times_blocks(
            x_ptr, codes_ptr, scales_ptr, stride_codes_e, stride_codes_n, stride_scales_e, stride_scales_n, expert,
            first_n, mask_n, inputs, GROUP, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
        up = row_times_blocks(
            x_ptr, codes_ptr, scales_ptr, stride_codes_e, stride_codes_n, stride_scales_e, stride_scales_n, expert,
            width + first_n, mask_n, inputs, GROUP, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
        out = activated(gate, up, bias_ptr, stride_bias_e, expert, offs_n, mask_n, width, limit, CLAMPED)
        out_ptrs = activated_ptr + pair * stride_activated_p + offs_n
        tl.store(out_ptrs, out.to(activated_ptr.dtype.element_ty), mask=mask_n)


def launch(
    run: Run,
    out: torch.Tensor,
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: StackedScaledWeight,
    down: StackedScaledWeight,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    limit: float | None,
) -> None:
    pairs, width = run.workspace["activated"], down.shape[2]
    with run.section("up"):
        run.launch(
            moe_mlp_fp8_gemv,
            (experts.numel(), triton.cdiv(width, run.config["BLOCK_N"])),
            **pointers("activated[p] x[t] bias experts[t]", pairs, x, gate_up_bias, experts),
            **blocks_arguments(gate_up),
            stride_bias_e=0 if gate_up_bias is None else gate_up_bias.stride(0),
            width=width,
            top_k=experts.shape[1],
            **limit_arguments(limit),
            **run.config,
            STAGES=run.config.num_stages,
        )
    with run.section("down"):
        launch_fp8_pairs(run, out, pairs, down, experts, down_bias, weights)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    return fused_buffers(axes, None, device, combine=False)


VARIANT = Variant(
    wins="e4m3 codes at a few tokens: they are read once and nothing else costs",
    region={"T": (0, 8)},
    launch=launch,
    configs=CONFIGS,
    workspace=workspace,
    supports=supports_e4m3,
    # By reasoning, not measured, as grouped_matmul's fp8_gemv.
    default={
        "": Config(BLOCK_N=8, BLOCK_K=BLOCK, num_warps=1, num_stages=4),
        "gfx942": Config(BLOCK_N=8, BLOCK_K=BLOCK, num_warps=1, num_stages=2),
        # Few programs: its sizes are multiples of 128.
        "interpreter": Config(BLOCK_N=128, BLOCK_K=BLOCK),
    },
    limits={"BLOCK_N": (1, BLOCK), "BLOCK_K": (1, BLOCK)},
    key=("H", "I"),
    deterministic=True,
    batch_invariant=True,
)
