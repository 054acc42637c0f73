"""Runs of cached blocks in the order of their last use, from whose ends blocks are evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar

import numpy as np

from tsched.scheduling.block_pool import BlockIds, BlockPool

_MOST_AT_A_TIME = 256


class Run(Protocol):
    """Blocks that follow each other in one history from its place `first` on, and the run before them; a root has none
    of either.
    """

    first: int
    blocks: BlockIds

    @property
    def parent(self) -> Self | None: ...


AnyRun = TypeVar("AnyRun", bound=Run)


def eviction_batch(pool: BlockPool) -> int:
    """The blocks to evict when one is needed: the fixed cost of a few array calls is shared, and what is lost is a
    moment of at most 1/256 of the pool.
    """
    return max(1, min(_MOST_AT_A_TIME, pool.num_blocks // 256))


class RunQueue(Generic[AnyRun]):
    """Every run with a cached block, the least recently used first, and runs whose last block is referenced again:
    these fall out when an eviction meets them, and are back at the block's release, so that a hit costs nothing here.

    Whoever refers to a kept block refers to all before it, and a run is used whenever one after it is: the order has
    children before their parents, so the least recently used run is always a leaf.
    """

    def __init__(self, pool: BlockPool, trim: Callable[[AnyRun, int], None]) -> None:
        """`trim(leaf, count)` takes the last `count` blocks from a leaf, and the leaf, when none is left, away."""
        self._pool = pool
        self._trim = trim
        self._unused: OrderedDict[AnyRun, None] = OrderedDict()
        self._batch = eviction_batch(pool)
        self.num_evictions = 0  # blocks

    def __len__(self) -> int:
        return len(self._unused)

    def touch(self, run: AnyRun) -> None:
        """The last blocks of `run` that are in use no more were used until now, and so was all before them."""
        unused, above = self._unused, run
        while above.blocks.size:
            unused[above] = None
            unused.move_to_end(above)
            if above.parent is None:
                break
            above = above.parent

    def make_room(self, count: int) -> None:
        """Let `count` blocks of the pool be free; RuntimeError, and nothing changes, where fewer are free or cached."""
        missing = count - self._pool.num_free
        if missing > 0:
            self._evict(max(missing, min(missing + self._batch - 1, self._pool.num_cached)))

    def _evict(self, count: int) -> None:
        pool, unused = self._pool, self._unused
        if count > pool.num_cached:
            raise RuntimeError(
                f"{count} blocks asked for over the {pool.num_free} free ones, {pool.num_cached} are cached"
            )
        self.num_evictions += count
        evicted = self._drop_unused(count)
        count -= sum(blocks.size for blocks in evicted)
        while count:
            if not unused:
                raise RuntimeError(f"{count} cached blocks are in no run that waits: the cache's accounts are wrong")
            run = next(iter(unused))
            end = run.blocks[-count:][::-1]
            is_used = pool.refs(end) > 0
            num_used = np.count_nonzero(is_used)
            if num_used:
                end = end[: is_used.argmax()]
            if end.size:
                self._trim(run, end.size)
                evicted.append(end)
                count -= end.size
            if num_used or run.blocks.size == 0:
                del unused[run]
        pool.forget(np.concatenate(evicted))

    def _drop_unused(self, count: int) -> list[BlockIds]:
        """The blocks, last ones first, of the runs that are first in the queue, as long as they are `count` at most;
        these runs are gone. None where one of them is in use.
        """
        runs: list[AnyRun] = []
        for run in self._unused:
            count -= run.blocks.size
            if count < 0:
                break
            runs.append(run)
        blocks = [run.blocks[::-1] for run in runs]
        if not runs or np.count_nonzero(self._pool.refs(np.concatenate(blocks))):
            return []
        for run in runs:
            self._trim(run, run.blocks.size)
            del self._unused[run]
        return blocks
