"""Blocks in the order of their last use, and how many are evicted at a time."""

from __future__ import annotations

import numpy as np

from tsched.block_pool import BlockIds, BlockPool

_MOST_AT_A_TIME = 64


def eviction_batch(pool: BlockPool) -> int:
    """The blocks to evict when one is needed: the fixed cost of a few array calls is shared, and what is lost is a
    moment of at most 1/256 of the pool.
    """
    return max(1, min(_MOST_AT_A_TIME, pool.num_blocks // 256))


class BlockQueue:
    """A queue in which a block that comes again goes to the end.

    A call is a few array operations: a block's older entries stay where they are and are passed over, and the queue is
    packed when its room, twice the number of blocks, is used up. So an entry costs O(1), amortised.
    """

    def __init__(self, num_blocks: int) -> None:
        self._entries = np.empty(2 * num_blocks, dtype=np.int32)
        self._places = np.arange(2 * num_blocks, dtype=np.int64)
        self._place_of = np.full(num_blocks, -1, dtype=np.int64)  # each block's newest entry
        self._start = self._end = 0

    def append(self, blocks: BlockIds) -> None:
        """Put `blocks` [n], distinct, at the end, in this order."""
        if self._end + blocks.size > self._entries.size:
            self._pack()
        end = self._end + blocks.size
        self._entries[self._end : end] = blocks
        self._place_of[blocks.astype(np.intp)] = self._places[self._end : end]
        self._end = end

    def pop(self, count: int) -> BlockIds:
        """The first blocks, taken out: at most `count`, none only where the queue is empty."""
        while self._start < self._end:
            end = min(self._start + count, self._end)
            blocks = self._live(self._start, end)
            self._start = end
            if blocks.size:
                return blocks
        return self._entries[:0]

    def _live(self, start: int, end: int) -> BlockIds:
        entries = self._entries[start:end]
        return entries[self._place_of.take(entries) == self._places[start:end]]

    def _pack(self) -> None:
        live = self._live(self._start, self._end)
        self._start, self._end = 0, live.size
        self._entries[: live.size] = live
        self._place_of[live.astype(np.intp)] = self._places[: live.size]
