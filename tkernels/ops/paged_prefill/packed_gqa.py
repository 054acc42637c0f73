"""Tiles of query rows, all heads of a group packed together, sweep the keys that they can see.

A row is one query token with one of the G query heads that share a KV head; a tile takes BLOCK_M consecutive rows of
one sequence, whatever G, so that it is full even for short chunks and the cache is read once per tile for all of them.
Blocks of keys that every row sees need no mask, those that none sees are skipped, and only the edges (the diagonal, the
start of a window) are masked. The grid follows from shapes alone: T * G // BLOCK_M + B tiles always suffice, and a tile
finds its sequence by binary search over cu_seqlens_q. Wins for every prefill, chunked or not.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tkernels import Axes, Config, DeviceFacts, Run, Variant
from tkernels.language import dot
from tkernels.ops.arguments import pointers
from tkernels.ops.paged_cache import unsupported_kv
from tkernels.ops.softmax import beside_sinks, scale_arguments, tanh_of

CONFIGS = tuple(
    Config(BLOCK_M=rows, BLOCK_N=keys, num_warps=warps, num_stages=stages)
    for rows, keys, warps, stages in (
        (16, 64, 4, 5),
        (32, 64, 4, 3),
        (64, 32, 4, 3),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 64, 4, 5),
        (128, 32, 8, 3),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 5),
        (128, 128, 8, 3),
    )
)


@triton.jit
def paged_prefill_packed_gqa_sequence(tile, starts_ptr, sequences, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sequence (int64) that a tile of rows belongs to, its first token in q, how many it has, and the tile's first
    row in it (int64).
    """
    # Sequence b begins at tile starts[b] * G // BLOCK_M + b: never before the end of the one before it. Find the last
    # that begins at or before this tile.
    low = tl.full((), 0, tl.int64)
    high = low + sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) * GROUP // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle
    start = tl.load(starts_ptr + low)
    queries = tl.load(starts_ptr + low + 1) - start
    first_row = (tile - (start * GROUP // BLOCK_M + low)) * BLOCK_M
    return low, start, queries, first_row


@triton.jit
def paged_prefill_packed_gqa_key_range(own_first, own_end, length, window, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """(begin, full_begin, full_end, end) for rows at positions own_first .. own_end-1: all see the blocks of keys in
    full_begin .. full_end-1, none sees a block before `begin` or a key from `end` on.
    """
    end = own_end if CAUSAL else length
    full_end = (own_first if CAUSAL else length) // BLOCK_N * BLOCK_N
    if window is not None:
        begin = tl.maximum((own_first + 1 - window) // BLOCK_N * BLOCK_N, 0)
        full_begin = tl.maximum(tl.cdiv(own_end - window, BLOCK_N) * BLOCK_N, 0)
    else:
        full_begin = 0
        begin = full_begin
    return begin, full_begin, full_end, end


@triton.jit
def paged_prefill_packed_gqa_attend(
    acc, m, l, q, k, v, keys, own, length, scale_log2, cap_log2, window,  # noqa: E741
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the keys k [BLOCK_N, BLOCK_D] and values v [BLOCK_N, BLOCK_DV] at the positions `keys` to the running
    (acc [BLOCK_M, BLOCK_DV], maximum m, sum l) of the rows q [BLOCK_M, BLOCK_D] at the positions `own`. Unless MASKED,
    every row sees all of them. `scale_log2` and `cap_log2`: see `scale_arguments`.
    """
    # [BLOCK_M, BLOCK_D] @ [BLOCK_D, BLOCK_N] -> [BLOCK_M, BLOCK_N]
    qk = dot(q, tl.trans(k.to(q.dtype)), tl.zeros([q.shape[0], k.shape[0]], tl.float32))
    if cap_log2 is not None:
        qk = tanh_of(qk * scale_log2)
        scale_log2 = cap_log2
    if MASKED:
        visible = (keys <= own[:, None]) if CAUSAL else (keys < length)[None, :]
        if window is not None:
            visible = visible & (keys[None, :] > own[:, None] - window)
        qk = tl.where(visible, qk, float("-inf"))
    m_new = tl.maximum(m, tl.max(qk, axis=1) * scale_log2)
    # A row that has seen nothing yet keeps its -inf, and -inf - -inf is no number.
    origin = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
    alpha = tl.exp2(m - origin)
    # One FMA, rounded once: whatever rounding the maximum has had is the same in every weight, and so in none.
    p = tl.exp2(qk * scale_log2 - origin[:, None])
    l = l * alpha + tl.sum(p, axis=1)  # noqa: E741
    acc = dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None])  # [BLOCK_M, BLOCK_N] @ [BLOCK_N, BLOCK_DV]
    return acc, m_new, l


@triton.jit
def paged_prefill_packed_gqa_store(
    out_ptr, lse_ptr, v_scale_ptr, sinks_ptr, acc, m, l, tokens, heads, mask_m, kv_head,  # noqa: E741
    stride_out_t, stride_out_h, stride_lse_t, HEAD_DIM_V: tl.constexpr,
):  # fmt: skip
    """Writes the rows' weighted means, and their log-sum-exps where wanted, their heads' sinks included."""
    out = acc / l[:, None]  # only rows that pad the tile may have seen nothing, and theirs are not stored
    if sinks_ptr is not None:
        share, m, l = beside_sinks(m, l, tl.load(sinks_ptr + heads, mask=mask_m))  # noqa: E741
        out = out * share[:, None]
    if v_scale_ptr is not None:
        out = out * tl.load(v_scale_ptr + kv_head)
    offs_dv = tl.arange(0, acc.shape[1])
    out_rows = out_ptr + tokens * stride_out_t + heads * stride_out_h
    mask_out = mask_m[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
    tl.store(out_rows[:, None] + offs_dv[None, :], out.to(out_ptr.dtype.element_ty), mask=mask_out)
    if lse_ptr is not None:
        lse = (m + tl.log2(l)) * 0.6931471805599453  # natural
        tl.store(lse_ptr + tokens * stride_lse_t + heads, lse, mask=mask_m)


@triton.jit
def paged_prefill_packed_gqa_sweep(
    acc, m, l, q, own, begin, end, first, length, k_ptr, v_ptr, table_ptr,  # noqa: E741
    stride_k_p, stride_k_s, stride_v_p, stride_v_s, scale_log2, cap_log2, window,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attends to the blocks of keys in begin .. end-1, of which those before `first`, where there is a window, are left
    out; all of them lie within the context and the window unless MASKED.
    """
    offs_d = tl.arange(0, q.shape[1])
    offs_dv = tl.arange(0, acc.shape[1])
    # Constant masks vanish when compiled: heads that fill their tiles, in blocks that every row sees, load unmasked.
    mask_d = (offs_d < HEAD_DIM) if q.shape[1] != HEAD_DIM else tl.full([q.shape[1]], True, tl.int1)
    mask_dv = (offs_dv < HEAD_DIM_V) if acc.shape[1] != HEAD_DIM_V else tl.full([acc.shape[1]], True, tl.int1)
    # No stride is negative: a product of two numbers of 32 bits without a sign is one instruction of three.
    tl.assume(stride_k_p >= 0)
    tl.assume(stride_k_s >= 0)
    tl.assume(stride_v_p >= 0)
    tl.assume(stride_v_s >= 0)
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        live = tl.full([BLOCK_N], True, tl.int1)
        if MASKED:
            live = keys < length
            if window is not None:  # the first block may begin on pages that are another sequence's by now
                live = live & (keys >= first)
        places = keys.to(tl.uint32)
        pages = tl.load(table_ptr + places // PAGE_SIZE, mask=live).to(tl.uint32).to(tl.int64)
        slots = (places % PAGE_SIZE).to(tl.int64)
        k_rows = k_ptr + pages * stride_k_p + slots * stride_k_s
        k = tl.load(k_rows[:, None] + offs_d[None, :], mask=live[:, None] & mask_d[None, :], other=0.0)
        v_rows = v_ptr + pages * stride_v_p + slots * stride_v_s
        v = tl.load(v_rows[:, None] + offs_dv[None, :], mask=live[:, None] & mask_dv[None, :], other=0.0)
        acc, m, l = paged_prefill_packed_gqa_attend(  # noqa: E741
            acc, m, l, q, k, v, keys, own, length, scale_log2, cap_log2, window, CAUSAL, MASKED
        )
    return acc, m, l


@triton.jit(do_not_specialize=["sequences"])
def paged_prefill_packed_gqa(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, tables_ptr, starts_ptr, lens_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr,
    scale_log2, cap_log2, window, sequences, stride_out_t, stride_out_h, stride_lse_t, stride_q_t, stride_q_h,
    stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h, stride_table_b,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    # Last tiles first: they have the most keys to sweep, and short work at the end leaves no multiprocessor waiting.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence, start, queries, first_row = paged_prefill_packed_gqa_sequence(tile, starts_ptr, sequences, GROUP, BLOCK_M)
    if first_row < queries * GROUP:  # else a tile to spare: of padding, or the slack of the bound
        length = tl.load(lens_ptr + sequence)
        rows = first_row + tl.arange(0, BLOCK_M)
        mask_m = rows < queries * GROUP
        tokens = start + rows // GROUP
        heads = kv_head * GROUP + rows % GROUP
        cached = length - queries
        own = cached + (rows // GROUP).to(tl.int32)  # [BLOCK_M], each row's position in its sequence
        own_first = cached + (first_row // GROUP).to(tl.int32)
        own_end = tl.minimum(cached + tl.cdiv(first_row + BLOCK_M, GROUP).to(tl.int32), length)
        begin, full_begin, full_end, end = paged_prefill_packed_gqa_key_range(
            own_first, own_end, length, window, BLOCK_N, CAUSAL
        )
        first = 0
        if window is not None:
            first = own_first + 1 - window
        offs_d = tl.arange(0, BLOCK_D)
        q_rows = q_ptr + tokens * stride_q_t + heads * stride_q_h
        q = tl.load(q_rows[:, None] + offs_d[None, :], mask=mask_m[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
        if k_scale_ptr is not None:
            scale_log2 = scale_log2 * tl.load(k_scale_ptr + kv_head)
        k_head = k_ptr + kv_head * stride_k_h
        v_head = v_ptr + kv_head * stride_v_h
        table_ptr = tables_ptr + sequence * stride_table_b
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        if window is not None:
            acc, m, l = paged_prefill_packed_gqa_sweep(  # noqa: E741
                acc, m, l, q, own, begin, full_begin, first, length, k_head, v_head, table_ptr,
                stride_k_p, stride_k_s, stride_v_p, stride_v_s, scale_log2, cap_log2, window,
                HEAD_DIM, HEAD_DIM_V, PAGE_SIZE, BLOCK_N, CAUSAL, True,
            )  # fmt: skip
        acc, m, l = paged_prefill_packed_gqa_sweep(  # noqa: E741
            acc, m, l, q, own, full_begin, full_end, first, length, k_head, v_head, table_ptr,
            stride_k_p, stride_k_s, stride_v_p, stride_v_s, scale_log2, cap_log2, window,
            HEAD_DIM, HEAD_DIM_V, PAGE_SIZE, BLOCK_N, CAUSAL, False,
        )  # fmt: skip
        acc, m, l = paged_prefill_packed_gqa_sweep(  # noqa: E741
            acc, m, l, q, own, tl.maximum(full_begin, full_end), end, first, length, k_head, v_head, table_ptr,
            stride_k_p, stride_k_s, stride_v_p, stride_v_s, scale_log2, cap_log2, window,
            HEAD_DIM, HEAD_DIM_V, PAGE_SIZE, BLOCK_N, CAUSAL, True,
        )  # fmt: skip
        paged_prefill_packed_gqa_store(
            out_ptr, lse_ptr, v_scale_ptr, sinks_ptr, acc, m, l, tokens, heads, mask_m, kv_head,
            stride_out_t, stride_out_h, stride_lse_t, HEAD_DIM_V,
        )  # fmt: skip


def tile_sizes(config: Config, width: int, itemsize: int) -> tuple[int, int]:
    """BLOCK_M and BLOCK_N for heads of `width`. A config is meant for heads of up to 128 in 16 bits."""
    width = triton.next_power_of_2(width)
    if itemsize < 4:  # wider rows get tiles of as many bytes
        shrink = max(1, width * itemsize // 256)
        return max(16, config["BLOCK_M"] // shrink), max(16, config["BLOCK_N"] // shrink)
    # fp32 products run on FMA units, whose operands are whole rows in registers: 64 x 32 tiles at D 128 spilled 840
    # bytes on sm_90, 32 x 16 ones 456 on sm_120, and 32 x 32 ones at D 64 56; 16 x 16 none anywhere.
    most = max(16, 1024 // width)
    return min(config["BLOCK_M"], most), min(config["BLOCK_N"], most)


def order_of_query_tile(config: Config) -> tuple[int, int, bool]:
    """What decides in which order a row's sums are added: the keys of a block, how many of a warp's lanes share a row
    of them, and the instruction: Hopper's asynchronous matrix units take 64 rows and more.
    """
    return config["BLOCK_N"], config["BLOCK_M"] // config.num_warps, config["BLOCK_M"] >= 64


def prefill_arguments(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    causal: bool,
    block_m: int,
    block_n: int,
) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, tiles of rows x KV heads, and the arguments of a kernel for it but the caches themselves."""
    (tokens, heads, dim), (_, page_size, heads_kv, dim_v) = q.shape, v_cache.shape
    sequences, group = context_lens.shape[0], heads // heads_kv
    steering = (block_tables, cu_seqlens_q, context_lens, k_scale, v_scale, sinks)
    return (tokens * group // block_m + sequences, heads_kv), {
        **pointers("out[th] lse q[th]", out, lse, q),
        **pointers("tables starts lens k_scale v_scale sinks", *steering),
        "stride_lse_t": heads,
        "stride_table_b": block_tables.stride(0),
        **scale_arguments(scale, soft_cap),
        "window": window,
        "sequences": sequences,
        "GROUP": group,
        "HEAD_DIM": dim,
        "HEAD_DIM_V": dim_v,
        "BLOCK_D": triton.next_power_of_2(dim),
        "BLOCK_DV": triton.next_power_of_2(dim_v),
        "PAGE_SIZE": page_size,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "CAUSAL": causal,
    }


def launch(
    run: Run,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    max_context_len: int | None,
    window: int | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    return_lse: bool,
    causal: bool,
) -> None:
    if context_lens.shape[0] == 0:
        return  # every row is padding
    block_m, block_n = tile_sizes(run.config, max(q.shape[2], v_cache.shape[3]), q.element_size())
    widens = k_cache.element_size() == 1 and run.device.arch in ("sm_89", "sm_120")
    if widens or (soft_cap is not None and run.device.arch in ("sm_80", "sm_86", "sm_89", "sm_120")):
        # mma.sync takes keys from registers, where e4m3 widens: 32 keys spilled 28 bytes on sm_89, 40 on sm_120. Beside
        # a cap's tangents they spilled 20 on sm_80, 28 on sm_86 and sm_89, and 128 on sm_120.
        block_n = max(16, block_n // 2)
    grid, arguments = prefill_arguments(
        out, lse, q, v_cache, block_tables, cu_seqlens_q, context_lens, scale, window, k_scale, v_scale, soft_cap,
        sinks, causal, block_m, block_n,
    )  # fmt: skip
    run.launch(paged_prefill_packed_gqa, grid, **arguments, **pointers("k[psh] v[psh]", k_cache, v_cache))


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    if reason := unsupported_kv(axes, device):
        return reason
    if int(axes.get("T", 0)) * int(axes["Hq"]) // int(axes["Hkv"]) >= 2**31 - 2**16:
        return "rows of queries (tokens x query heads of a KV head) are counted in 32 bits"
    return None


VARIANT = Variant(
    wins="every prefill, chunked or not",
    launch=launch,
    supports=supports,
    configs=CONFIGS,
    limits={"BLOCK_M": (16, 256), "BLOCK_N": (16, 256)},  # a tensor core's tile has 16 rows and 16 keys at least
    default={
        "": Config(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2),
        # Compiled at D 128 in bf16. 64 keys would spill on sm_80 (104 bytes of stack) and sm_120 (96), whose products
        # read from registers, and so would 128 rows of 32 keys (32 and 40). On sm_90, where 64 rows or more are HGMMA,
        # 128 keys spill 40 bytes. 229 registers x 256 threads leave room for one program to a multiprocessor, so shared
        # memory is free: 5 stages are three buffers of keys (132 KB), 3 or 4 are two.
        "sm_80": Config(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=5),
        "sm_90": Config(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=5),
        "sm_100": Config(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=5),
        "interpreter": Config(BLOCK_M=32, BLOCK_N=16, num_warps=4, num_stages=1),
    },
    key=("T", "Hq", "Hkv", "D", "Dv", "S"),
    sum_order=order_of_query_tile,
    deterministic=True,
    batch_invariant=True,
)
