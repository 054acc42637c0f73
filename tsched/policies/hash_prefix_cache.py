"""A prefix cache by chained block digests (the idea of vLLM's automatic prefix caching).

A block's digest is BLAKE2b over the digest of the block before it and the block's own tokens, so it names the block's
whole history, and equal digests mean equal keys and values. The chain starts at a digest of the tenant's salt under a
secret of this process: nobody outside can work out a digest, let alone make two histories share one, and another
tenant's digests are others throughout (CVE-2025-25183 was a hash() that could be steered).
"""

from __future__ import annotations

import itertools
import secrets
from bisect import bisect_left
from hashlib import blake2b

import numpy as np

from tsched.block_pool import NO_BLOCKS, BlockIds, BlockPool
from tsched.policies.base import CacheStats
from tsched.policies.block_queue import BlockQueue, eviction_batch
from tsched.policies.lookups import Lookups
from tsched.sequence import Sequence

DIGEST_SIZE = 16  # bytes; two of 2**32 blocks are alike with a chance of 2**-65
_EMPTY = blake2b(digest_size=DIGEST_SIZE)


class Run:
    """Blocks that were inserted together and follow each other in one history.

    first    the place of its first block in that history
    digests  DIGEST_SIZE bytes for each of its blocks, and for those that were evicted from its end
    blocks   [n] int32, n >= 1
    """

    __slots__ = ("blocks", "digests", "first")

    def __init__(self, first: int, digests: bytes, blocks: BlockIds) -> None:
        self.first = first
        self.digests = digests
        self.blocks = blocks

    def count_same(self, digests: bytes, start: int, end: int) -> int:
        """How many of its blocks from place `start` of the history on, before place `end`, have those of `digests`.

        A digest names all before it, so the first that differs is found by bisection.
        """
        shift = self.first * DIGEST_SIZE

        def differs(place: int) -> bool:
            at = place * DIGEST_SIZE
            return digests[at : at + DIGEST_SIZE] != self.digests[at - shift : at - shift + DIGEST_SIZE]

        places = range(start, min(end, self.first + self.blocks.size))
        if not places or not differs(places[-1]):
            return len(places)
        return bisect_left(places, True, key=differs)


