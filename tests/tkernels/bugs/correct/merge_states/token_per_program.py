"""One program merges all heads of one token."""

import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.ops.arguments import pointers


@triton.jit
def merge_states_token_per_program(
    out_ptr, lse_ptr, a_ptr, lse_a_ptr, b_ptr, lse_b_ptr, heads,
    stride_out_t, stride_out_h, stride_lse_t, stride_a_t, stride_a_h, stride_lse_a_t,
    stride_b_t, stride_b_h, stride_lse_b_t, HEAD_DIM_V: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    offs_h, offs_dv = tl.arange(0, BLOCK_H).to(tl.int64), tl.arange(0, BLOCK_DV)
    mask_h = offs_h < heads
    lse_a = tl.load(lse_a_ptr + token * stride_lse_a_t + offs_h, mask=mask_h, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + token * stride_lse_b_t + offs_h, mask=mask_h, other=float("-inf"))
    largest = tl.maximum(lse_a, lse_b)
    empty = largest == float("-inf")
    shift = tl.where(empty, 0.0, largest)
    weight_a = tl.exp(lse_a - shift)
    weight_b = tl.exp(lse_b - shift)
    total = weight_a + weight_b
    mask_a = (mask_h & (weight_a > 0))[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
    mask_b = (mask_h & (weight_b > 0))[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
    a_rows = a_ptr + token * stride_a_t + offs_h * stride_a_h
    b_rows = b_ptr + token * stride_b_t + offs_h * stride_b_h
    a = tl.load(a_rows[:, None] + offs_dv[None, :], mask=mask_a, other=0.0).to(tl.float32)
    b = tl.load(b_rows[:, None] + offs_dv[None, :], mask=mask_b, other=0.0).to(tl.float32)
    out = (a * weight_a[:, None] + b * weight_b[:, None]) / tl.where(empty, 1.0, total)[:, None]
    out_rows = out_ptr + token * stride_out_t + offs_h * stride_out_h
    mask = mask_h[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
    tl.store(out_rows[:, None] + offs_dv[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + token * stride_lse_t + offs_h, largest + tl.log(tl.where(empty, 1.0, total)), mask=mask_h)


def launch(run: Run, out, lse, out_a, lse_a, out_b, lse_b) -> None:
    tokens, heads, dim_v = out.shape
    run.launch(
        merge_states_token_per_program,
        (tokens,),
        **pointers("out[th] lse[t] a[th] lse_a[t] b[th] lse_b[t]", out, lse, out_a, lse_a, out_b, lse_b),
        heads=heads,
        HEAD_DIM_V=dim_v,
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_DV=triton.next_power_of_2(dim_v),
    )


VARIANT = Variant(
    wins="never: it is as short as can be",
    launch=launch,
    default={"": Config()},
    deterministic=True,
    batch_invariant=True,
)
