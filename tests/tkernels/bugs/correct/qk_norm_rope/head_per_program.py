"""One program normalizes and rotates one head of one token, in place."""

import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.ops.arguments import pointers


@triton.jit
def qk_norm_rope_head_per_program(
    q_ptr, k_ptr, cos_ptr, sin_ptr, positions_ptr, q_weight_ptr, k_weight_ptr, stride_q_t, stride_q_h,
    stride_k_t, stride_k_h, stride_cos_l, stride_sin_l, q_heads, eps,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < HEAD_DIM
    row = q_ptr + token * stride_q_t + head * stride_q_h
    weight_ptr = q_weight_ptr
    if head >= q_heads:
        row = k_ptr + token * stride_k_t + (head - q_heads) * stride_k_h
        weight_ptr = k_weight_ptr
    if INTERLEAVED:
        partner, angle, is_first = offs ^ 1, offs // 2, offs % 2 == 0
    else:
        partner, angle, is_first = tl.where(offs < HALF, offs + HALF, offs - HALF), offs % HALF, offs < HALF
    rotated = offs < 2 * HALF
    partner = tl.where(rotated, partner, offs)
    x = tl.load(row + offs, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(row + partner, mask=mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / HEAD_DIM + eps)
        x = x * scale * tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        y = y * scale * tl.load(weight_ptr + partner, mask=mask, other=0.0).to(tl.float32)
    position = tl.load(positions_ptr + token)
    cos = tl.load(cos_ptr + position * stride_cos_l + angle, mask=rotated, other=1.0)
    sin = tl.load(sin_ptr + position * stride_sin_l + angle, mask=rotated, other=0.0)
    out = x * cos + tl.where(is_first, -y, y) * sin
    tl.debug_barrier()  # every thread has read what others now write
    tl.store(row + offs, out.to(q_ptr.dtype.element_ty), mask=mask)


def launch(run: Run, q, k, cos, sin, positions, q_weight, k_weight, eps, interleaved) -> None:
    tokens, heads, dim = q.shape
    run.launch(
        qk_norm_rope_head_per_program,
        (tokens, heads + k.shape[1]),
        **pointers("q[th] k[th] cos[l] sin[l]", q, k, cos, sin),
        **pointers("positions q_weight k_weight", positions, q_weight, k_weight),
        q_heads=heads,
        eps=eps,
        HEAD_DIM=dim,
        HALF=cos.shape[1],
        INTERLEAVED=interleaved,
        BLOCK=triton.next_power_of_2(dim),
    )


VARIANT = Variant(
    wins="never: it is as short as can be",
    launch=launch,
    default={"": Config()},
    deterministic=True,
    batch_invariant=True,
)