class HashPrefixCache:
    """Digest of a run's first block -> run, for runs of blocks whose content is known; digests are made once for each
    sequence. A prompt's blocks take one entry and not thousands, and a long common prefix is found by one comparison.

    Whoever refers to a kept block refers to all before it, and a sequence's blocks become unused from its end. So a
    block's descendants are never used later than the block itself: the least recently used one is always a leaf, and
    the last of its run.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._secret = secrets.token_bytes(32)
        self._run_at: dict[bytes, Run] = {}  # by the digest of the first block
        self._run_of: dict[int, Run] = {}  # by the number of the first block
        self._first_of = np.zeros(pool.num_blocks, dtype=np.int32)  # each kept block's run, by its first block
        # Every cached block, the least recently used first. Also blocks that were cached and are referenced again:
        # these fall out when an eviction meets them, so that a hit costs nothing here.
        self._unused = BlockQueue(pool.num_blocks)
        self._batch = eviction_batch(pool)
        self._lookups = Lookups(pool.block_size)
        self._num_evictions = 0

    @property
    def num_available(self) -> int:
        return self._pool.num_free + self._pool.num_cached

    def prepare(self, sequence: Sequence) -> None:
        self._digests(sequence, sequence.tokens.size // self._pool.block_size)

    def adopt(self, child: Sequence, parent: Sequence) -> None:
        child.prefix = self._digests(parent, 0)[: child.tokens.size // self._pool.block_size * DIGEST_SIZE]

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.prefix = self._digests(sequence, 0)[: num_tokens // self._pool.block_size * DIGEST_SIZE]

    def match(self, sequence: Sequence) -> BlockIds:
        count = (sequence.tokens.size - 1) // self._pool.block_size
        blocks = self._known(self._digests(sequence, count), 0, count, None)
        if blocks.size:
            self._pool.share(blocks)
        self._lookups.record(sequence, blocks.size)
        return blocks

    def allocate(self, count: int) -> BlockIds:
        missing = count - self._pool.num_free
        if missing > 0:
            self._evict(max(missing, min(missing + self._batch - 1, self._pool.num_cached)))
        return self._pool.allocate(count)

    def insert(self, sequence: Sequence, blocks: BlockIds, num_computed: int) -> BlockIds:
        pool = self._pool
        end = num_computed // pool.block_size
        # The blocks that are kept came out of the cache, and so did all before them.
        start = int(np.count_nonzero(pool.is_kept(blocks[:end])))
        if start == end:
            return blocks
        digests = self._digests(sequence, end)
        before = self._run_of[int(self._first_of[blocks[start - 1]])] if start else None
        known = self._known(digests, start, end, before)
        if known.size:
            pool.share(known)
            pool.release(blocks[start : start + known.size])
            blocks = np.concatenate((blocks[:start], known, blocks[start + known.size :]))
            start += known.size
        new = blocks[start:end].copy()
        # A block that a fork has too waits for the last who has it: the others may have other blocks before it.
        is_shared = pool.refs(new) > 1
        if np.count_nonzero(is_shared):
            new = new[: is_shared.argmax()]
        if new.size:
            pool.keep(new)
            run = Run(start, digests[start * DIGEST_SIZE : (start + new.size) * DIGEST_SIZE], new)
            self._run_at[run.digests[:DIGEST_SIZE]] = self._run_of[int(new[0])] = run
            self._first_of[new.astype(np.intp)] = new[0]
        return blocks

    def release(self, sequence: Sequence, blocks: BlockIds, num_computed: int) -> None:
        cached = self._pool.release(self.insert(sequence, blocks, num_computed))
        if cached.size:
            self._unused.append(cached[::-1])

    def stats(self) -> CacheStats:
        return self._lookups.stats(self._num_evictions)

    def _digests(self, sequence: Sequence, count: int) -> bytes:
        """The digests of at least the first `count` blocks of the sequence; new ones are made from its tokens."""
        digests = sequence.prefix
        if not isinstance(digests, bytes):
            digests = sequence.prefix = b""
        num_ready = len(digests) // DIGEST_SIZE
        if num_ready < count:
            block_size = self._pool.block_size
            data = sequence.tokens[num_ready * block_size : count * block_size].tobytes()
            width = block_size * sequence.tokens.itemsize
            last = digests[-DIGEST_SIZE:] or self._root(sequence.cache_salt)
            new = [digests]
            for start in range(0, len(data), width):
                hasher = _EMPTY.copy()  # cheaper than a new one
                hasher.update(last + data[start : start + width])
                last = hasher.digest()
                new.append(last)
            digests = sequence.prefix = b"".join(new)
        return digests

    def _root(self, salt: bytes) -> bytes:
        return blake2b(salt, digest_size=DIGEST_SIZE, key=self._secret).digest()

    def _known(self, digests: bytes, start: int, end: int, before: Run | None) -> BlockIds:
        """[n] the blocks of the `digests` of places `start` to `start + n`, at most to `end`; the next one is not
        known. `before` is the run of the block before `start`.
        """
        found: list[BlockIds] = []
        place, run = start, before
        while place < end:
            if run is not None and (count := run.count_same(digests, place, end)):
                found.append(run.blocks[place - run.first :][:count])
                place += count
            run = self._run_at.get(digests[place * DIGEST_SIZE : (place + 1) * DIGEST_SIZE])
            if run is None:
                break
        return np.concatenate(found) if found else NO_BLOCKS

    def _evict(self, count: int) -> None:
        """Free the `count` least recently used blocks; RuntimeError, and nothing changes, where fewer are cached."""
        pool = self._pool
        if count > pool.num_cached:
            raise RuntimeError(
                f"{count} blocks asked for over the {pool.num_free} free ones, {pool.num_cached} are cached"
            )
        self._num_evictions += count
        while count:
            oldest = self._unused.pop(count)
            if oldest.size == 0:
                raise RuntimeError("cached blocks are missing from the order of their use: the accounts are wrong")
            refs = pool.refs(oldest)
            evicted = oldest[refs == 0] if np.count_nonzero(refs) else oldest
            self._trim(evicted)
            pool.forget(evicted)
            count -= evicted.size

    def _trim(self, evicted: BlockIds) -> None:
        """Take the `evicted` [n] from the ends of their runs, and the runs of which nothing is left from the cache."""
        first = self._first_of.take(evicted)
        cuts = [0, *(np.flatnonzero(first[1:] != first[:-1]) + 1).tolist(), evicted.size]
        for start, end in itertools.pairwise(cuts):
            if start == end:
                continue
            run = self._run_of[int(first[start])]
            if run.blocks[-1] != evicted[start]:
                raise RuntimeError("a block was used less recently than one after it: the accounts are wrong")
            run.blocks = run.blocks[: start - end]
            if run.blocks.size == 0:
                del self._run_of[int(first[start])], self._run_at[run.digests[:DIGEST_SIZE]]
