"""One launch: tiles of a group's queries sweep splits of the prefix, other programs what each sequence has alone, and
the last of each query head's programs puts all its parts together.

A tile takes BLOCK_M rows of a group, a row being one sequence with one of its query heads, as paged_prefill's
packed_gqa does: a matrix instruction is full where decode pads it, and the prefix is read once for each tile. Tiles of
one group take the same split side by side, so that those after the first find its keys in the L2. What a sequence has
alone is paged_decode's last_arriver behind a table without the prefix.

Every program leaves its parts in the workspace and counts itself in at each of its query heads; who counts a head to
the end merges it. That may be a tile for many heads or a sequence for its own few, so parts are added one after the
other, in the order of their keys, with every rounding spelled out: neither the batch, nor who shares the prefix, nor
the run changes a bit.

Wins where several sequences share more than what their parts cost: of a group of 4 query heads, each takes (Dv + 2) * 8
bytes for each split of the prefix to write and read again, in the L2, and the prefix 2 * (D + Dv) bytes a key.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.language import dot, wait_for_earlier_launches
from tkernels.ops.arguments import pointers
from tkernels.ops.paged_decode._attend import (
    MAX_SPLITS,
    all_but_stages,
    attend_keys,
    fp16_codes,
    fp16_queries,
    heads_of_tile,
    launched_splits,
    max_splits,
    part_arguments,
    result_arguments,
    split_bounds,
    store_attention,
    store_part,
    unsupported,
)
from tkernels.ops.paged_prefill.packed_gqa import tile_sizes
from tkernels.ops.softmax import scale_arguments, tanh_of

# Rows of a tile beyond 64 take more warps, of which a sequence's own keys have no use.
CONFIGS = tuple(
    Config(
        num_splits=splits,
        BLOCK_M=rows,
        BLOCK_N=block,
        BLOCK_PREFIX=block_prefix,
        MIN_BLOCKS=blocks,
        num_warps=warps,
        num_stages=stages,
    )
    for splits in (16, MAX_SPLITS)
    for rows, block, block_prefix, blocks, warps, stages in (
        (32, 64, 32, 8, 4, 5),
        (64, 32, 32, 16, 4, 5),
        (64, 64, 32, 4, 4, 5),
        (64, 64, 32, 8, 4, 3),
        (64, 64, 32, 8, 4, 5),
        (64, 64, 64, 8, 8, 4),
        (128, 64, 32, 8, 8, 5),
    )
)

_GROUPS_AT_ONCE = tl.constexpr(128)


@triton.jit
def cascade_decode_one_launch_group(starts_ptr, entries, place, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The last of the first `entries` groups that begins at or before a place: of the grid's tiles of BLOCK_M rows, or
    of the sequences where that is None.

    Group g begins at tile starts[g] * GROUP // BLOCK_M + g: never before the end of the one before it.
    """
    begun = 0
    for first in range(0, entries, _GROUPS_AT_ONCE):
        groups = first + tl.arange(0, _GROUPS_AT_ONCE)
        begins = tl.load(starts_ptr + groups, mask=groups < entries, other=0).to(tl.int64)
        if BLOCK_M is not None:
            begins = begins * GROUP // BLOCK_M + groups
        begun += tl.sum(((begins <= place) & (groups < entries)).to(tl.int32), axis=0)
    return begun - 1


