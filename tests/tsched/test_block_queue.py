from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tsched.block_pool import BlockPool
from tsched.policies.block_queue import BlockQueue, eviction_batch

NUM_BLOCKS = 6


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(
        st.one_of(st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=NUM_BLOCKS), st.integers(1, 4)),
        max_size=60,
    )
)
def test_blocks_come_out_in_the_order_of_their_last_coming_in(moves: list[list[int] | int]) -> None:
    queue, expected = BlockQueue(NUM_BLOCKS), OrderedDict[int, None]()
    for move in moves:
        if isinstance(move, list):
            queue.append(np.array(move, dtype=np.int32))
            for block in move:
                expected[block] = None
                expected.move_to_end(block)
            continue
        taken = queue.pop(move).tolist()
        assert len(taken) <= move
        assert bool(taken) == bool(expected)
        assert taken == [expected.popitem(last=False)[0] for _ in taken]
    while taken := queue.pop(NUM_BLOCKS).tolist():
        assert taken == [expected.popitem(last=False)[0] for _ in taken]
    assert not expected


@pytest.mark.parametrize(("num_blocks", "batch"), [(1, 1), (511, 1), (512, 2), (12_288, 48), (10**6, 64)])
def test_few_blocks_are_evicted_ahead_of_need(num_blocks: int, batch: int) -> None:
    assert eviction_batch(BlockPool(num_blocks, 16)) == batch
