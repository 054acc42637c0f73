"""One program attends for one sequence and one KV head, with all query heads of its group, block of keys by block."""

import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.language import dot
from tkernels.ops.arguments import pointers


@triton.jit
def paged_decode_group_per_program(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, k_scale_ptr, v_scale_ptr,
    scale, window, stride_out_b, stride_out_h, stride_lse_b, stride_q_b, stride_q_h,
    stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h, stride_tables_b,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    sequence, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs_g, offs_d, offs_dv = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    heads, mask_g = kv_head * GROUP + offs_g, offs_g < GROUP
    mask_d, mask_dv = offs_d < HEAD_DIM, offs_dv < HEAD_DIM_V
    q_rows = q_ptr + sequence * stride_q_b + heads * stride_q_h
    q = tl.load(q_rows[:, None] + offs_d[None, :], mask=mask_g[:, None] & mask_d[None, :], other=0.0).to(tl.float32)
    if k_scale_ptr is not None:
        q = q * tl.load(k_scale_ptr + kv_head)
    length = tl.load(lens_ptr + sequence)
    first = 0
    if window is not None:
        first = tl.maximum(length - window, 0)
    m = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_DV), tl.float32)
    for start in range(first // BLOCK_N * BLOCK_N, length, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        live = (keys >= first) & (keys < length)
        page = tl.load(tables_ptr + sequence * stride_tables_b + keys // PAGE_SIZE, mask=live, other=0).to(tl.int64)
        slot = (keys % PAGE_SIZE).to(tl.int64)
        k_rows = k_ptr + kv_head * stride_k_h + page * stride_k_p + slot * stride_k_s
        v_rows = v_ptr + kv_head * stride_v_h + page * stride_v_p + slot * stride_v_s
        k = tl.load(k_rows[:, None] + offs_d[None, :], mask=live[:, None] & mask_d[None, :], other=0.0)
        v = tl.load(v_rows[:, None] + offs_dv[None, :], mask=live[:, None] & mask_dv[None, :], other=0.0)
        logits = dot(q, tl.trans(k.to(tl.float32)), tl.zeros((BLOCK_H, BLOCK_N), tl.float32)) * scale
        logits = tl.where(live[None, :], logits, float("-inf"))
        m_new = tl.maximum(m, tl.max(logits, axis=1))
        weights = tl.exp(logits - m_new[:, None])
        old = tl.exp(m - m_new)
        total = total * old + tl.sum(weights, axis=1)
        acc = dot(weights, v.to(tl.float32), acc * old[:, None])
        m = m_new
    # A context of 0 has no weight at all: zeros, and a log-sum-exp of -inf.
    total = tl.where(length > 0, total, 1.0)
    out = acc / total[:, None]
    if v_scale_ptr is not None:
        out = out * tl.load(v_scale_ptr + kv_head)
    out_rows = out_ptr + sequence * stride_out_b + heads * stride_out_h
    tl.store(
        out_rows[:, None] + offs_dv[None, :], out.to(out_ptr.dtype.element_ty), mask=mask_g[:, None] & mask_dv[None, :]
    )
    if lse_ptr is not None:
        tl.store(lse_ptr + sequence * stride_lse_b + heads, m + tl.log(total), mask=mask_g)


def launch(
    run: Run, out, lse, q, k_cache, v_cache, block_tables, context_lens, scale,
    max_context_len, window, k_scale, v_scale, return_lse,
) -> None:  # fmt: skip
    (sequences, heads, dim), (_, page_size, heads_kv, dim_v) = q.shape, v_cache.shape
    group = heads // heads_kv
    run.launch(
        paged_decode_group_per_program,
        (sequences, heads_kv),
        **pointers("out[bh] lse q[bh] k[psh] v[psh]", out, lse, q, k_cache, v_cache),
        **pointers("tables[b] lens k_scale v_scale", block_tables, context_lens, k_scale, v_scale),
        stride_lse_b=heads,
        scale=scale,
        window=window,
        GROUP=group,
        HEAD_DIM=dim,
        HEAD_DIM_V=dim_v,
        PAGE_SIZE=page_size,
        BLOCK_H=max(16, triton.next_power_of_2(group)),
        BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_DV=triton.next_power_of_2(dim_v),
        BLOCK_N=run.config["BLOCK_N"],
    )


VARIANT = Variant(
    wins="never: it is as short as can be",
    launch=launch,
    default={"": Config(BLOCK_N=16)},
    deterministic=True,
    batch_invariant=True,
)
