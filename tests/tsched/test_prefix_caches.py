"""hash and radix alone, with a pool whose contents the tests write down."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import asdict, astuple
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tsched.cache_contents import blocks_by_digest, cut_digests
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.block_pool import BlockIds, BlockPool
from tsched.scheduling.policies import PREFIX_CACHES
from tsched.scheduling.policies.base import CacheStats
from tsched.scheduling.policies.hash_prefix_cache import HashPrefixCache
from tsched.scheduling.policies.radix_prefix_cache import RadixPrefixCache
from tsched.scheduling.sequence import Sequence

Cache = HashPrefixCache | RadixPrefixCache
BLOCK = 4
NAMES = [name for name in PREFIX_CACHES if name != "none"]
both = pytest.mark.parametrize("name", NAMES)
numbers = count()


def make(name: str, num_blocks: int = 16, block_size: int = BLOCK) -> tuple[Cache, BlockPool]:
    pool = BlockPool(num_blocks, block_size)
    return PREFIX_CACHES[name](pool), pool  # type: ignore[return-value]


def sequence_of(cache: Cache, tokens: Items[int], salt: bytes = b"") -> Sequence:
    sequence = Sequence(next(numbers), tokens, SamplingParams(), 10**6, cache_salt=salt)
    cache.prepare(sequence)
    return sequence


def admit(cache: Cache, pool: BlockPool, sequence: Sequence) -> tuple[BlockIds, int]:
    """Blocks for all tokens of the sequence, as the scheduler takes them, and how many of them were hits."""
    hits = cache.match(sequence)
    return np.concatenate((hits, cache.allocate(pool.blocks_for(sequence.tokens.size) - hits.size))), hits.size


def serve(cache: Cache, pool: BlockPool, tokens: Items[int], salt: bytes = b"") -> BlockIds:
    """Compute `tokens` and leave; the sequence's blocks."""
    sequence = sequence_of(cache, tokens, salt)
    blocks = cache.insert(sequence, admit(cache, pool, sequence)[0], sequence.tokens.size)
    cache.release(sequence, blocks, sequence.tokens.size)
    return blocks


def num_hits(cache: Cache, tokens: Items[int], salt: bytes = b"") -> int:
    """Blocks that a sequence of `tokens` would find."""
    sequence = sequence_of(cache, tokens, salt)
    hits = cache.match(sequence)
    cache.release(sequence, hits, 0)
    return hits.size


PROMPT = list(range(100, 120))  # five blocks


@both
def test_bug_class_10_nothing_is_matchable_before_it_is_computed(name: str) -> None:
    cache, pool = make(name)
    sequence = sequence_of(cache, PROMPT)
    blocks, _ = admit(cache, pool, sequence)
    assert num_hits(cache, [*PROMPT, 1]) == 0, "scheduled, not computed"
    for num_computed, expected in ((3, 0), (4, 1), (11, 2), (20, 5)):
        blocks = cache.insert(sequence, blocks, num_computed)
        assert num_hits(cache, [*PROMPT, 1]) == expected
    cache.release(sequence, blocks, 20)
    unfinished = sequence_of(cache, [*range(8), 9])
    blocks, _ = admit(cache, pool, unfinished)
    cache.release(unfinished, blocks, 7)  # aborted in the middle of its second block
    assert num_hits(cache, [*range(8), 9]) == 1


@both
def test_bug_class_11_a_full_hit_leaves_the_last_token_to_run(name: str) -> None:
    cache, pool = make(name)
    serve(cache, pool, PROMPT)
    for size, expected in ((20, 4), (21, 5), (17, 4), (16, 3), (4, 0), (1, 0)):
        assert num_hits(cache, [*PROMPT, 1][:size]) == expected
    assert pool.num_referenced == 0


@both
def test_bug_class_12_what_was_looked_up_is_not_evicted_before_it_is_used(name: str) -> None:
    cache, pool = make(name, num_blocks=8)
    serve(cache, pool, PROMPT)
    sequence = sequence_of(cache, PROMPT)
    hits = cache.match(sequence)
    assert (hits.size, cache.num_available) == (4, 4)
    rest = cache.allocate(cache.num_available)
    assert not set(rest.tolist()) & set(hits.tolist())
    with pytest.raises(RuntimeError, match="1 blocks asked for"):
        cache.allocate(1)
    assert (pool.refs(hits) == 1).all()
    cache.release(sequence, hits, 0)
    assert set(cache.allocate(4).tolist()) == set(hits.tolist()), "given up, they can be evicted"


