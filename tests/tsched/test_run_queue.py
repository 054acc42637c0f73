"""Eviction from the ends of the least recently used runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tsched.scheduling.block_pool import BlockIds, BlockPool
from tsched.scheduling.policies.run_queue import RunQueue, eviction_batch


@dataclass(eq=False)
class Leaf:
    blocks: BlockIds
    parent: Leaf | None = None


def trim(leaf: Leaf, count: int) -> None:
    leaf.blocks = leaf.blocks[:-count]


def test_the_least_recently_used_goes_first_from_its_end_and_children_before_parents() -> None:
    pool = BlockPool(8, 16)
    trunk = Leaf(pool.allocate(2))
    branches = [Leaf(pool.allocate(3), trunk) for _ in range(2)]
    everything = np.arange(8, dtype=np.int32)
    pool.keep(everything)
    queue = RunQueue(pool, trim)
    pool.release(everything)
    for branch in (*branches, branches[0]):
        queue.touch(branch)
    order = []
    for _ in range(8):
        queue.make_room(pool.num_free + 1)
        order += pool.allocate(pool.num_free).tolist()
        assert queue.num_evictions == len(order)
    assert order == [7, 6, 5, 4, 3, 2, 1, 0]
    assert len(queue) == 0
    with pytest.raises(RuntimeError, match="1 blocks asked for over the 0 free ones, 0 are cached"):
        queue.make_room(1)


def test_blocks_in_use_stay_and_their_run_comes_back_when_it_is_touched() -> None:
    pool = BlockPool(4, 16)
    first, second = Leaf(pool.allocate(2)), Leaf(pool.allocate(2))
    pool.keep(np.arange(4, dtype=np.int32))
    queue = RunQueue(pool, trim)
    for leaf in (first, second):
        pool.release(leaf.blocks)
        queue.touch(leaf)
    used = first.blocks.copy()
    pool.share(used)
    queue.make_room(2)
    assert (first.blocks.size, second.blocks.size) == (2, 0)
    pool.release(used)
    queue.touch(first)
    queue.make_room(4)
    assert first.blocks.size == 0


@pytest.mark.parametrize(("num_blocks", "batch"), [(1, 1), (511, 1), (512, 2), (12_288, 48), (10**6, 256)])
def test_few_blocks_are_evicted_ahead_of_need(num_blocks: int, batch: int) -> None:
    assert eviction_batch(BlockPool(num_blocks, 16)) == batch
