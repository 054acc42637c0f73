"""One program per sequence and KV head reads that head's keys and values once, for all the query heads that share it.

The query heads of a group are the columns of one tile (padded to the 8 that a matrix instruction has), so the cache is
read once whatever the ratio of query to KV heads, and the softmax runs online over blocks of keys (Milakov and
Gimelshein, 2018). Wins where sequences x KV heads fill the device by themselves; a few long sequences leave it idle.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.language import wait_for_earlier_launches
from tkernels.ops.paged_decode._attend import (
    all_but_stages,
    attend_keys,
    heads_of_tile,
    part_arguments,
    result_arguments,
    store_attention,
    unsupported,
)
from tkernels.ops.softmax import scale_arguments

# Page ids are loaded a stage before the keys that wait for them, so two stages more are one block of keys more in
# flight: for sm_90 at D 128, 64 keys take 36 KB of shared memory with 3 or 4 stages, 70 KB with 5 or 6, 103 KB with 7.
CONFIGS = (
    *(
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
    ),
    Config(BLOCK_N=64, num_warps=4, num_stages=5, launch_pdl=1),
)


@triton.jit
def paged_decode_one_pass(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr,
    scale_log2, cap_log2, window,
    stride_out_b, stride_out_h, stride_lse_b, stride_q_b, stride_q_h, stride_k_p, stride_k_s, stride_k_h,
    stride_v_p, stride_v_s, stride_v_h, stride_table_b,
    GROUP: tl.constexpr, TILES: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    kv_head, heads, mask_g = heads_of_tile(tl.program_id(1), GROUP, TILES, BLOCK_H)
    wait_for_earlier_launches()
    length = tl.load(lens_ptr + sequence)
    first = 0
    if window is not None:
        first = tl.maximum(length - window, 0)
    acc, m, l = attend_keys(  # noqa: E741
        q_ptr, k_ptr, v_ptr, tables_ptr, k_scale_ptr, scale_log2, cap_log2,
        sequence, kv_head, heads, mask_g, first // BLOCK_N * BLOCK_N, first, length,
        stride_q_b, stride_q_h, stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h, stride_table_b,
        HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, PAGE_SIZE, BLOCK_N,
    )  # fmt: skip
    store_attention(
        out_ptr, lse_ptr, v_scale_ptr, sinks_ptr, acc, m, l, sequence, heads, mask_g,
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
    grid = (q.shape[0], k_cache.shape[2] * part["TILES"])
    run.launch(paged_decode_one_pass, grid, **part, **result_arguments(out, lse, v_scale), sinks_ptr=sinks)


VARIANT = Variant(
    wins="sequences x KV heads alone fill the device (at 8 KV heads, some 32 sequences)",
    launch=launch,
    configs=CONFIGS,
    supports=unsupported,
    limits={"BLOCK_N": (16, 256)},  # a tensor core's tile has 16 keys at least
    default={
        "": Config(BLOCK_N=32, num_warps=4, num_stages=4),  # five programs to 100 KB of shared memory, two over e4m3
        "sm_80": Config(BLOCK_N=64, num_warps=4, num_stages=5),
        "sm_90": Config(BLOCK_N=64, num_warps=4, num_stages=5),
        # A stage less: over an e4m3 cache, 5 spill 4 bytes; and four programs fit.
        "sm_100": Config(BLOCK_N=64, num_warps=4, num_stages=4),
        "gfx942": Config(BLOCK_N=32, num_warps=4, num_stages=2),
        "interpreter": Config(BLOCK_N=32, num_warps=4, num_stages=1),
    },
    key=("B", "N", "Hq", "Hkv", "D", "Dv", "S"),
    sum_order=all_but_stages,
    deterministic=True,
    batch_invariant=True,
)
