"""One program per sequence and KV head reads that head's keys and values once, for all the query heads that share it.

The query heads of a group are the rows of one tile (padded to the 16 that a matrix instruction takes), so the cache is
read once whatever the ratio of query to KV heads, and the softmax runs online over blocks of keys (Milakov and
Gimelshein, 2018). Wins where sequences x KV heads fill the device by themselves; a few long sequences leave it idle.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.language import dot
from tkernels.ops.paged_decode.paged_cache import unsupported_kv

# Page ids are loaded a stage before the keys that wait for them, so two stages more are one block of keys more in
# flight: for sm_90 at D 128, 64 keys take 38 KB of shared memory with 3 or 4 stages, 71 KB with 5 or 6, 103 KB with 7.
CONFIGS = tuple(
    Config(BLOCK_N=block, num_warps=warps, num_stages=stages)
    for block, warps, stages in (
        (16, 2, 5),
        (32, 2, 3),
        (32, 2, 5),
        (32, 4, 5),
        (32, 4, 7),
        (64, 4, 2),
        (64, 4, 3),
        (64, 4, 5),
        (64, 8, 5),
        (128, 4, 3),
        (128, 8, 3),
        (128, 8, 5),
    )
)


@triton.jit
def attend_keys(
    q,
    begin,
    first,
    end,
    k_ptr,
    v_ptr,
    table_ptr,
    stride_k_p,
    stride_k_s,
    stride_v_p,
    stride_v_s,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attention of q [BLOCK_H, BLOCK_D] over the keys first .. end-1, in blocks that start at `begin`; k_ptr, v_ptr and
    table_ptr are those of one sequence and one KV head. Every block must hold a key.

    Returns acc [BLOCK_H, BLOCK_DV], not yet divided by l, and m (a maximum, in units of log 2) and l, [BLOCK_H] each.
    """
    BLOCK_H: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_H], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        live = (keys >= first) & (keys < end)
        pages = tl.load(table_ptr + keys // PAGE_SIZE, mask=live, other=0).to(tl.int64)
        slots = (keys % PAGE_SIZE).to(tl.int64)
        k_rows = k_ptr + pages * stride_k_p + slots * stride_k_s
        k = tl.load(k_rows[:, None] + offs_d[None, :], mask=live[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
        v_rows = v_ptr + pages * stride_v_p + slots * stride_v_s
        v = tl.load(v_rows[:, None] + offs_dv[None, :], mask=live[:, None] & (offs_dv < HEAD_DIM_V)[None, :], other=0.0)
        # [BLOCK_H, BLOCK_D] @ [BLOCK_D, BLOCK_N] -> [BLOCK_H, BLOCK_N], scaled only once the maximum is subtracted: the
        # weights that count come from small differences, which lose nothing to the size of the logits.
        k, v = k.to(q.dtype), v.to(q.dtype)  # of an fp8 cache: what was loaded is a byte an element
        qk = dot(q, tl.trans(k), tl.zeros([BLOCK_H, BLOCK_N], tl.float32))
        qk = tl.where(live[None, :], qk, float("-inf"))
        m_new = tl.maximum(m, tl.max(qk, axis=1))
        alpha = tl.exp2((m - m_new) * scale_log2)
        p = tl.exp2((qk - m_new[:, None]) * scale_log2)
        l = l * alpha + tl.sum(p, axis=1)  # noqa: E741
        acc = dot(p.to(v.dtype), v, acc * alpha[:, None])  # [BLOCK_H, BLOCK_N] @ [BLOCK_N, BLOCK_DV]
        m = m_new
    return acc, m * scale_log2, l


@triton.jit
def paged_decode_one_pass(
    out_ptr,
    lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    lens_ptr,
    k_scale_ptr,
    v_scale_ptr,
    scale_log2,
    window,
    stride_out_b,
    stride_out_h,
    stride_lse_b,
    stride_q_b,
    stride_q_h,
    stride_k_p,
    stride_k_s,
    stride_k_h,
    stride_v_p,
    stride_v_s,
    stride_v_h,
    stride_table_b,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = (tl.program_id(1) // TILES).to(tl.int64)  # its query heads fit into one tile, unless they are many
    offs_g = tl.program_id(1) % TILES * BLOCK_H + tl.arange(0, BLOCK_H)
    heads = kv_head * GROUP + offs_g
    mask_g = offs_g < GROUP
    offs_d = tl.arange(0, BLOCK_D)
    q_rows = q_ptr + sequence * stride_q_b + heads * stride_q_h
    q = tl.load(q_rows[:, None] + offs_d[None, :], mask=mask_g[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    if k_scale_ptr is not None:
        scale_log2 = scale_log2 * tl.load(k_scale_ptr + kv_head)
    length = tl.load(lens_ptr + sequence)
    first = 0
    if window is not None:
        first = tl.maximum(length - window, 0)
    acc, m, l = attend_keys(  # noqa: E741
        q,
        first // BLOCK_N * BLOCK_N,
        first,
        length,
        k_ptr + kv_head * stride_k_h,
        v_ptr + kv_head * stride_v_h,
        tables_ptr + sequence * stride_table_b,
        stride_k_p,
        stride_k_s,
        stride_v_p,
        stride_v_s,
        scale_log2,
        HEAD_DIM,
        HEAD_DIM_V,
        BLOCK_DV,
        PAGE_SIZE,
        BLOCK_N,
    )
    total = tl.maximum(l, 1.0)  # the largest weight is 1; with nothing cached: zeros, and not 0 / 0
    out = acc / total[:, None]
    if v_scale_ptr is not None:
        out = out * tl.load(v_scale_ptr + kv_head)
    offs_dv = tl.arange(0, BLOCK_DV)
    out_rows = out_ptr + sequence * stride_out_b + heads * stride_out_h
    mask_out = mask_g[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
    tl.store(out_rows[:, None] + offs_dv[None, :], out.to(out_ptr.dtype.element_ty), mask=mask_out)
    if lse_ptr is not None:
        lse = (m + tl.log2(total)) * 0.6931471805599453  # natural; m is -inf where nothing is cached
        tl.store(lse_ptr + sequence * stride_lse_b + heads, lse, mask=mask_g)


def head_tile(group: int) -> tuple[int, int]:
    """(rows of a tile, tiles per KV head) for a group of query heads."""
    block = max(16, min(64, triton.next_power_of_2(group)))
    return block, triton.cdiv(group, block)


def keys_per_block(block: int, rows: torch.Tensor) -> int:
    """The config's block of keys, shrunk to as many bytes where a row has more than 256; at least 16 keys."""
    row_bytes = triton.next_power_of_2(rows.shape[-1]) * rows.element_size()
    return max(16, block * 256 // max(256, row_bytes))


def launch(
    run: Run,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    max_context_len: int | None,
    window: int | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    return_lse: bool,
) -> None:
    (sequences, heads, dim), (_, page_size, heads_kv, dim_v) = q.shape, v_cache.shape
    block_h, tiles = head_tile(heads // heads_kv)
    run.launch(
        paged_decode_one_pass,
        (sequences, heads_kv * tiles),
        out_ptr=out,
        lse_ptr=lse,
        q_ptr=q,
        k_ptr=k_cache,
        v_ptr=v_cache,
        tables_ptr=block_tables,
        lens_ptr=context_lens,
        k_scale_ptr=k_scale,
        v_scale_ptr=v_scale,
        scale_log2=scale * 1.4426950408889634,
        window=window,
        stride_out_b=out.stride(0),
        stride_out_h=out.stride(1),
        stride_lse_b=heads,
        stride_q_b=q.stride(0),
        stride_q_h=q.stride(1),
        stride_k_p=k_cache.stride(0),
        stride_k_s=k_cache.stride(1),
        stride_k_h=k_cache.stride(2),
        stride_v_p=v_cache.stride(0),
        stride_v_s=v_cache.stride(1),
        stride_v_h=v_cache.stride(2),
        stride_table_b=block_tables.stride(0),
        GROUP=heads // heads_kv,
        HEAD_DIM=dim,
        HEAD_DIM_V=dim_v,
        BLOCK_H=block_h,
        TILES=tiles,
        BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_DV=triton.next_power_of_2(dim_v),
        PAGE_SIZE=page_size,
        BLOCK_N=keys_per_block(run.config["BLOCK_N"], k_cache if dim > dim_v else v_cache),
    )


VARIANT = Variant(
    wins="sequences x KV heads alone fill the device (at 8 KV heads, some 32 sequences)",
    launch=launch,
    configs=CONFIGS,
    supports=unsupported_kv,
    limits={"BLOCK_N": (16, 256)},  # a tensor core's tile has 16 keys at least
    default={
        "": Config(BLOCK_N=32, num_warps=4, num_stages=5),  # two programs to 100 KB of shared memory
        "sm_80": Config(BLOCK_N=64, num_warps=4, num_stages=5),
        "sm_90": Config(BLOCK_N=64, num_warps=4, num_stages=5),
        "sm_100": Config(BLOCK_N=64, num_warps=4, num_stages=5),
        "gfx942": Config(BLOCK_N=32, num_warps=4, num_stages=2),
        "interpreter": Config(BLOCK_N=32, num_warps=4, num_stages=1),
    },
    key=("Hq", "Hkv", "D", "Dv", "S"),
    deterministic=True,
    batch_invariant=True,
)
