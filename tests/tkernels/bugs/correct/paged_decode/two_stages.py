"""The keys of a sequence are split over programs; a second kernel merges their parts, which are whole results."""

import torch
import triton
import triton.language as tl

from tkernels import Buffer, Config, Run, Variant
from tkernels.language import dot
from tkernels.ops.arguments import pointers


@triton.jit
def paged_decode_two_stages(
    parts_ptr, lses_ptr, q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, k_scale_ptr,
    scale, window, stride_parts_b, stride_parts_h, stride_parts_s, stride_lses_b, stride_lses_h, stride_q_b, stride_q_h,
    stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h, stride_tables_b,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    sequence, kv_head, split = (
        tl.program_id(0).to(tl.int64),
        tl.program_id(1).to(tl.int64),
        tl.program_id(2).to(tl.int64),
    )
    length = tl.load(lens_ptr + sequence)
    first = 0
    if window is not None:
        first = tl.maximum(length - window, 0)
    per_split = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK_N) * BLOCK_N
    begin = (first + split * per_split).to(tl.int32)
    end = tl.minimum(begin + per_split, length)
    if begin < end:
        offs_g, offs_d, offs_dv = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        heads, mask_g = kv_head * GROUP + offs_g, offs_g < GROUP
        mask_d, mask_dv = offs_d < HEAD_DIM, offs_dv < HEAD_DIM_V
        q_rows = q_ptr + sequence * stride_q_b + heads * stride_q_h
        q = tl.load(q_rows[:, None] + offs_d[None, :], mask=mask_g[:, None] & mask_d[None, :], other=0.0)
        q = q.to(tl.float32)
        if k_scale_ptr is not None:
            q = q * tl.load(k_scale_ptr + kv_head)
        m = tl.full((BLOCK_H,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_H,), tl.float32)
        acc = tl.zeros((BLOCK_H, BLOCK_DV), tl.float32)
        for start in range(begin, end, BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            live = keys < end
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
        rows = parts_ptr + sequence * stride_parts_b + heads * stride_parts_h + split * stride_parts_s
        tl.store(rows[:, None] + offs_dv[None, :], acc / total[:, None], mask=mask_g[:, None] & mask_dv[None, :])
        tl.store(lses_ptr + sequence * stride_lses_b + heads * stride_lses_h + split, m + tl.log(total), mask=mask_g)


@triton.jit
def paged_decode_two_stages_merge(
    out_ptr, lse_ptr, parts_ptr, lses_ptr, lens_ptr, v_scale_ptr, window,
    stride_out_b, stride_out_h, stride_lse_b, stride_parts_b, stride_parts_h, stride_parts_s, stride_lses_b,
    stride_lses_h, SPLITS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    length = tl.load(lens_ptr + sequence)
    visible = length
    if window is not None:
        visible = tl.minimum(length, window)
    per_split = tl.cdiv(tl.cdiv(visible, SPLITS), BLOCK_N) * BLOCK_N
    offs_dv = tl.arange(0, BLOCK_DV)
    mask_dv = offs_dv < HEAD_DIM_V
    m = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    for split in range(0, SPLITS):
        if split * per_split < visible:
            lse = tl.load(lses_ptr + sequence * stride_lses_b + head * stride_lses_h + split)
            row = (
                parts_ptr
                + sequence * stride_parts_b
                + head * stride_parts_h
                + tl.cast(split, tl.int64) * stride_parts_s
            )
            part = tl.load(row + offs_dv, mask=mask_dv, other=0.0)
            m_new = tl.maximum(m, lse)
            old, new = tl.exp(m - m_new), tl.exp(lse - m_new)
            acc = acc * old + part * new
            total = total * old + new
            m = m_new
    total = tl.where(visible > 0, total, 1.0)
    out = acc / total
    if v_scale_ptr is not None:
        out = out * tl.load(v_scale_ptr + head // GROUP)
    tl.store(
        out_ptr + sequence * stride_out_b + head * stride_out_h + offs_dv, out.to(out_ptr.dtype.element_ty),
        mask=mask_dv,
    )  # fmt: skip
    if lse_ptr is not None:
        tl.store(lse_ptr + sequence * stride_lse_b + head, m + tl.log(total))


def launch(
    run: Run, out, lse, q, k_cache, v_cache, block_tables, context_lens, scale,
    max_context_len, window, k_scale, v_scale, return_lse,
) -> None:  # fmt: skip
    (sequences, heads, dim), (_, page_size, heads_kv, dim_v) = q.shape, v_cache.shape
    group, splits, block_n = heads // heads_kv, run.config["SPLITS"], run.config["BLOCK_N"]
    parts = pointers("parts[bhs] lses[bh]", run.workspace["parts"], run.workspace["lses"])
    shared = {
        "lens_ptr": context_lens,
        "window": window,
        "SPLITS": splits,
        "GROUP": group,
        "HEAD_DIM_V": dim_v,
        "BLOCK_DV": triton.next_power_of_2(dim_v),
        "BLOCK_N": block_n,
    }
    run.launch(
        paged_decode_two_stages,
        (sequences, heads_kv, splits),
        **parts,
        **shared,
        **pointers("q[bh] k[psh] v[psh] tables[b] k_scale", q, k_cache, v_cache, block_tables, k_scale),
        scale=scale,
        HEAD_DIM=dim,
        PAGE_SIZE=page_size,
        BLOCK_H=max(16, triton.next_power_of_2(group)),
        BLOCK_D=triton.next_power_of_2(dim),
    )
    run.launch(
        paged_decode_two_stages_merge,
        (sequences, heads),
        **parts,
        **shared,
        **pointers("out[bh] lse v_scale", out, lse, v_scale),
        stride_lse_b=heads,
    )


def workspace(axes, config, device):
    rows = (int(axes["B"]), int(axes["Hq"]), config["SPLITS"])
    return {"parts": Buffer((*rows, int(axes["Dv"])), torch.float32), "lses": Buffer(rows, torch.float32)}


VARIANT = Variant(
    wins="never: it is as short as can be",
    launch=launch,
    default={"": Config(SPLITS=3, BLOCK_N=16)},
    workspace=workspace,
    deterministic=True,
    batch_invariant=True,
)
