"""The keys of a sequence are split over several programs, whose partial results a second kernel combines.

Each program does what one_pass does over its own blocks of keys and leaves its part of the softmax (sum of values,
maximum, sum of weights) in the workspace; the second kernel weighs the parts against each other ("flash decoding",
Dao et al., 2023). The device's multiprocessors say how many splits there are at most, and the host's bound of the
contexts how many are launched; but where the splits lie follows from the sequence's own context alone, and the parts
are added in order, so neither the batch nor the bound nor the run changes a bit. Wins where sequences x KV heads are
too few to fill the device.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.ops.paged_decode._attend import (
    MAX_SPLITS,
    all_but_stages,
    attend_keys,
    combine_parts,
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

CONFIGS = tuple(
    Config(num_splits=splits, BLOCK_N=block, MIN_BLOCKS=blocks, REDUCE_HEADS=1, num_warps=warps, num_stages=stages)
    for splits in (8, 16, MAX_SPLITS)
    for block, blocks, warps, stages in ((32, 4, 2, 5), (64, 1, 4, 3), (64, 2, 4, 5), (64, 4, 4, 5), (128, 2, 8, 5))
)


@triton.jit
def paged_decode_split_kv_part(
    acc_ptr, m_ptr, l_ptr, q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, k_scale_ptr, scale_log2,
    cap_log2, window,
    stride_acc_b, stride_m_b, stride_q_b, stride_q_h, stride_k_p, stride_k_s, stride_k_h,
    stride_v_p, stride_v_s, stride_v_h, stride_table_b,
    NUM_SPLITS: tl.constexpr, MIN_BLOCKS: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The part of one split."""
    sequence = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    kv_head, heads, mask_g = heads_of_tile(tl.program_id(1), GROUP, TILES, BLOCK_H)
    length = tl.load(lens_ptr + sequence)
    first, begin, keys_per_split, used = split_bounds(length, window, NUM_SPLITS, BLOCK_N, MIN_BLOCKS)
    if split < used:  # the reduction never looks at a split without keys
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


@triton.jit
def paged_decode_split_kv_reduce(
    out_ptr, lse_ptr, acc_ptr, m_ptr, l_ptr, lens_ptr, v_scale_ptr, sinks_ptr, window, heads,
    stride_out_b, stride_out_h, stride_lse_b, stride_acc_b, stride_m_b,
    NUM_SPLITS: tl.constexpr, MIN_BLOCKS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Weighs the parts of BLOCK_H heads of one sequence against each other."""
    sequence = tl.program_id(0).to(tl.int64)
    offs_h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    mask_h = offs_h < heads
    _, _, _, used = split_bounds(tl.load(lens_ptr + sequence), window, NUM_SPLITS, BLOCK_N, MIN_BLOCKS)
    acc, m, l = combine_parts(  # noqa: E741
        acc_ptr, m_ptr, l_ptr, sequence, offs_h, mask_h, used, stride_acc_b, stride_m_b,
        NUM_SPLITS, HEAD_DIM_V, BLOCK_S, BLOCK_DV, CHUNK,
    )  # fmt: skip
    store_attention(
        out_ptr, lse_ptr, v_scale_ptr, sinks_ptr, acc, m, l, sequence, offs_h, mask_h,
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
    (sequences, heads, _), heads_kv, reduce_heads = q.shape, k_cache.shape[2], run.config["REDUCE_HEADS"]
    part = part_arguments(run, q, k_cache, v_cache, block_tables, context_lens, scale, window, k_scale)
    part |= scale_arguments(scale, soft_cap)
    splits, parts = split_arguments(run, part, block_tables, max_context_len)
    run.launch(paged_decode_split_kv_part, (sequences, heads_kv * part["TILES"], splits), **part, **parts)
    run.launch(
        paged_decode_split_kv_reduce,
        (sequences, triton.cdiv(heads, reduce_heads)),
        **parts,
        **result_arguments(out, lse, v_scale),
        sinks_ptr=sinks,
        **{name: part[name] for name in ("lens_ptr", "window", "GROUP", "HEAD_DIM_V", "BLOCK_DV", "BLOCK_N")},
        heads=heads,
        BLOCK_H=reduce_heads,
        BLOCK_S=triton.next_power_of_2(parts["NUM_SPLITS"]),
        CHUNK=part_chunk(parts["NUM_SPLITS"], reduce_heads, v_cache.shape[3]),
    )


VARIANT = Variant(
    wins="sequences x KV heads are too few to fill the device and contexts are long",
    launch=launch,
    configs=CONFIGS,
    # A tensor core's tile has 16 keys at least.
    limits={"num_splits": (1, MAX_SPLITS), "BLOCK_N": (16, 256), "REDUCE_HEADS": (1, 64)},
    default={
        "": Config(num_splits=MAX_SPLITS, BLOCK_N=32, MIN_BLOCKS=4, REDUCE_HEADS=1, num_warps=4, num_stages=4),
        "sm_80": Config(num_splits=MAX_SPLITS, BLOCK_N=64, MIN_BLOCKS=2, REDUCE_HEADS=1, num_warps=4, num_stages=5),
        "sm_90": Config(num_splits=MAX_SPLITS, BLOCK_N=64, MIN_BLOCKS=2, REDUCE_HEADS=1, num_warps=4, num_stages=5),
        "sm_100": Config(num_splits=MAX_SPLITS, BLOCK_N=64, MIN_BLOCKS=2, REDUCE_HEADS=1, num_warps=4, num_stages=5),
        "gfx942": Config(num_splits=MAX_SPLITS, BLOCK_N=32, MIN_BLOCKS=4, REDUCE_HEADS=1, num_warps=4, num_stages=2),
        # Interpreting costs by the program: few splits, and all heads of a sequence reduced by one.
        "interpreter": Config(num_splits=3, BLOCK_N=16, MIN_BLOCKS=1, REDUCE_HEADS=32, num_warps=4, num_stages=1),
    },
    supports=unsupported,
    workspace=part_buffers,
    key=("B", "N", "Hq", "Hkv", "D", "Dv", "S"),
    sum_order=all_but_stages,
    deterministic=True,
    batch_invariant=True,
)