@both
def test_bug_class_12_a_sequence_that_leaves_at_any_point_leaves_no_block_behind(name: str) -> None:
    cache, pool = make(name)
    for num_computed in range(len(PROMPT) + 1):
        sequence = sequence_of(cache, PROMPT)
        blocks, hits = admit(cache, pool, sequence)
        cache.release(sequence, blocks, max(num_computed, hits * BLOCK))
        assert pool.num_referenced == 0
        assert cache.num_available == pool.num_blocks
    assert pool.num_cached == 5, "the same tokens are kept once"
    cache.release(sequence, cache.allocate(pool.num_blocks), 0)
    assert pool.num_free == pool.num_blocks
    assert num_hits(cache, PROMPT) == 0


@both
def test_bug_class_15_another_salt_never_hits(name: str) -> None:
    cache, pool = make(name, num_blocks=40)
    salts = [b"", b"a", b"b", b"ab", b"\0", b"a\0", bytes(64), bytes(65)]
    blocks = [set(serve(cache, pool, PROMPT, salt).tolist()) for salt in salts[:4]]
    assert sum(map(len, blocks)) == len(set.union(*blocks)) == 20
    for salt in salts:
        assert num_hits(cache, PROMPT, salt) == (4 if salt in salts[:4] else 0)


# Equal under Python's hash (CVE-2025-25183), under wrapping to 32 bits, and joined or swapped at the edges of blocks.
ADVERSARIAL = [
    [1, 2, 3, 4, 5, 6, 7, 8],
    [5, 6, 7, 8, 1, 2, 3, 4],
    [1, 2, 3, 4, 1, 2, 3, 4],
    [1, 2, 3, 4, 5, 6, 8, 7],
    [5, 6, 7, 8, 5, 6, 7, 8],
    [0, 1, 2, 3, 4, 5, 6, 7],
    [1, 2, 3, 4, 5 + 2**32, 6, 7, 8],
    [1, 2, 3, 4, 5 + 2**61 - 1, 6, 7, 8],
    [-1, 2, 3, 4, 5, 6, 7, 8],
    [-2, 2, 3, 4, 5, 6, 7, 8],
    [12, 3, 4, 5, 6, 7, 8, 9],
    [1, 23, 4, 5, 6, 7, 8, 9],
]


@both
def test_bug_class_15_only_equal_tokens_hit(name: str) -> None:
    cache, pool = make(name, num_blocks=64)
    for i, tokens in enumerate(ADVERSARIAL):
        shared = max((sum(a[: 4 * n] == tokens[: 4 * n] for n in (1, 2)) for a in ADVERSARIAL[:i]), default=0)
        assert num_hits(cache, [*tokens, 0]) == shared
        serve(cache, pool, tokens)
        assert num_hits(cache, [*tokens, 0]) == 2


def test_bug_class_15_nobody_outside_can_work_out_a_digest() -> None:
    caches = [make("hash") for _ in range(2)]
    assert len(cut_digests(sequence_of(caches[0][0], PROMPT).prefix)) == 1, "nobody has its first block"
    for cache, pool in caches:
        serve(cache, pool, PROMPT)
    (first, _), (second, _) = caches
    digests = [cut_digests(sequence_of(cache, PROMPT).prefix) for cache in (first, first, second)]
    assert digests[0] == digests[1]
    assert not set(digests[0]) & set(digests[2]), "another process, other digests"
    assert [len(digest) for digest in digests[0]] == [16] * 5


@both
def test_equal_content_is_kept_once(name: str) -> None:
    cache, pool = make(name)
    one, two = (sequence_of(cache, [*PROMPT, last]) for last in (1, 2))
    (blocks_one, _), (blocks_two, _) = admit(cache, pool, one), admit(cache, pool, two)
    assert not set(blocks_one) & set(blocks_two)
    assert cache.insert(one, blocks_one, 10).tolist() == blocks_one.tolist()
    used = cache.insert(two, blocks_two, 20)
    assert used.tolist() == [*blocks_one[:2], *blocks_two[2:]]
    assert pool.refs(used).tolist() == [2, 2, 1, 1, 1, 1]
    assert pool.num_free == 16 - 12 + 2
    used_one = cache.insert(one, blocks_one, 20)
    assert used_one.tolist() == [*used[:5], blocks_one[5]]
    cache.release(two, used, 21)
    cache.release(one, used_one, 21)
    assert (pool.num_cached, pool.num_referenced) == (5, 0)


