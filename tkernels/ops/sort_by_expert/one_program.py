"""One program does everything: it counts each expert's pairs, ranks them block by block, and cuts them into tiles.

Wins where there are a few blocks of pairs: decoding steps. It is one launch, and what it counts stays in registers.
"""

import torch
import triton
import triton.language as tl

from tkernels import Axes, Config, DeviceFacts, Run, Variant
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

MOST_PAIRS = 4096

CONFIGS = tuple(
    Config(BLOCK=block, num_warps=warps, maxnreg=128)
    for block, warps in ((64, 2), (64, 4), (128, 4), (128, 8), (256, 8), (256, 16), (512, 16))
)


@triton.jit(do_not_specialize=["pairs", "num_tiles"])
def sort_by_expert_one_program(
    order_ptr, starts_ptr, tile_expert_ptr, tile_start_ptr, experts_ptr, stride_experts_t, pairs, num_experts,
    num_tiles, TOP_K: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, pairs, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        bins = load_bins(experts_ptr, stride_experts_t, offs, pairs, num_experts, TOP_K)
        counts += count_bins(bins, num_experts, BLOCK_E)
    starts = sum_before(counts)
    kept = tl.sum(counts, axis=0)
    places = starts
    for first in range(0, pairs, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        bins = load_bins(experts_ptr, stride_experts_t, offs, pairs, num_experts, TOP_K)
        mine = tl.gather(places, bins, 0) + rank_bins(bins, BLOCK)
        store_pairs(order_ptr, mine, offs, bins, pairs, kept, num_experts)
        places += count_bins(bins, num_experts, BLOCK_E)
    ids = tl.arange(0, BLOCK_E)
    tl.store(starts_ptr + ids, starts, mask=ids <= num_experts)
    for first in range(0, num_tiles, BLOCK):
        store_tiles(tile_expert_ptr, tile_start_ptr, counts, starts, first, num_tiles, TILE, BLOCK)


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
    run.launch(
        sort_by_expert_one_program,
        (1,),
        **pointers("order starts tile_expert tile_start", order, starts, tile_expert, tile_start),
        **pointers("experts[t]", experts),
        pairs=order.shape[0],
        num_experts=num_experts,
        num_tiles=tile_expert.shape[0],
        TOP_K=experts.shape[1],
        TILE=tile,
        BLOCK_E=experts_tile(num_experts),
        **run.config,
    )


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    pairs = int(axes["T"]) * int(axes["K"])
    if pairs <= MOST_PAIRS:
        return None
    return f"one program takes {MOST_PAIRS} pairs at most; this is T * K = {pairs}: histogram"


VARIANT = Variant(
    wins="a few blocks of pairs, as decoding steps have",
    region={"T": (0, 128)},
    launch=launch,
    configs=CONFIGS,
    supports=supports,
    # A block's pairs are compared with each other in registers: 32 comparisons a thread. Left alone, ptxas takes 96
    # registers on sm_100 and spills 12 bytes, for occupancy that one program has no use for. A block is 8 tokens' 8
    # choices.
    default={
        "": Config(BLOCK=64, num_warps=4, maxnreg=128),
        "gfx942": Config(BLOCK=64, num_warps=4),
        "interpreter": Config(BLOCK=16),
    },
    key=("E", "K", "tile"),
    deterministic=True,
    batch_invariant=True,
)
