"""packed_gqa with its tiles of keys and values copied by tensor descriptors (TMA), a page or a part of one at a time.

One thread asks for a whole tile and the copy engine writes it into shared memory, swizzled as the matrix units want it:
no lane computes addresses, and no register holds them. A box of a descriptor cannot be gathered from several pages
(sm_100 alone gathers, and only rows of matrices), so a tile ends where its page does. Wins on sm_90 and newer where
pages have 64 tokens or more; smaller pages make tiles too narrow to keep the matrix units busy.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tkernels import Axes, Config, DeviceFacts, Run, Variant
from tkernels.device import is_from_sm_90
from tkernels.ops.paged_prefill import packed_gqa
from tkernels.ops.paged_prefill.packed_gqa import (
    order_of_query_tile,
    paged_prefill_packed_gqa_attend,
    paged_prefill_packed_gqa_key_range,
    paged_prefill_packed_gqa_sequence,
    paged_prefill_packed_gqa_store,
    prefill_arguments,
    tile_sizes,
)

CONFIGS = tuple(
    Config(BLOCK_M=rows, BLOCK_N=keys, num_warps=warps, num_stages=stages)
    for rows, keys, warps, stages in (
        (64, 32, 4, 3),
        (64, 64, 4, 3),
        (64, 64, 4, 5),
        (128, 32, 8, 3),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 5),
        (128, 128, 8, 3),
        (128, 128, 8, 5),
    )
)


@triton.jit
def paged_prefill_tensor_descriptor_sweep(
    acc, m, l, q, own, begin, end, length, k_pages, v_pages, table_ptr, kv_head, scale_log2,  # noqa: E741
    cap_log2, window, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """Attends to the blocks of keys in begin .. end-1; all of them lie within the context unless MASKED.

    SPECIALIZED: some warps copy, some multiply, the others compute the softmax.
    """
    for start in tl.range(begin, end, BLOCK_N, warp_specialize=SPECIALIZED):
        # A block begins within the context and ends with its page, of which somebody sees a key: no table entry past
        # the context, or wholly before the window, is read.
        page = tl.load(table_ptr + start // PAGE_SIZE)
        keys = start + tl.arange(0, BLOCK_N)
        k = k_pages.load([page, start % PAGE_SIZE, kv_head, 0]).reshape([BLOCK_N, q.shape[1]])
        v = v_pages.load([page, start % PAGE_SIZE, kv_head, 0]).reshape([BLOCK_N, acc.shape[1]])
        if MASKED:  # what a page holds past the context may be NaN, which no weight of 0 removes
            v = tl.where((keys < length)[:, None], v.to(q.dtype), 0.0)
        acc, m, l = paged_prefill_packed_gqa_attend(  # noqa: E741
            acc, m, l, q, k, v, keys, own, length, scale_log2, cap_log2, window, CAUSAL, MASKED
        )
    return acc, m, l


@triton.jit(do_not_specialize=["sequences"])
def paged_prefill_tensor_descriptor(
    out_ptr, lse_ptr, q_ptr, k_pages, v_pages, tables_ptr, starts_ptr, lens_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr,
    scale_log2, cap_log2, window, sequences, stride_out_t, stride_out_h, stride_lse_t, stride_q_t, stride_q_h,
    stride_table_b,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    # Last tiles first: they have the most keys to sweep, and short work at the end leaves no multiprocessor waiting.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
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
        offs_d = tl.arange(0, BLOCK_D)
        q_rows = q_ptr + tokens * stride_q_t + heads * stride_q_h
        q = tl.load(q_rows[:, None] + offs_d[None, :], mask=mask_m[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
        if k_scale_ptr is not None:
            scale_log2 = scale_log2 * tl.load(k_scale_ptr + kv_head)
        table_ptr = tables_ptr + sequence * stride_table_b
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        if window is not None:
            acc, m, l = paged_prefill_tensor_descriptor_sweep(  # noqa: E741
                acc, m, l, q, own, begin, full_begin, length, k_pages, v_pages, table_ptr, kv_head, scale_log2,
                cap_log2, window, PAGE_SIZE, BLOCK_N, CAUSAL, True, False,
            )  # fmt: skip
        acc, m, l = paged_prefill_tensor_descriptor_sweep(  # noqa: E741
            acc, m, l, q, own, full_begin, full_end, length, k_pages, v_pages, table_ptr, kv_head, scale_log2,
            cap_log2, window, PAGE_SIZE, BLOCK_N, CAUSAL, False, False,
        )  # fmt: skip
        acc, m, l = paged_prefill_tensor_descriptor_sweep(  # noqa: E741
            acc, m, l, q, own, tl.maximum(full_begin, full_end), end, length, k_pages, v_pages, table_ptr, kv_head,
            scale_log2, cap_log2, window, PAGE_SIZE, BLOCK_N, CAUSAL, True, False,
        )  # fmt: skip
        paged_prefill_packed_gqa_store(
            out_ptr, lse_ptr, v_scale_ptr, sinks_ptr, acc, m, l, tokens, heads, mask_m, kv_head,
            stride_out_t, stride_out_h, stride_lse_t, HEAD_DIM_V,
        )  # fmt: skip


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
    if k_cache.element_size() == 1:
        block_n = min(block_n, 64)  # e4m3 widens in registers, of which 128 keys would spill 60 bytes on sm_90
    block_n = min(block_n, v_cache.shape[1])
    grid, arguments = prefill_arguments(
        out, lse, q, v_cache, block_tables, cu_seqlens_q, context_lens, scale, window, k_scale, v_scale, soft_cap,
        sinks, causal, block_m, block_n,
    )  # fmt: skip
    # What a box has beyond a head's size is outside the descriptor's shape, and comes as zeros.
    run.launch(
        paged_prefill_tensor_descriptor,
        grid,
        **arguments,
        k_pages=TensorDescriptor.from_tensor(k_cache, [1, block_n, 1, arguments["BLOCK_D"]]),
        v_pages=TensorDescriptor.from_tensor(v_cache, [1, block_n, 1, arguments["BLOCK_DV"]]),
    )


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    if device.arch != "interpreter" and not is_from_sm_90(device.arch):
        return f"tensor descriptors are copied by hardware from sm_90 on; this is {device.arch}"
    if int(axes["S"]) < 16:
        return f"a tile of keys is a page at most, and matrix products take 16 keys at least; pages have {axes['S']}"
    for name in ("k_cache", "v_cache"):
        if not axes.get(f"{name}_aligned", True):
            return f"a tensor descriptor needs {name}'s address and strides to be multiples of 16 bytes"
    return packed_gqa.supports(axes, device)


VARIANT = Variant(
    wins="prefill on sm_90 and newer, pages of 64 tokens and more",
    launch=launch,
    supports=supports,
    configs=CONFIGS,
    limits={"BLOCK_M": (16, 256), "BLOCK_N": (16, 256)},  # a box has at most 256 elements along a dim
    default={
        "": Config(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2),
        # Pages of 128 tokens and more get 128 keys: 509 instructions to them on sm_90 and 248 registers, where 64 keys
        # take 365 and 190. Smaller pages are the tile.
        "sm_90": Config(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=3),
        "sm_100": Config(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2),  # with 3, e4m3 spills 16 bytes
        "interpreter": Config(BLOCK_M=32, BLOCK_N=16, num_warps=4, num_stages=1),
    },
    key=("T", "Hq", "Hkv", "D", "Dv", "S"),
    sum_order=order_of_query_tile,
    deterministic=True,
    batch_invariant=True,
)
