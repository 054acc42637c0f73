"""One program attends for all query rows of one sequence and one KV head, tile of rows by tile."""

import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.language import dot
from tkernels.ops.arguments import pointers


@triton.jit
def paged_prefill_sequence_per_program(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, tables_ptr, starts_ptr, lens_ptr, k_scale_ptr, v_scale_ptr,
    scale, window, stride_out_t, stride_out_h, stride_lse_t, stride_q_t, stride_q_h,
    stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h, stride_tables_b,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    sequence, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    mask_d, mask_dv = offs_d < HEAD_DIM, offs_dv < HEAD_DIM_V
    begin = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - begin
    length = tl.load(lens_ptr + sequence)
    for tile in range(0, queries * GROUP, BLOCK_M):
        rows = tile + tl.arange(0, BLOCK_M)
        mask_m = rows < queries * GROUP
        tokens = (begin + rows // GROUP).to(tl.int64)
        heads = kv_head * GROUP + rows % GROUP
        own = length - queries + rows // GROUP
        q_rows = q_ptr + tokens * stride_q_t + heads * stride_q_h
        q = tl.load(q_rows[:, None] + offs_d[None, :], mask=mask_m[:, None] & mask_d[None, :], other=0.0)
        q = q.to(tl.float32)
        if k_scale_ptr is not None:
            q = q * tl.load(k_scale_ptr + kv_head)
        first = 0
        if window is not None:
            first = tl.maximum(length - queries + tile // GROUP + 1 - window, 0)
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        for start in range(first // BLOCK_N * BLOCK_N, length, BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            live = (keys >= first) & (keys < length)
            page = tl.load(tables_ptr + sequence * stride_tables_b + keys // PAGE_SIZE, mask=live, other=0).to(tl.int64)
            slot = (keys % PAGE_SIZE).to(tl.int64)
            k_rows = k_ptr + kv_head * stride_k_h + page * stride_k_p + slot * stride_k_s
            v_rows = v_ptr + kv_head * stride_v_h + page * stride_v_p + slot * stride_v_s
            k = tl.load(k_rows[:, None] + offs_d[None, :], mask=live[:, None] & mask_d[None, :], other=0.0)
            v = tl.load(v_rows[:, None] + offs_dv[None, :], mask=live[:, None] & mask_dv[None, :], other=0.0)
            visible = mask_m[:, None] & live[None, :]
            if CAUSAL:
                visible = visible & (keys[None, :] <= own[:, None])
            if window is not None:
                visible = visible & (keys[None, :] > own[:, None] - window)
            logits = dot(q, tl.trans(k.to(tl.float32)), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)) * scale
            logits = tl.where(visible, logits, float("-inf"))
            m_new = tl.maximum(m, tl.max(logits, axis=1))
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
            weights = tl.exp(logits - shift[:, None])
            old = tl.exp(m - shift)
            total = total * old + tl.sum(weights, axis=1)
            acc = dot(weights, v.to(tl.float32), acc * old[:, None])
            m = m_new
        total = tl.where(total > 0, total, 1.0)
        out = acc / total[:, None]
        if v_scale_ptr is not None:
            out = out * tl.load(v_scale_ptr + kv_head)
        out_rows = out_ptr + tokens * stride_out_t + heads * stride_out_h
        mask = mask_m[:, None] & mask_dv[None, :]
        tl.store(out_rows[:, None] + offs_dv[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
        if lse_ptr is not None:
            tl.store(lse_ptr + tokens * stride_lse_t + heads, m + tl.log(total), mask=mask_m)


def launch(
    run: Run, out, lse, q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, scale,
    max_context_len, window, k_scale, v_scale, return_lse, causal,
) -> None:  # fmt: skip
    (_, heads, dim), (_, page_size, heads_kv, dim_v) = q.shape, v_cache.shape
    run.launch(
        paged_prefill_sequence_per_program,
        (context_lens.shape[0], heads_kv),
        **pointers("out[th] lse q[th] k[psh] v[psh]", out, lse, q, k_cache, v_cache),
        **pointers("tables[b] starts lens k_scale v_scale", block_tables, cu_seqlens_q, context_lens, k_scale, v_scale),
        stride_lse_t=heads,
        scale=scale,
        window=window,
        GROUP=heads // heads_kv,
        HEAD_DIM=dim,
        HEAD_DIM_V=dim_v,
        PAGE_SIZE=page_size,
        CAUSAL=causal,
        BLOCK_M=run.config["BLOCK_M"],
        BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_DV=triton.next_power_of_2(dim_v),
        BLOCK_N=16,
    )


VARIANT = Variant(
    wins="never: it is as short as can be",
    launch=launch,
    default={"": Config(BLOCK_M=32)},
    deterministic=True,
    batch_invariant=True,
)