@triton.jit
def cascade_decode_one_launch_merge(
    out_ptr, lse_ptr, arrived_ptr, acc_ptr, m_ptr, l_ptr, v_scale_ptr, sinks_ptr, sequences, heads, mask, used,
    stride_out_b, stride_out_h, stride_lse_b, stride_acc_b, stride_m_b, stride_arrived_b,
    PARTS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Counts a program in at its rows, each one query head [rows] of a sequence (one, or [rows]), and merges the `used`
    parts (one number, or [rows]) of those that it is the last of.
    """
    # The barriers put what other threads have stored before a count's release, and what they load after its acquire.
    tl.debug_barrier()
    count_ptrs = arrived_ptr + sequences * stride_arrived_b + heads
    is_last = (tl.atomic_add(count_ptrs, 1, mask=mask, sem="acq_rel") == used - 1) & mask
    tl.debug_barrier()
    most = tl.max(tl.where(is_last, used, 0), axis=0)
    if most > 0:
        tl.store(count_ptrs, 0, mask=is_last)
        # A few columns at a time: all those of a tile's rows would take more registers than its sweep.
        for column in tl.static_range(0, BLOCK_DV, COLUMNS):
            offs_dv = tl.arange(0, COLUMNS)
            m = tl.full([mask.shape[0]], float("-inf"), tl.float32)
            l = tl.zeros([mask.shape[0]], tl.float32)  # noqa: E741
            acc = tl.zeros([mask.shape[0], COLUMNS], tl.float32)
            for part in range(0, most):
                there = is_last & (part < used)
                parts = heads * PARTS + part
                sums = sequences * stride_m_b + parts
                # Past the L1: it may hold what these addresses held before another multiprocessor wrote them.
                m_part = tl.load(m_ptr + sums, mask=there, other=float("-inf"), cache_modifier=".cg")
                l_part = tl.load(l_ptr + sums, mask=there, other=0.0, cache_modifier=".cg")
                rows = acc_ptr + sequences * stride_acc_b + parts * HEAD_DIM_V + column
                values = tl.load(
                    rows[:, None] + offs_dv[None, :],
                    mask=there[:, None] & (offs_dv < HEAD_DIM_V - column)[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                m_new = tl.maximum(m, m_part)
                origin = tl.where(m_new == float("-inf"), 0.0, m_new)  # of no key yet: weights of 0, not -inf - -inf
                kept = tl.exp2(m - origin)
                added = tl.exp2(m_part - origin)
                # Left to the compiler, either product of `kept * l + added * l_part` could be the one that is rounded.
                l = tl.fma(l_part, added, l * kept)  # noqa: E741
                acc = tl.fma(values, tl.broadcast_to(added[:, None], values.shape), acc * kept[:, None])
                m = m_new
            store_attention(
                out_ptr + column, lse_ptr, v_scale_ptr, sinks_ptr, acc, m, l, sequences, heads, is_last,
                stride_out_b, stride_out_h, stride_lse_b, GROUP, HEAD_DIM_V - column,
            )  # fmt: skip


@triton.jit
def cascade_decode_one_launch_used(
    length, window, NUM_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr
):
    """How many splits the keys of `length` tokens behind a window have: of a number, or of each of several."""
    _, _, _, used = split_bounds(length, window, NUM_SPLITS, BLOCK_N, BLOCKS)
    return used


@triton.jit
def cascade_decode_one_launch_attend(
    q_ptr, k_ptr, v_ptr, tables_ptr, k_scale_ptr, scale_log2, cap_log2, window,
    sequences, kv_head, heads, mask_m, lens, first_sequence, begin, end,
    stride_q_b, stride_q_h, stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h, stride_table_b,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_PREFIX: tl.constexpr,
):  # fmt: skip
    """The parts (acc, m, l) of a tile's rows over the keys begin .. end-1 of their prefix."""
    BLOCK_M: tl.constexpr = heads.shape[0]
    offs_d = tl.arange(0, BLOCK_D)
    q_rows = q_ptr + sequences * stride_q_b + heads * stride_q_h
    q = tl.load(q_rows[:, None] + offs_d[None, :], mask=mask_m[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    if k_scale_ptr is not None:
        scale_log2 = scale_log2 * tl.load(k_scale_ptr + kv_head)
    scales = tl.full([BLOCK_M], 1.0, tl.float32) * scale_log2
    if k_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        q, units = fp16_queries(q)  # see attend_keys
        scales *= units
    to_cap = scales
    if cap_log2 is not None:
        scales = tl.full([BLOCK_M], 1.0, tl.float32) * cap_log2
    k_ptr += kv_head * stride_k_h
    v_ptr += kv_head * stride_v_h
    first = 0
    owner = first_sequence
    if window is not None:
        # By the table of the shortest context: its window begins first, so it has every entry that the others have.
        shortest = tl.min(tl.where(mask_m, lens, 2147483647), axis=0)
        owner = tl.min(tl.where(mask_m & (lens == shortest), sequences, 2147483647), axis=0)
        first = tl.maximum(shortest - window, 0)
        begin += tl.maximum(tl.minimum(first, end) - begin, 0) // BLOCK_PREFIX * BLOCK_PREFIX
        begin = tl.where(first < end, begin, end)  # all windows begin behind it: no entry of it need be there
    table_ptr = tables_ptr + owner * stride_table_b
    offs_dv = tl.arange(0, BLOCK_DV)
    # No stride is negative: a product of two numbers of 32 bits without a sign is one instruction of three.
    tl.assume(stride_k_p >= 0)
    tl.assume(stride_k_s >= 0)
    tl.assume(stride_v_p >= 0)
    tl.assume(stride_v_s >= 0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for start in range(begin, end, BLOCK_PREFIX):
        keys = start + tl.arange(0, BLOCK_PREFIX)
        # In place of a key that is not there the nearest one is loaded, and weighs nothing.
        near = tl.minimum(tl.maximum(keys, first), end - 1).to(tl.uint32)
        pages = tl.load(table_ptr + near // PAGE_SIZE).to(tl.uint32).to(tl.int64)
        slots = (near % PAGE_SIZE).to(tl.int64)
        k_rows = k_ptr + pages * stride_k_p + slots * stride_k_s
        v_rows = v_ptr + pages * stride_v_p + slots * stride_v_s
        k = tl.load(k_rows[:, None] + offs_d[None, :], mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(v_rows[:, None] + offs_dv[None, :], mask=(offs_dv < HEAD_DIM_V)[None, :], other=0.0)
        if k_ptr.dtype.element_ty == tl.float8e4nv:
            k = fp16_codes(k, False)
            # Tiles of 64 rows go to the matrix units of a warp group, ahead of which no impure operation is moved.
            v = fp16_codes(v, BLOCK_M < 64)
        # [BLOCK_M, BLOCK_D] @ [BLOCK_D, BLOCK_PREFIX] -> [BLOCK_M, BLOCK_PREFIX], scaled once the maximum is
        # subtracted: see attend_keys.
        qk = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_PREFIX], tl.float32))
        if cap_log2 is not None:
            qk = tanh_of(qk * to_cap[:, None])
        visible = (keys < end)[None, :]
        if window is not None:
            visible = visible & (keys[None, :] >= lens[:, None] - window)
        qk = tl.where(visible, qk, float("-inf"))
        m_new = tl.maximum(m, tl.max(qk, axis=1))
        origin = m_new
        if window is not None:  # a row that has seen nothing yet keeps its -inf, and -inf - -inf is no number
            origin = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2((m - origin) * scales)
        p = tl.exp2((qk - origin[:, None]) * scales[:, None])
        l = l * alpha + tl.sum(p, axis=1)  # noqa: E741
        acc = dot(p.to(v.dtype), v, acc * alpha[:, None])  # [BLOCK_M, BLOCK_PREFIX] @ [BLOCK_PREFIX, BLOCK_DV]
        m = m_new
    return acc, m * scales, l


@triton.jit
def cascade_decode_one_launch_prefix(
    out_ptr, lse_ptr, arrived_ptr, acc_ptr, m_ptr, l_ptr, q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, starts_ptr,
    prefixes_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, scale_log2, cap_log2, window, groups, tile, split, kv_head,
    stride_out_b, stride_out_h, stride_lse_b, stride_arrived_b, stride_acc_b, stride_m_b, stride_q_b, stride_q_h,
    stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h, stride_table_b,
    NUM_SPLITS: tl.constexpr, MIN_BLOCKS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_PREFIX: tl.constexpr,
):  # fmt: skip
    """A split of the prefix for a tile of rows, all query heads of one KV head."""
    group = cascade_decode_one_launch_group(starts_ptr, groups, tile, GROUP, BLOCK_M)
    start = tl.load(starts_ptr + group).to(tl.int64)
    size = tl.load(starts_ptr + group + 1) - start
    first_row = (tile - (start * GROUP // BLOCK_M + group)) * BLOCK_M
    if first_row < size * GROUP:  # else a tile to spare, or of a group without sequences
        prefix = tl.load(prefixes_ptr + group)
        _, _, keys_per_split, used = split_bounds(prefix, None, NUM_SPLITS, BLOCK_N, MIN_BLOCKS)
        if split < used:
            rows = first_row + tl.arange(0, BLOCK_M)
            mask_m = rows < size * GROUP
            sequences = start + rows // GROUP
            heads = kv_head * GROUP + rows % GROUP
            lens = tl.load(lens_ptr + sequences, mask=mask_m, other=0)
            begin = split * keys_per_split
            acc, m, l = cascade_decode_one_launch_attend(  # noqa: E741
                q_ptr, k_ptr, v_ptr, tables_ptr, k_scale_ptr, scale_log2, cap_log2, window,
                sequences, kv_head, heads, mask_m, lens, start, begin, tl.minimum(begin + keys_per_split, prefix),
                stride_q_b, stride_q_h, stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h,
                stride_table_b, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, PAGE_SIZE, BLOCK_PREFIX,
            )  # fmt: skip
            store_part(
                acc_ptr, m_ptr, l_ptr, acc, m, l, sequences, heads, mask_m, split, stride_acc_b, stride_m_b,
                PARTS, HEAD_DIM_V,
            )  # fmt: skip
            own_used = cascade_decode_one_launch_used(lens - prefix, window, NUM_SPLITS, BLOCK_N, MIN_BLOCKS)
            cascade_decode_one_launch_merge(
                out_ptr, lse_ptr, arrived_ptr, acc_ptr, m_ptr, l_ptr, v_scale_ptr, sinks_ptr, sequences, heads, mask_m,
                used + tl.maximum(own_used, 1),
                stride_out_b, stride_out_h, stride_lse_b, stride_acc_b, stride_m_b, stride_arrived_b,
                PARTS, GROUP, HEAD_DIM_V, BLOCK_DV, min(BLOCK_DV, 2048 // BLOCK_M),
            )  # fmt: skip


@triton.jit
def cascade_decode_one_launch_own(
    out_ptr, lse_ptr, arrived_ptr, acc_ptr, m_ptr, l_ptr, q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, starts_ptr,
    prefixes_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, scale_log2, cap_log2, window, groups, sequence, split, tile,
    stride_out_b, stride_out_h, stride_lse_b, stride_arrived_b, stride_acc_b, stride_m_b, stride_q_b, stride_q_h,
    stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h, stride_table_b,
    NUM_SPLITS: tl.constexpr, MIN_BLOCKS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A split of what one sequence has alone: a context behind a table that begins after the prefix."""
    group = cascade_decode_one_launch_group(starts_ptr, groups + 1, sequence, GROUP, None)
    prefix = tl.load(prefixes_ptr + group, mask=group < groups, other=0)
    length = tl.load(lens_ptr + sequence) - prefix
    first, begin, keys_per_split, used = split_bounds(length, window, NUM_SPLITS, BLOCK_N, MIN_BLOCKS)
    used = tl.maximum(used, 1)  # somebody has to write the zeros of a sequence without keys
    if split < used:
        kv_head, heads, mask_g = heads_of_tile(tile, GROUP, TILES, BLOCK_H)
        begin += split * keys_per_split
        acc, m, l = attend_keys(  # noqa: E741
            q_ptr, k_ptr, v_ptr, tables_ptr + prefix // PAGE_SIZE, k_scale_ptr, scale_log2, cap_log2,
            sequence, kv_head, heads, mask_g, begin, first, tl.minimum(begin + keys_per_split, length),
            stride_q_b, stride_q_h, stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h,
            stride_table_b, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, PAGE_SIZE, BLOCK_N,
        )  # fmt: skip
        before = cascade_decode_one_launch_used(prefix, None, NUM_SPLITS, BLOCK_N, MIN_BLOCKS)
        store_part(
            acc_ptr, m_ptr, l_ptr, acc, m, l, sequence, heads, mask_g, before + split, stride_acc_b, stride_m_b,
            PARTS, HEAD_DIM_V,
        )  # fmt: skip
        # Without the rows that only pad the tile to what a matrix instruction takes.
        _, own_heads, mask_own = heads_of_tile(tile, GROUP, TILES, ROWS)
        cascade_decode_one_launch_merge(
            out_ptr, lse_ptr, arrived_ptr, acc_ptr, m_ptr, l_ptr, v_scale_ptr, sinks_ptr, sequence, own_heads, mask_own,
            before + used,
            stride_out_b, stride_out_h, stride_lse_b, stride_acc_b, stride_m_b, stride_arrived_b,
            PARTS, GROUP, HEAD_DIM_V, BLOCK_DV, BLOCK_DV,
        )  # fmt: skip


@triton.jit(do_not_specialize=["sequences", "groups", "tiles", "prefix_splits"])
def cascade_decode_one_launch(
    out_ptr, lse_ptr, arrived_ptr, acc_ptr, m_ptr, l_ptr, q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, starts_ptr,
    prefixes_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, scale_log2, cap_log2, window, sequences, groups, tiles,
    prefix_splits,
    stride_out_b, stride_out_h, stride_lse_b, stride_arrived_b, stride_acc_b, stride_m_b, stride_q_b, stride_q_h,
    stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h, stride_table_b,
    NUM_SPLITS: tl.constexpr, MIN_BLOCKS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_PREFIX: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    tile_h = tl.program_id(1)
    wait_for_earlier_launches()
    own = place - tiles * prefix_splits
    if own >= 0:
        # The last splits last: few sequences have so many, and programs without one leave while others work.
        cascade_decode_one_launch_own(
            out_ptr, lse_ptr, arrived_ptr, acc_ptr, m_ptr, l_ptr, q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr,
            starts_ptr, prefixes_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, scale_log2, cap_log2, window, groups,
            (own % sequences).to(tl.int64), own // sequences, tile_h,
            stride_out_b, stride_out_h, stride_lse_b, stride_arrived_b, stride_acc_b, stride_m_b, stride_q_b,
            stride_q_h, stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h, stride_table_b,
            NUM_SPLITS, MIN_BLOCKS, PARTS, GROUP, TILES, HEAD_DIM, HEAD_DIM_V, BLOCK_H, BLOCK_D, BLOCK_DV,
            PAGE_SIZE, BLOCK_N, ROWS,
        )  # fmt: skip
    elif tile_h % TILES == 0:  # the prefix has all query heads of a KV head in its rows
        cascade_decode_one_launch_prefix(
            out_ptr, lse_ptr, arrived_ptr, acc_ptr, m_ptr, l_ptr, q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr,
            starts_ptr, prefixes_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, scale_log2, cap_log2, window, groups,
            place % tiles, place // tiles, (tile_h // TILES).to(tl.int64),
            stride_out_b, stride_out_h, stride_lse_b, stride_arrived_b, stride_acc_b, stride_m_b, stride_q_b,
            stride_q_h, stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h, stride_table_b,
            NUM_SPLITS, MIN_BLOCKS, PARTS, GROUP, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, PAGE_SIZE, BLOCK_M,
            BLOCK_N, BLOCK_PREFIX,
        )  # fmt: skip


def launch(
    run: Run,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    group_starts: torch.Tensor,
    prefix_lens: torch.Tensor,
    scale: float,
    *,
    max_context_len: int | None,
    max_prefix_len: int | None,
    window: int | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    return_lse: bool,
) -> None:
    acc, groups, min_blocks = run.workspace["acc"], prefix_lens.shape[0], run.config["MIN_BLOCKS"]
    (sequences, _, dim), (_, page, heads_kv, dim_v) = q.shape, v_cache.shape
    num_splits = acc.shape[2] // 2
    part = part_arguments(run, q, k_cache, v_cache, block_tables, context_lens, scale, window, k_scale)
    part |= scale_arguments(scale, soft_cap)
    block_n, group = part["BLOCK_N"], part["GROUP"]
    tile = Config(BLOCK_M=run.config["BLOCK_M"], BLOCK_N=run.config["BLOCK_PREFIX"])
    block_m, block_prefix = tile_sizes(tile, max(dim, dim_v), q.element_size())
    if k_cache.element_size() == 1 and run.device.arch in ("sm_89", "sm_120"):
        # mma.sync takes values from registers, in which e4m3 widens: 64 rows spilled 44 bytes on sm_89, 56 on sm_120.
        block_m = min(block_m, 32)
    longest = block_tables.shape[1] * page
    if max_context_len is not None:
        longest = min(longest, max_context_len)
    longest_prefix = longest if max_prefix_len is None else min(longest, max_prefix_len)
    tiles = sequences * group // block_m + groups if groups and longest_prefix else 0
    prefix_splits = launched_splits(num_splits, min_blocks * block_n, block_n, longest_prefix, None)
    splits = launched_splits(num_splits, min_blocks * block_n, block_n, longest, window)
    run.launch(
        cascade_decode_one_launch,
        (tiles * prefix_splits + sequences * splits, heads_kv * part["TILES"]),
        **part,
        **pointers("starts prefixes", group_starts, prefix_lens),
        **pointers("arrived[b] acc[b] m[b] l", *(run.workspace[name] for name in ("arrived", "acc", "m", "l"))),
        **result_arguments(out, lse, v_scale),
        sinks_ptr=sinks,
        sequences=sequences,
        groups=groups,
        tiles=tiles,
        prefix_splits=prefix_splits,
        NUM_SPLITS=num_splits,
        MIN_BLOCKS=min_blocks,
        PARTS=acc.shape[2],
        BLOCK_M=block_m,
        BLOCK_PREFIX=block_prefix,
        ROWS=min(part["BLOCK_H"], triton.next_power_of_2(group)),
    )


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    """All parts, those of a sequence's prefix before its own: acc [B, Hq, 2 * NUM_SPLITS, Dv], m and l [B, Hq,
    2 * NUM_SPLITS], fp32; and a count for each query head.
    """
    sequences, heads = int(axes["B"]), int(axes["Hq"])
    parts = (sequences, heads, 2 * max_splits(config, int(axes["Hkv"]), device))
    sums = Buffer(parts, torch.float32)
    arrived = Buffer((sequences, heads), torch.int32, zeroed=True)
    return {"arrived": arrived, "acc": Buffer((*parts, int(axes["Dv"])), torch.float32), "m": sums, "l": sums}


def _default(block_m: int, block_n: int, min_blocks: int, num_stages: int) -> Config:
    """A default of 512 keys to a split at least, as paged_decode's."""
    sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_PREFIX": 32, "MIN_BLOCKS": min_blocks}
    return Config(num_splits=MAX_SPLITS, **sizes, num_warps=4, num_stages=num_stages)


VARIANT = Variant(
    wins="several sequences share a prefix of more keys than a split has",
    launch=launch,
    configs=CONFIGS,
    # A tensor core's tile has 16 rows and 16 keys at least.
    limits={"num_splits": (1, MAX_SPLITS), "BLOCK_M": (16, 256), "BLOCK_N": (16, 256), "BLOCK_PREFIX": (16, 256)},
    region={"B": (4, 2**31 - 1)},
    default={
        "": _default(64, 32, 16, 4),  # two programs to 100 KB of shared memory
        "sm_80": _default(32, 32, 16, 4),  # 64 rows spilled 12 bytes
        "sm_90": _default(64, 64, 8, 5),
        "sm_100": _default(64, 64, 8, 5),
        "sm_120": _default(32, 32, 16, 4),  # 44 bytes
        "gfx942": _default(64, 32, 16, 2),
        "interpreter": Config(
            num_splits=3, BLOCK_M=16, BLOCK_N=16, BLOCK_PREFIX=32, MIN_BLOCKS=1, num_warps=4, num_stages=1
        ),
    },
    supports=unsupported,
    workspace=workspace,
    key=("B", "N", "Hq", "Hkv", "D", "Dv", "S"),
    sum_order=all_but_stages,
    deterministic=True,
    batch_invariant=True,
)