@both
def test_the_least_recently_used_leaf_goes_first(name: str) -> None:
    cache, pool = make(name, num_blocks=7)
    stem, long, short = PROMPT[:8], [1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 9, 9]
    a0, a1, a2, a3 = serve(cache, pool, stem + long)
    b0, b1, b2 = serve(cache, pool, stem + short)
    c0, c1 = serve(cache, pool, [7] * 8)
    assert (b0, b1, pool.num_cached) == (a0, a1, 7)
    assert [*taken_one_by_one(cache, 7)] == [a3, a2, b2, a1, a0, c1, c0]

    cache, pool = make(name, num_blocks=8)
    a0, a1, a2, a3 = serve(cache, pool, stem + long)
    b2 = serve(cache, pool, stem + short)[2]
    c0, c1 = serve(cache, pool, [7] * 8)
    serve(cache, pool, stem + long)
    held = cache.match(sequence_of(cache, [7] * 5))
    assert held.tolist() == [c0]
    assert cache.num_available == 7
    (free,) = cache.allocate(1)
    assert [*taken_one_by_one(cache, 6)] == [b2, c1, a3, a2, a1, a0]
    assert num_hits(cache, [7] * 9) == 1
    with pytest.raises(RuntimeError, match="1 blocks asked for"):
        cache.allocate(1)
    assert {free} == {*range(8)} - {a0, a1, a2, a3, b2, c0, c1}


def taken_one_by_one(cache: Cache, count: int) -> list[int]:
    return [int(block) for _ in range(count) for block in cache.allocate(1)]


@both
def test_a_block_that_a_fork_has_too_waits_for_the_last_who_has_it(name: str) -> None:
    """Else a fork's older blocks would let the cache evict a block whose successor is in use."""
    cache, pool = make(name, num_blocks=8)
    parent, child, other = (sequence_of(cache, PROMPT[:8]) for _ in range(3))
    blocks = cache.allocate(2)
    pool.share(blocks)
    first = cache.insert(other, cache.allocate(1), 4)
    cache.release(other, first, 4)
    of_parent = cache.insert(parent, blocks, 8)
    assert of_parent.tolist() == [first[0], blocks[1]]
    cache.release(parent, of_parent, 8)
    assert (pool.num_cached, pool.num_referenced) == (1, 2)
    cache.allocate(cache.num_available)
    cache.release(child, blocks, 8)
    assert (pool.num_cached, pool.num_free) == (2, 0)
    assert cache.allocate(2).size == 2


def test_a_salt_of_which_nothing_is_kept_has_no_tree() -> None:
    cache, pool = make("radix")
    assert isinstance(cache, RadixPrefixCache)
    sequence, blocks = sequence_of(cache, PROMPT[:8], b"tenant"), cache.allocate(2)
    pool.share(blocks)
    cache.release(sequence, blocks, 8)
    assert not cache._roots
    cache.release(sequence, blocks, 8)
    assert list(cache._roots) == [b"tenant"]


@both
def test_an_output_goes_on_its_prompts_run_until_another_history_follows(name: str) -> None:
    cache, pool = make(name, num_blocks=32)
    for last in range(3):
        sequence = sequence_of(cache, PROMPT)
        blocks = cache.insert(sequence, admit(cache, pool, sequence)[0], 20)
        sequence.tokens = np.array([*PROMPT, *[last] * 8])
        cache.release(sequence, np.concatenate((blocks, cache.allocate(2))), 28)
        assert len(cache._run_of) == (1 if last == 0 else last + 2), "one run, then a stem and a run for each output"
        for output in range(last + 1):
            assert num_hits(cache, [*PROMPT, *[output] * 8, 9]) == 7
    assert pool.num_cached == 5 + 3 * 2
    cache.release(sequence, cache.allocate(32), 0)
    assert not cache._run_of


@both
def test_what_comes_together_is_inserted_as_if_it_came_one_by_one(name: str) -> None:
    together, apart = make(name, num_blocks=64), make(name, num_blocks=64)
    prompts = [PROMPT, [*PROMPT[:8], 1, 1, 1, 1], PROMPT, [7] * 3, [8] * 9, [*PROMPT, 5, 5, 5, 5]]
    for cache, pool in (together, apart):
        serve(cache, pool, [8] * 4)
        computed = []
        for tokens in prompts:
            sequence = sequence_of(cache, tokens)
            computed.append((sequence, admit(cache, pool, sequence)[0], len(tokens)))
        inserted = cache.insert_each(computed) if cache is together[0] else [cache.insert(*one) for one in computed]
        for (sequence, _, num_tokens), blocks in zip(computed, inserted, strict=True):
            assert pool.refs(blocks).all()
            cache.release(sequence, blocks, num_tokens)
        assert [num_hits(cache, [*tokens, 0]) for tokens in prompts] == [5, 3, 5, 0, 2, 6]
    assert together[1].num_cached == apart[1].num_cached == 5 + 1 + 2 + 1


