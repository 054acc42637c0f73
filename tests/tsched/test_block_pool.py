from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tsched.scheduling.block_pool import BlockIds, BlockPool


def ids(*blocks: int) -> BlockIds:
    return np.array(blocks, dtype=np.int32)


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_referenced


def test_blocks_are_lent_once() -> None:
    pool = BlockPool(5, 16)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted([*first, *second]) == [0, 1, 2, 3, 4]
    assert counts(pool) == (0, 0, 5)
    with pytest.raises(RuntimeError, match="1 blocks asked for, 0 of 5 are free"):
        pool.allocate(1)
    assert pool.release(first).size == 0
    assert sorted(pool.allocate(2)) == sorted(first)


def test_a_shared_block_is_free_when_the_last_reference_is_gone() -> None:
    pool = BlockPool(3, 16)
    block = pool.allocate(1)
    pool.share(block)
    assert pool.refs(block).tolist() == [2]
    assert pool.release(block).size == 0
    assert counts(pool) == (2, 0, 1)
    pool.release(block)
    assert counts(pool) == (3, 0, 0)


def test_a_kept_block_is_cached_when_the_last_reference_is_gone() -> None:
    pool = BlockPool(3, 16)
    blocks = pool.allocate(2)
    pool.keep(blocks[:1])
    assert pool.is_kept(blocks).tolist() == [True, False]
    assert pool.release(blocks).tolist() == blocks[:1].tolist()
    assert counts(pool) == (2, 1, 0)
    assert blocks[0] not in pool.allocate(2)
    pool.share(blocks[:1])
    assert counts(pool) == (0, 0, 3)
    pool.forget(blocks[:1])
    assert counts(pool) == (0, 0, 3), "whoever refers to it goes on"
    pool.release(blocks[:1])
    assert counts(pool) == (1, 0, 2)


def test_of_lists_released_at_once_each_has_its_own_cached_blocks() -> None:
    pool = BlockPool(4, 16)
    pool.allocate(4)
    pool.keep(ids(1))
    assert [one.tolist() for one in pool.release_each([ids(0, 1), ids(2)])] == [[1], []]
    assert counts(pool) == (2, 1, 1)


def test_a_forgotten_cached_block_is_free() -> None:
    pool = BlockPool(2, 16)
    block = pool.allocate(1)
    pool.keep(block)
    pool.release(block)
    pool.forget(block)
    assert counts(pool) == (2, 0, 0)


# Block 0 is referenced, 1 referenced and kept, 2 cached, 3 and 4 free.
MISUSES: list[tuple[Callable[[BlockPool], Callable[[BlockIds], object]], list[int], str]] = [
    (lambda pool: pool.release, [3], "released: nobody refers"),
    (lambda pool: pool.release, [0, 2], "released: nobody refers"),
    (lambda pool: pool.release, [0, 0], "released: one is named twice"),
    (lambda pool: pool.share, [3], "shared: one is free"),
    (lambda pool: pool.share, [2, 2], "shared: one is named twice"),
    (lambda pool: pool.keep, [3], "kept: nobody refers"),
    (lambda pool: pool.keep, [1], "kept already"),
    (lambda pool: pool.forget, [0], "forgotten: one is not kept"),
    (lambda pool: pool.forget, [2, 3], "forgotten: one is not kept"),
    (lambda pool: pool.release, [0, 5], "there are blocks 0 to 4"),
    (lambda pool: pool.release, [0, 1, 0, 1, 0, 1], "released: one is named twice"),
    (lambda pool: pool.release, [-5], "there are blocks 0 to 4"),
]


@pytest.mark.parametrize(("call", "blocks", "message"), MISUSES)
def test_misuse_is_an_error_and_changes_nothing(
    call: Callable[[BlockPool], Callable[[BlockIds], object]], blocks: list[int], message: str
) -> None:
    pool = BlockPool(5, 16)
    assert pool.allocate(3).tolist() == [0, 1, 2]
    pool.keep(ids(1, 2))
    pool.release(ids(2))
    everything = np.arange(5, dtype=np.int32)
    before = (counts(pool), pool.refs(everything).tolist(), pool.is_kept(everything).tolist())
    with pytest.raises(RuntimeError, match=message):
        call(pool)(ids(*blocks))
    assert (counts(pool), pool.refs(everything).tolist(), pool.is_kept(everything).tolist()) == before
    assert sorted(pool.allocate(2)) == [3, 4]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_the_pool_agrees_with_a_plain_one(data: st.DataObject) -> None:
    size = 7
    pool, refs, kept = BlockPool(size, 4), [0] * size, [False] * size
    for _ in range(30):
        calls = ["allocate", "share", "release", "release_each", "keep", "keep_unshared", "forget"]
        call = data.draw(st.sampled_from(calls))
        fits = {
            "allocate": [b for b in range(size) if not refs[b] and not kept[b]],
            "share": [b for b in range(size) if refs[b] or kept[b]],
            "release": [b for b in range(size) if refs[b]],
            "release_each": [b for b in range(size) if refs[b]],
            "keep": [b for b in range(size) if refs[b] and not kept[b]],
            "keep_unshared": [b for b in range(size) if refs[b] and not kept[b]],
            "forget": [b for b in range(size) if kept[b]],
        }[call]
        chosen = data.draw(st.lists(st.sampled_from(fits), unique=True)) if fits else []
        if call == "allocate":
            chosen = pool.allocate(len(chosen)).tolist()
            assert set(chosen) <= set(fits)
        elif call == "release_each":
            cut = data.draw(st.integers(0, len(chosen)))
            answer = np.concatenate(pool.release_each([ids(*chosen[:cut]), ids(*chosen[cut:])]))
        else:
            answer = getattr(pool, call)(ids(*chosen))
        if call == "keep_unshared":
            chosen = list(takewhile(lambda block: refs[block] == 1, chosen))
            assert answer.tolist() == chosen
        for block in chosen:
            refs[block] += {"allocate": 1, "share": 1, "release": -1, "release_each": -1}.get(call, 0)
            kept[block] = {"keep": True, "keep_unshared": True, "forget": False}.get(call, kept[block])
        if call in ("release", "release_each"):
            assert answer.tolist() == [b for b in chosen if not refs[b] and kept[b]]
        assert pool.refs(np.arange(size, dtype=np.int32)).tolist() == refs
        cached = sum(k and not r for r, k in zip(refs, kept, strict=True))
        referenced = sum(r > 0 for r in refs)
        assert counts(pool) == (size - cached - referenced, cached, referenced)


def test_a_caller_may_keep_its_blocks() -> None:
    pool = BlockPool(4, 1)
    first, second = pool.allocate(1), pool.allocate(1)
    kept = second.copy()
    pool.release(first)
    assert (second == kept).all()


def test_sizes() -> None:
    assert [BlockPool(1, 16).blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    for sizes in ((0, 16), (4, 0)):
        with pytest.raises(ValueError, match="num_blocks >= 1 and block_size >= 1"):
            BlockPool(*sizes)
