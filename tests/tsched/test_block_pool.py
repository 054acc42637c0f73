from __future__ import annotations

import numpy as np
import pytest

from tsched.block_pool import BlockPool


def test_blocks_are_lent_once() -> None:
    pool = BlockPool(5, 16)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted([*first, *second]) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)
    with pytest.raises(RuntimeError, match="1 blocks asked for, 0 of 5 are free"):
        pool.allocate(1)
    pool.free(first)
    assert sorted(pool.allocate(2)) == sorted(first)


@pytest.mark.parametrize("wrong", [[3], [0, 0], [0, 3]])
def test_a_block_that_is_not_lent_cannot_be_given_back(wrong: list[int]) -> None:
    pool = BlockPool(5, 16)
    lent = pool.allocate(1)
    assert lent.tolist() == [0]
    with pytest.raises(RuntimeError, match="cannot be given back"):
        pool.free(np.array(wrong, dtype=np.int32))
    assert pool.num_used == 1
    pool.free(lent)
    with pytest.raises(RuntimeError, match="cannot be given back"):
        pool.free(lent)
    assert pool.num_used == 0


def test_a_caller_may_keep_its_blocks() -> None:
    pool = BlockPool(4, 1)
    first, second = pool.allocate(1), pool.allocate(1)
    kept = second.copy()
    pool.free(first)
    assert (second == kept).all()


def test_sizes() -> None:
    assert [BlockPool(1, 16).blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    for sizes in ((0, 16), (4, 0)):
        with pytest.raises(ValueError, match="num_blocks >= 1 and block_size >= 1"):
            BlockPool(*sizes)
