"""One program merges a tile of one token's heads: both parts are read once, and a part without keys not at all.

Wins everywhere so far: it is a copy with three operations an element, in 16-byte accesses.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.ops.arguments import pointers

CONFIGS = tuple(
    Config(BLOCK_HEADS=heads, num_warps=warps)
    for heads, warps in ((1, 1), (2, 1), (4, 1), (4, 2), (8, 2), (8, 4), (16, 4), (16, 8), (32, 8))
)


@triton.jit
def merge_states_head_tile(
    out_ptr, lse_ptr, out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, sinks_ptr, heads,
    stride_out_t, stride_out_h, stride_lse_t, stride_out_a_t, stride_out_a_h, stride_lse_a_t,
    stride_out_b_t, stride_out_b_h, stride_lse_b_t,
    HEAD_DIM_V: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)  # T * stride can pass 2**31, and so can a head-major stride times a head
    offs_h = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
    mask_h = offs_h < heads
    lse_a = tl.load(lse_a_ptr + token * stride_lse_a_t + offs_h, mask=mask_h, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + token * stride_lse_b_t + offs_h, mask=mask_h, other=float("-inf"))
    top = tl.maximum(lse_a, lse_b)
    sinks = None
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + offs_h, mask=mask_h)
        top = tl.maximum(top, sinks)
    origin = tl.where(top == float("-inf"), 0.0, top)  # of two empty parts: weights of 0, and not -inf - -inf
    weight_a = tl.exp2((lse_a - origin) * 1.4426950408889634)
    weight_b = tl.exp2((lse_b - origin) * 1.4426950408889634)
    total = weight_a + weight_b
    if sinks_ptr is not None:
        total += tl.exp2((sinks - origin) * 1.4426950408889634)
    offs_dv = tl.arange(0, BLOCK_DV)[None, :]
    mask_dv = offs_dv < HEAD_DIM_V
    a_rows = (out_a_ptr + token * stride_out_a_t + offs_h * stride_out_a_h)[:, None]
    b_rows = (out_b_ptr + token * stride_out_b_t + offs_h * stride_out_b_h)[:, None]
    # What has no weight is not read: it may be anything, NaN too.
    a = tl.load(a_rows + offs_dv, mask=(weight_a > 0)[:, None] & mask_dv, other=0.0).to(tl.float32)
    b = tl.load(b_rows + offs_dv, mask=(weight_b > 0)[:, None] & mask_dv, other=0.0).to(tl.float32)
    merged = (a * weight_a[:, None] + b * weight_b[:, None]) / tl.maximum(total, 1.0)[:, None]
    out_rows = (out_ptr + token * stride_out_t + offs_h * stride_out_h)[:, None]
    tl.store(out_rows + offs_dv, merged.to(out_ptr.dtype.element_ty), mask=mask_h[:, None] & mask_dv)
    tl.store(lse_ptr + token * stride_lse_t + offs_h, top + tl.log2(total) * 0.6931471805599453, mask=mask_h)


def launch(
    run: Run,
    out: torch.Tensor,
    lse: torch.Tensor,
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    sinks: torch.Tensor | None,
) -> None:
    tokens, heads, dim_v = out.shape
    run.launch(
        merge_states_head_tile,
        (tokens, triton.cdiv(heads, run.config["BLOCK_HEADS"])),
        **pointers("out[th] lse[t] out_a[th] lse_a[t] out_b[th] lse_b[t]", out, lse, out_a, lse_a, out_b, lse_b),
        sinks_ptr=sinks,
        heads=heads,
        HEAD_DIM_V=dim_v,
        BLOCK_HEADS=run.config["BLOCK_HEADS"],
        BLOCK_DV=triton.next_power_of_2(dim_v),
    )


VARIANT = Variant(
    wins="everywhere: a copy that moves each byte once",
    launch=launch,
    configs=CONFIGS,
    # 8 heads of 128 are 8 elements a thread: one 16-byte access for each part. Interpreted, 5 heads are two tiles.
    default={
        "": Config(BLOCK_HEADS=8),
        "gfx942": Config(BLOCK_HEADS=8, num_warps=2),  # of 64 lanes each
        "interpreter": Config(BLOCK_HEADS=4),
    },
    key=("Hq", "Dv"),
    deterministic=True,
    batch_invariant=True,
)
