"""What sort_by_expert's kernels do with a block of pairs, and how they cut the experts' pairs into tiles.

A bin is a pair's expert, or num_experts for a pair that nobody computes. Tensors over experts have BLOCK_E entries,
more than there are experts, and zeros in those beyond: the last bin counts as no expert.
"""

import triton
import triton.language as tl


def experts_tile(num_experts: int) -> int:
    """BLOCK_E: a power of two with room for the last bin too."""
    return triton.next_power_of_2(num_experts + 1)


@triton.jit
def load_bins(experts_ptr, stride_experts_t, offs, pairs, num_experts, TOP_K: tl.constexpr):
    """The bins of pairs `offs`; of those from `pairs` on, too, the last one."""
    places = (offs // TOP_K).to(tl.int64) * stride_experts_t + offs % TOP_K  # T * stride can pass 2**31
    experts = tl.load(experts_ptr + places, mask=offs < pairs, other=-1)
    return tl.where(experts < 0, num_experts, experts)


@triton.jit
def count_bins(bins, num_experts, BLOCK_E: tl.constexpr):
    """int32 [BLOCK_E], how many of the pairs each expert has."""
    return tl.where(tl.arange(0, BLOCK_E) < num_experts, tl.histogram(bins, BLOCK_E), 0)


@triton.jit
def rank_bins(bins, BLOCK: tl.constexpr):
    """int32 [BLOCK], how many pairs before each are in its bin."""
    offs = tl.arange(0, BLOCK)
    is_before = (bins[None, :] == bins[:, None]) & (offs[None, :] < offs[:, None])
    return tl.sum(is_before.to(tl.int32), axis=1)


@triton.jit
def sum_before(counts):
    """What lies before each entry, summed up."""
    return tl.cumsum(counts, axis=0) - counts


@triton.jit
def store_pairs(order_ptr, places, offs, bins, pairs, kept, num_experts):
    """Stores the pairs `offs` at their places in the order, and -1 behind the `kept` ones."""
    tl.store(order_ptr + places, offs, mask=bins < num_experts)
    tl.store(order_ptr + offs, -1, mask=(offs >= kept) & (offs < pairs))


@triton.jit
def store_tiles(
    tile_expert_ptr, tile_start_ptr, counts, starts, first, num_tiles, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """Stores the tiles `first` to `first + BLOCK` of an order in which each expert has `counts` pairs from `starts` on.

    A tile's expert is the number of experts whose tiles end at it or before.
    """
    tiles = counts // TILE + (counts % TILE > 0).to(tl.int32)  # [BLOCK_E]
    ends = tl.cumsum(tiles, axis=0)
    behind = tl.maximum(ends - first, 0)  # from this block's first tile
    experts = tl.cumsum(tl.histogram(behind, BLOCK, mask=behind < BLOCK), axis=0)  # [BLOCK]
    places = first + tl.arange(0, BLOCK)
    is_tile = places < tl.sum(tiles, axis=0)
    of = tl.where(is_tile, experts, 0)
    begins = tl.gather(starts, of, 0) + (places - tl.gather(ends - tiles, of, 0)) * TILE
    inside = places < num_tiles
    tl.store(tile_expert_ptr + places, tl.where(is_tile, experts, -1), mask=inside)
    tl.store(tile_start_ptr + places, tl.where(is_tile, begins, -1), mask=inside)