@both
def test_what_was_prepared_follows_forks_and_changes(name: str) -> None:
    cache, pool = make(name)
    serve(cache, pool, PROMPT)
    parent = sequence_of(cache, [*PROMPT, 1])
    child = Sequence(99, PROMPT[:18], SamplingParams(), 100)
    cache.adopt(child, parent)
    cache.prepare(child)
    assert cache.match(child).size == 4
    child.tokens = np.array([*PROMPT[:9], 5, *PROMPT[10:]])
    cache.truncate(child, 9)
    cache.prepare(child)
    assert cache.match(child).size == 2
    assert cache.match(parent).size == 5, "the parent's are its own"


@both
def test_lookups_and_evictions_are_counted(name: str) -> None:
    cache, pool = make(name, num_blocks=6)
    serve(cache, pool, PROMPT)  # 20 tokens, 5 blocks
    sequence = sequence_of(cache, [*PROMPT[:8], 1])  # 9 tokens, 3 blocks
    for _ in range(3):  # first in the queue, and no room
        cache.release(sequence, cache.match(sequence), 0)
    serve(cache, pool, [5] * 10)
    stats = cache.stats()
    assert (stats.num_lookups, stats.lookup_blocks, stats.hit_blocks) == (3, 5 + 3 + 3, 2)
    assert (stats.lookup_tokens, stats.hit_tokens) == (20 + 9 + 10, 8)
    assert stats.num_evictions == 2
    assert (stats.hit_rate, stats.bytes_saved(1000)) == (2 / 11, 8000)
    assert make(name)[0].stats().hit_rate == 0


def test_without_a_cache_nothing_is_looked_up() -> None:
    cache = PREFIX_CACHES["none"](BlockPool(4, BLOCK))
    sequence = Sequence(next(numbers), PROMPT, SamplingParams(), 10**6)
    assert cache.match(sequence).size == 0
    assert set(asdict(cache.stats()).values()) == {0}


