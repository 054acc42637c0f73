"""grouped_matmul's gemv_per_pair with swiglu at the end of the first product: two launches, and no sort.

Wins at a few tokens, which meet different experts: the weights stream through once, and nothing else costs.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.ops.activations import limit_arguments
from tkernels.ops.arguments import pointers
from tkernels.ops.grouped_matmul.gemv_per_pair import launch_pairs
from tkernels.ops.moe_mlp._shared import activated, fused_buffers, supports_dense

CONFIGS = tuple(
    Config(BLOCK_N=rows, BLOCK_K=256 * warps, num_warps=warps, num_stages=stages)
    for rows in (2, 4, 8)
    for warps in (1, 2, 4)
    for stages in (2, 3)
)


@triton.jit
def moe_mlp_gemv_per_pair(
    activated_ptr,
    x_ptr,
    gate_up_ptr,
    bias_ptr,
    experts_ptr,
    stride_activated_p,
    stride_x_t,
    stride_gate_up_e,
    stride_gate_up_n,
    stride_experts_t,
    stride_bias_e,
    width,
    inputs,
    top_k,
    limit,
    CLAMPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)  # T K * stride can pass 2**31
    token = pair // top_k
    expert = tl.load(experts_ptr + token * stride_experts_t + pair % top_k)
    if expert >= 0:
        offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < width
        # Tokens, experts and their rows times their strides can pass 2**31.
        x_ptr += token * stride_x_t
        gate_ptrs = (
            gate_up_ptr + expert.to(tl.int64) * stride_gate_up_e + offs_n.to(tl.int64)[:, None] * stride_gate_up_n
        )
        up_rows = width.to(tl.int64) * stride_gate_up_n
        gates = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        ups = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        for start in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
            offs_k = start + tl.arange(0, BLOCK_K)
            mask_k = offs_k < inputs
            mask = mask_n[:, None] & mask_k[None, :]
            gate = tl.load(gate_ptrs + offs_k[None, :], mask=mask, other=0.0)
            up = tl.load(gate_ptrs + up_rows + offs_k[None, :], mask=mask, other=0.0)
            x = tl.load(x_ptr + offs_k, mask=mask_k, other=0.0).to(tl.float32)[None, :]
            gates += gate.to(tl.float32) * x
            ups += up.to(tl.float32) * x
        out = activated(
            tl.sum(gates, axis=1), tl.sum(ups, axis=1), bias_ptr, stride_bias_e, expert, offs_n, mask_n, width, limit,
            CLAMPED,
        )  # fmt: skip
        out_ptrs = activated_ptr + pair * stride_activated_p + offs_n
        tl.store(out_ptrs, out.to(activated_ptr.dtype.element_ty), mask=mask_n)


def launch(
    run: Run,
    out: torch.Tensor,
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    limit: float | None,
) -> None:
    pairs, width = run.workspace["activated"], down.shape[2]
    with run.section("up"):
        run.launch(
            moe_mlp_gemv_per_pair,
            (experts.numel(), triton.cdiv(width, run.config["BLOCK_N"])),
            **pointers("activated[p] x[t] gate_up[en] bias experts[t]", pairs, x, gate_up, gate_up_bias, experts),
            stride_bias_e=0 if gate_up_bias is None else gate_up_bias.stride(0),
            width=width,
            inputs=x.shape[1],
            top_k=experts.shape[1],
            **limit_arguments(limit),
            **run.config,
            STAGES=run.config.num_stages,
        )
    with run.section("down"):
        launch_pairs(run, out, pairs, down, experts, down_bias, weights)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    return fused_buffers(axes, None, device, combine=False)


VARIANT = Variant(
    wins="a few tokens: experts' weights are read once and nothing else costs",
    region={"T": (0, 8)},
    launch=launch,
    configs=CONFIGS,
    workspace=workspace,
    supports=supports_dense,
    # By reasoning, not measured, as matmul's gemv: one warp over 256 inputs, each lane 16 bytes of every row, of four
    # rows of the gate and four of the up projection. gfx942's warps have 64 lanes.
    default={
        "": Config(BLOCK_N=4, BLOCK_K=256, num_warps=1, num_stages=3),
        "gfx942": Config(BLOCK_N=4, BLOCK_K=512, num_warps=1, num_stages=2),
        "interpreter": Config(BLOCK_N=64, BLOCK_K=32),
    },
    key=("H", "I"),
    deterministic=True,
    batch_invariant=True,
)
