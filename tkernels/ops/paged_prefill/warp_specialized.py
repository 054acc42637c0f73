"""tensor_descriptor with the warps of a program told apart: some ask for keys and values, some for products, and those
of the softmax compute meanwhile, in place of all of them doing one after the other.

Blocks that every row sees are swept so, after the edges. Wins on sm_100 where contexts are long and pages have 64
tokens or more. It takes no soft cap, whose tangents spill 188 bytes of the 96 registers that the softmax's warps have.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tkernels import Axes, Config, DeviceFacts, Run, Variant
from tkernels.ops.paged_prefill import tensor_descriptor
from tkernels.ops.paged_prefill.packed_gqa import (
    order_of_query_tile,
    paged_prefill_packed_gqa_key_range,
    paged_prefill_packed_gqa_sequence,
    paged_prefill_packed_gqa_store,
    prefill_arguments,
    tile_sizes,
)
from tkernels.ops.paged_prefill.tensor_descriptor import paged_prefill_tensor_descriptor_sweep

# The softmax's warps come on top of 12 others, and all have as many registers until the loop begins: of 640 threads 96.
CONFIGS = tuple(
    Config(BLOCK_M=rows, BLOCK_N=keys, num_warps=warps, num_stages=stages)
    for rows, keys, warps, stages in (
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (128, 32, 8, 2),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
    )
)

_SPECIALIZED = ("sm_100", "interpreter")
"""Architectures whose warps are told apart. For sm_90 Triton 3.7.1 takes queries only from a descriptor that the kernel
makes itself, for which each launch would need memory: of loaded ones NVGPUWarpSpecialization ends with "unsupported
load type for producer commit", of a descriptor that is passed with "descriptor block and tensor must have the same
number of elements", as it gives each of two warp groups half of a box. With the edges' loop it ends of both."""


@triton.jit(do_not_specialize=["sequences"])
def paged_prefill_warp_specialized(
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
        # The edges first: after a loop whose warps are told apart Triton 3.7.1 ends in TritonGPUHoistTMEMAlloc over one
        # whose values are masked.
        if window is not None:
            acc, m, l = paged_prefill_tensor_descriptor_sweep(  # noqa: E741
                acc, m, l, q, own, begin, full_begin, length, k_pages, v_pages, table_ptr, kv_head, scale_log2,
                cap_log2, window, PAGE_SIZE, BLOCK_N, CAUSAL, True, False,
            )  # fmt: skip
        acc, m, l = paged_prefill_tensor_descriptor_sweep(  # noqa: E741
            acc, m, l, q, own, tl.maximum(full_begin, full_end), end, length, k_pages, v_pages, table_ptr, kv_head,
            scale_log2, cap_log2, window, PAGE_SIZE, BLOCK_N, CAUSAL, True, False,
        )  # fmt: skip
        acc, m, l = paged_prefill_tensor_descriptor_sweep(  # noqa: E741
            acc, m, l, q, own, full_begin, full_end, length, k_pages, v_pages, table_ptr, kv_head, scale_log2,
            cap_log2, window, PAGE_SIZE, BLOCK_N, CAUSAL, False, True,
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
    sinks: torch.Tensor | None,
    return_lse: bool,
    causal: bool,
) -> None:
    if context_lens.shape[0] == 0:
        return  # every row is padding
    block_m, block_n = tile_sizes(run.config, max(q.shape[2], v_cache.shape[3]), q.element_size())
    block_n = min(block_n, v_cache.shape[1])
    grid, arguments = prefill_arguments(
        out, lse, q, v_cache, block_tables, cu_seqlens_q, context_lens, scale, window, k_scale, v_scale, None,
        sinks, causal, block_m, block_n,
    )  # fmt: skip
    run.launch(
        paged_prefill_warp_specialized,
        grid,
        **arguments,
        k_pages=TensorDescriptor.from_tensor(k_cache, [1, block_n, 1, arguments["BLOCK_D"]]),
        v_pages=TensorDescriptor.from_tensor(v_cache, [1, block_n, 1, arguments["BLOCK_DV"]]),
    )


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    if device.arch not in _SPECIALIZED:
        return f"warps are told apart on sm_100; this is {device.arch}"
    if axes["kv"] == "float8_e4m3fn":
        return "Triton 3.7.1 does not compile e4m3 that is widened between a copy and a product, each of other warps"
    return tensor_descriptor.supports(axes, device)


VARIANT = Variant(
    wins="long prefill on sm_100, pages of 64 tokens and more",
    launch=launch,
    supports=supports,
    configs=CONFIGS,
    limits={"BLOCK_M": (16, 256), "BLOCK_N": (16, 256)},  # a box has at most 256 elements along a dim
    default={
        "": Config(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2),  # with 3 stages 48 bytes are spilled
        "interpreter": Config(BLOCK_M=32, BLOCK_N=16, num_warps=4, num_stages=1),
    },
    key=("T", "Hq", "Hkv", "D", "Dv", "S"),
    sum_order=order_of_query_tile,
    deterministic=True,
    batch_invariant=True,
)