@both
@pytest.mark.parametrize("block_size", [1, 3, 512])
def test_any_block_size(name: str, block_size: int) -> None:
    cache, pool = make(name, num_blocks=12, block_size=block_size)
    tokens = np.arange(5 * block_size)
    serve(cache, pool, tokens.tolist())
    tokens[2 * block_size + block_size // 2] = -1
    assert num_hits(cache, tokens.tolist()) == 2
    serve(cache, pool, tokens.tolist())
    assert pool.num_cached == 8


def test_a_tree_without_blocks_is_gone() -> None:
    cache, pool = make("radix")
    assert isinstance(cache, RadixPrefixCache)
    for i in range(50):
        serve(cache, pool, [*PROMPT[: i % 20], i, i, i, i], bytes([i]))
    assert len(cache._roots) > 2
    cache.release(sequence_of(cache, [1]), cache.allocate(16), 0)
    assert not cache._roots
    assert not cache._unused
    assert not cache._run_of


def test_digests_of_evicted_blocks_are_gone() -> None:
    cache, pool = make("hash")
    assert isinstance(cache, HashPrefixCache)
    for i in range(50):
        serve(cache, pool, [*PROMPT[: i % 20], i, i, i, i])
        assert len(blocks_by_digest(cache)) == pool.num_cached
    cache.allocate(16)
    assert not cache._run_at
    assert not cache._run_of


Content = tuple[bytes, tuple[int, ...]]


class ContentModel:
    """A cache under test beside what its blocks really hold: the salt and all tokens up to the block's end."""

    def __init__(self, name: str, num_blocks: int, block_size: int) -> None:
        self.cache, self.pool = make(name, num_blocks, block_size)
        self.content: dict[int, Content] = {}
        self.alive: list[tuple[Sequence, BlockIds, int]] = []
        self.num_hits = 0

    def arrive(self, tokens: list[int], salt: bytes) -> None:
        cache, pool = self.cache, self.pool
        sequence = sequence_of(cache, tokens, salt)
        hits = cache.match(sequence)
        known = {self.content[block] for block in np.flatnonzero(pool.is_kept(self.all_blocks)).tolist()}
        prefixes = [self.key(sequence, i + 1) for i in range((len(tokens) - 1) // pool.block_size)]
        expected = next((i for i, key in enumerate(prefixes) if key not in known), len(prefixes))
        assert [self.content[block] for block in hits.tolist()] == prefixes[:expected]
        self.num_hits += hits.size
        missing = pool.blocks_for(len(tokens)) - hits.size
        if missing > cache.num_available:
            cache.release(sequence, hits, 0)
        else:
            blocks = np.concatenate((hits, cache.allocate(missing)))
            self.alive.append((sequence, blocks, hits.size * pool.block_size))

    def compute(self, place: int, num_tokens: int) -> None:
        sequence, blocks, computed = self.alive[place]
        end = min(computed + num_tokens, sequence.tokens.size)
        for i in range(computed // self.pool.block_size, end // self.pool.block_size):
            assert not self.pool.is_kept(blocks[i : i + 1]).any()
            self.content[int(blocks[i])] = self.key(sequence, i + 1)
        self.alive[place] = sequence, self.cache.insert(sequence, blocks, end), end

    def fork(self, place: int) -> None:
        sequence, blocks, computed = self.alive[place]
        if computed == sequence.tokens.size and computed % self.pool.block_size == 0:
            child = Sequence(next(numbers), sequence.tokens, SamplingParams(), 10**6, cache_salt=sequence.cache_salt)
            self.cache.adopt(child, sequence)
            self.pool.share(blocks)
            self.alive.append((child, blocks, computed))

    def write_unseen(self, place: int) -> None:
        """Compute to the end and leave without an insert on the way, as output tokens are."""
        sequence, blocks, computed = self.alive.pop(place)
        for i in range(computed // self.pool.block_size, sequence.tokens.size // self.pool.block_size):
            self.content[int(blocks[i])] = self.key(sequence, i + 1)
        self.cache.release(sequence, blocks, sequence.tokens.size)

    def leave(self, place: int) -> None:
        self.cache.release(*self.alive.pop(place))

    def check(self) -> None:
        pool = self.pool
        refs = np.bincount([b for _, blocks, _ in self.alive for b in blocks.tolist()], minlength=pool.num_blocks)
        assert (pool.refs(self.all_blocks) == refs).all()
        kept = pool.is_kept(self.all_blocks)
        assert pool.num_cached == np.count_nonzero(kept & (refs == 0))
        assert pool.num_free == np.count_nonzero(~kept & (refs == 0))
        assert self.cache.num_available == pool.num_free + pool.num_cached
        contents = [self.content[block] for block in np.flatnonzero(kept).tolist()]
        assert len(set(contents)) == len(contents)
        size = pool.block_size
        for salt, tokens in contents:
            assert len(tokens) == size or (salt, tokens[:-size]) in contents, "a block outlived the one before it"
        for sequence, blocks, computed in self.alive:
            for i in range(computed // size):
                assert self.content[int(blocks[i])] == self.key(sequence, i + 1)

    @property
    def all_blocks(self) -> BlockIds:
        return np.arange(self.pool.num_blocks, dtype=np.int32)

    def key(self, sequence: Sequence, num_blocks: int) -> Content:
        return sequence.cache_salt, tuple(sequence.tokens[: num_blocks * self.pool.block_size].tolist())


@both
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    num_blocks=st.integers(3, 14),
    block_size=st.integers(1, 3),
    moves=st.lists(
        st.tuples(
            st.sampled_from(["arrive", "arrive", "arrive", "compute", "compute", "write_unseen", "fork", "leave"]),
            st.integers(0, 7),
            st.lists(st.integers(0, 1), min_size=1, max_size=12),
        ),
        max_size=60,
    ),
)
def test_lookups_find_all_that_is_kept_and_nothing_else(
    name: str, num_blocks: int, block_size: int, moves: list[tuple[str, int, list[int]]]
) -> None:
    model = ContentModel(name, num_blocks, block_size)
    for move, number, tokens in moves:
        if move == "arrive":
            model.arrive(tokens, b"xy"[: number % 2])
        elif model.alive:
            place = number % len(model.alive)
            action: Callable[..., None] = getattr(model, move)
            action(place, len(tokens)) if move == "compute" else action(place)
        model.check()
    while model.alive:
        model.leave(0)
        model.check()
    assert model.cache.allocate(num_blocks).size == num_blocks


def test_a_caches_counts_begin_at_zero() -> None:
    assert astuple(CacheStats()) == (0, 0, 0, 0, 0, 0)
    assert CacheStats().hit_rate == 0.0
