"""One program for each block of pairs counts its experts; then one for each expert sums up what blocks before have.

With these sums each block knows the places of its pairs, without an atomic operation. Wins where the pairs are more
than a few blocks.
"""

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.ops.sort_by_expert._pairs import (
    count_bins,
    experts_tile,
    load_bins,
    rank_bins,
    store_pairs,
    store_tiles,
    sum_before,
)

CONFIGS = tuple(
    Config(BLOCK=block, BLOCK_SUM=sums, num_warps=warps)
    for block, warps in ((64, 2), (64, 4), (128, 4), (128, 8), (256, 8), (256, 16))
    for sums in (512, 2048)
)


@triton.jit(do_not_specialize=["stride_counts_e", "pairs"])
def sort_by_expert_histogram_count(
    counts_ptr, experts_ptr, stride_counts_e, stride_experts_t, pairs, num_experts,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    offs = block * BLOCK + tl.arange(0, BLOCK)
    bins = load_bins(experts_ptr, stride_experts_t, offs, pairs, num_experts, TOP_K)
    ids = tl.arange(0, BLOCK_E)
    # Expert by expert, so that the sums read side by side. E * stride can pass 2**31.
    count_ptrs = counts_ptr + ids.to(tl.int64) * stride_counts_e + block
    tl.store(count_ptrs, count_bins(bins, num_experts, BLOCK_E), mask=ids < num_experts)


@triton.jit(do_not_specialize=["stride_counts_e", "blocks"])
def sort_by_expert_histogram_sum(counts_ptr, totals_ptr, stride_counts_e, blocks, BLOCK_SUM: tl.constexpr):
    """Puts in the place of each block's count what the blocks before it have."""
    expert = tl.program_id(0)
    counts_ptr += expert.to(tl.int64) * stride_counts_e
    total = tl.zeros((), tl.int32)
    for first in range(0, blocks, BLOCK_SUM):
        offs = first + tl.arange(0, BLOCK_SUM)
        counts = tl.load(counts_ptr + offs, mask=offs < blocks, other=0)
        tl.store(counts_ptr + offs, total + sum_before(counts), mask=offs < blocks)
        total += tl.sum(counts, axis=0)
    tl.store(totals_ptr + expert, total)


@triton.jit(do_not_specialize=["stride_counts_e", "pairs", "blocks", "num_tiles"])
def sort_by_expert_histogram_place(
    order_ptr, starts_ptr, tile_expert_ptr, tile_start_ptr, experts_ptr, counts_ptr, totals_ptr,
    stride_experts_t, stride_counts_e, pairs, num_experts, blocks, num_tiles,
    TOP_K: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A program for each block of pairs, then one for each block of tiles; the first of these stores the starts."""
    ids = tl.arange(0, BLOCK_E)
    totals = tl.load(totals_ptr + ids, mask=ids < num_experts, other=0)
    starts = sum_before(totals)
    block = tl.program_id(0)
    if block < blocks:
        offs = block * BLOCK + tl.arange(0, BLOCK)
        bins = load_bins(experts_ptr, stride_experts_t, offs, pairs, num_experts, TOP_K)
        before = tl.load(counts_ptr + bins.to(tl.int64) * stride_counts_e + block, mask=bins < num_experts, other=0)
        places = tl.gather(starts, bins, 0) + before + rank_bins(bins, BLOCK)
        store_pairs(order_ptr, places, offs, bins, pairs, tl.sum(totals, axis=0), num_experts)
    else:
        first = (block - blocks) * BLOCK
        if first == 0:
            tl.store(starts_ptr + ids, starts, mask=ids <= num_experts)
        store_tiles(tile_expert_ptr, tile_start_ptr, totals, starts, first, num_tiles, TILE, BLOCK)


def launch(
    run: Run,
    order: torch.Tensor,
    starts: torch.Tensor,
    tile_expert: torch.Tensor,
    tile_start: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    tile: int,
) -> None:
    pairs, num_tiles, block = order.shape[0], tile_expert.shape[0], run.config["BLOCK"]
    blocks = triton.cdiv(pairs, block)
    counts, totals = run.workspace["counts"], run.workspace["totals"]
    sizes = {"pairs": pairs, "num_experts": num_experts}
    shape = {"TOP_K": experts.shape[1], "BLOCK": block, "BLOCK_E": experts_tile(num_experts)}
    run.launch(
        sort_by_expert_histogram_count, (blocks,), **pointers("counts[e] experts[t]", counts, experts), **sizes, **shape
    )
    run.launch(
        sort_by_expert_histogram_sum,
        (num_experts,),
        **pointers("counts[e] totals", counts, totals),
        blocks=blocks,
        BLOCK_SUM=run.config["BLOCK_SUM"],
    )
    run.launch(
        sort_by_expert_histogram_place,
        (blocks + max(1, triton.cdiv(num_tiles, block)),),
        **pointers("order starts tile_expert tile_start", order, starts, tile_expert, tile_start),
        **pointers("experts[t] counts[e] totals", experts, counts, totals),
        blocks=blocks,
        num_tiles=num_tiles,
        TILE=tile,
        **sizes,
        **shape,
    )


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> dict[str, Buffer]:
    experts, blocks = int(axes["E"]), triton.cdiv(int(axes["T"]) * int(axes["K"]), config["BLOCK"])
    return {"counts": Buffer((experts, blocks), torch.int32), "totals": Buffer((experts,), torch.int32)}


VARIANT = Variant(
    wins="more than a few blocks of pairs, as prompts have",
    launch=launch,
    configs=CONFIGS,
    workspace=workspace,
    # Blocks as one_program's. 512 sums are what 65,536 pairs have: 8,192 tokens of 8 choices.
    default={
        "": Config(BLOCK=128, BLOCK_SUM=512, num_warps=8),
        "gfx942": Config(BLOCK=128, BLOCK_SUM=512, num_warps=4),
        "interpreter": Config(BLOCK=16, BLOCK_SUM=4),
    },
    key=("E", "K", "tile"),
    deterministic=True,
    batch_invariant=False,  # a pair's place follows from all pairs: of many, no few programs say it, as the tests ask
)
