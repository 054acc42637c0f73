"""The keys of a sequence are split over several programs; the one that finishes last combines all their parts.

As split_kv, but in one launch: each program leaves its part in the workspace and counts itself in; the one that counts
to the end knows that the others' parts are there, combines all of them and takes the count back to zero for the next
launch. It adds the parts in the order of the splits, its own from memory like the others', so it does not matter who is
last, and where the splits lie follows from the sequence's own context alone: neither the batch nor the run changes a
bit. Wins over split_kv where a launch counts (1.3 us in a CUDA graph, and the tail of the first kernel that the second
waits for), over one_pass where sequences x KV heads do not fill the device evenly.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.language import wait_for_earlier_launches
from tkernels.ops.paged_decode._attend import (
    MAX_SPLITS,
    all_but_stages,
    attend_keys,
    combine_parts,
    head_tile,
    heads_of_tile,
    part_arguments,
    part_buffers,
    part_chunk,
    result_arguments,
    split_arguments,
    split_bounds,
    store_attention,
    store_part,
    unsupported,
)
from tkernels.ops.softmax import scale_arguments

# At least 512 keys to a split by default: a part takes (Dv + 2) * 8 bytes for each query head
# to write and read again, at a group of 4 and bf16 1.6% of what 512 keys take.
CONFIGS = tuple(
    Config(num_splits=splits, BLOCK_N=block, MIN_BLOCKS=blocks, num_warps=warps, num_stages=stages)
    for splits in (16, MAX_SPLITS)
    for block, blocks, warps, stages in (
        (32, 8, 2, 5),
        (32, 16, 4, 5),
        (64, 2, 4, 5),
        (64, 4, 4, 5),
        (64, 8, 4, 3),
        (64, 8, 4, 5),
        (64, 16, 4, 5),
        (128, 4, 8, 5),
    )
) + tuple(
    Config(num_splits=splits, BLOCK_N=64, MIN_BLOCKS=8, num_warps=4, num_stages=5, launch_pdl=1)
    for splits in (16, MAX_SPLITS)
)


@triton.jit(do_not_specialize=["splits"])
def paged_decode_last_arriver(
    out_ptr, lse_ptr, arrived_ptr, acc_ptr, m_ptr, l_ptr, q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr,
    k_scale_ptr, v_scale_ptr, sinks_ptr, scale_log2, cap_log2, window, splits,
    stride_out_b, stride_out_h, stride_lse_b, stride_acc_b, stride_m_b, stride_q_b, stride_q_h,
    stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h, stride_table_b,
    NUM_SPLITS: tl.constexpr, MIN_BLOCKS: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    # A sequence's splits run side by side, so that they are combined while their parts are in the L2.
    sequence = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    tile = tl.program_id(1)
    kv_head, heads, mask_g = heads_of_tile(tile, GROUP, TILES, BLOCK_H)
    wait_for_earlier_launches()
    length = tl.load(lens_ptr + sequence)
    first, begin, keys_per_split, used = split_bounds(length, window, NUM_SPLITS, BLOCK_N, MIN_BLOCKS)
    used = tl.maximum(used, 1)  # somebody has to write the zeros of a sequence without keys
    if split < used:
        begin += split * keys_per_split
        acc, m, l = attend_keys(  # noqa: E741
            q_ptr, k_ptr, v_ptr, tables_ptr, k_scale_ptr, scale_log2, cap_log2,
            sequence, kv_head, heads, mask_g, begin, first, tl.minimum(begin + keys_per_split, length),
            stride_q_b, stride_q_h, stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h,
            stride_table_b, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, PAGE_SIZE, BLOCK_N,
        )  # fmt: skip
        store_part(
            acc_ptr, m_ptr, l_ptr, acc, m, l, sequence, heads, mask_g, split, stride_acc_b, stride_m_b,
            NUM_SPLITS, HEAD_DIM_V,
        )  # fmt: skip
        # One thread counts for all: the barrier puts the others' stores before its release, as the barrier by which the
        # count reaches the others puts their loads after its acquire.
        tl.debug_barrier()
        count_ptr = arrived_ptr + sequence * tl.num_programs(1) + tile
        if tl.atomic_add(count_ptr, 1, sem="acq_rel") == used - 1:
            tl.store(count_ptr, 0)
            # Without the rows that only pad the tile to what a matrix instruction takes.
            _, own_heads, mask_own = heads_of_tile(tile, GROUP, TILES, ROWS)
            all_acc, all_m, all_l = combine_parts(
                acc_ptr, m_ptr, l_ptr, sequence, own_heads, mask_own, used, stride_acc_b, stride_m_b,
                NUM_SPLITS, HEAD_DIM_V, BLOCK_S, BLOCK_DV, CHUNK,
            )  # fmt: skip
            store_attention(
                out_ptr, lse_ptr, v_scale_ptr, sinks_ptr, all_acc, all_m, all_l, sequence, own_heads, mask_own,
                stride_out_b, stride_out_h, stride_lse_b, GROUP, HEAD_DIM_V,
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
    scale: float,
    *,
    max_context_len: int | None,
    window: int | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    return_lse: bool,
) -> None:
    part = part_arguments(run, q, k_cache, v_cache, block_tables, context_lens, scale, window, k_scale)
    part |= scale_arguments(scale, soft_cap)
    splits, parts = split_arguments(run, part, block_tables, max_context_len)
    rows = min(part["BLOCK_H"], triton.next_power_of_2(part["GROUP"]))
    run.launch(
        paged_decode_last_arriver,
        (q.shape[0] * splits, k_cache.shape[2] * part["TILES"]),
        **part,
        **parts,
        **result_arguments(out, lse, v_scale),
        sinks_ptr=sinks,
        arrived_ptr=run.workspace["arrived"],
        splits=splits,
        BLOCK_S=triton.next_power_of_2(parts["NUM_SPLITS"]),
        ROWS=rows,
        CHUNK=part_chunk(parts["NUM_SPLITS"], rows, v_cache.shape[3]),
    )


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    heads, heads_kv = int(axes["Hq"]), int(axes["Hkv"])
    programs = heads_kv * head_tile(heads // heads_kv, device)[1]
    arrived = Buffer((int(axes["B"]), programs), torch.int32, zeroed=True)
    return {"arrived": arrived, **part_buffers(axes, config, device)}


VARIANT = Variant(
    wins="contexts are long and sequences x KV heads leave multiprocessors idle, now or in the last wave",
    launch=launch,
    configs=CONFIGS,
    limits={"num_splits": (1, MAX_SPLITS), "BLOCK_N": (16, 256)},  # a tensor core's tile has 16 keys at least
    default={
        "": Config(num_splits=MAX_SPLITS, BLOCK_N=32, MIN_BLOCKS=16, num_warps=4, num_stages=4),
        "sm_80": Config(num_splits=MAX_SPLITS, BLOCK_N=64, MIN_BLOCKS=8, num_warps=4, num_stages=5),
        "sm_90": Config(num_splits=MAX_SPLITS, BLOCK_N=64, MIN_BLOCKS=8, num_warps=4, num_stages=5),
        "sm_100": Config(num_splits=MAX_SPLITS, BLOCK_N=64, MIN_BLOCKS=8, num_warps=4, num_stages=5),
        "gfx942": Config(num_splits=MAX_SPLITS, BLOCK_N=32, MIN_BLOCKS=16, num_warps=4, num_stages=2),
        "interpreter": Config(num_splits=3, BLOCK_N=16, MIN_BLOCKS=1, num_warps=4, num_stages=1),
    },
    supports=unsupported,
    workspace=workspace,
    key=("B", "N", "Hq", "Hkv", "D", "Dv", "S"),
    sum_order=all_but_stages,
    deterministic=True,
    batch_invariant=True,
)
