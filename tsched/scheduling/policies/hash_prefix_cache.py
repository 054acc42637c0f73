"""A prefix cache by chained block digests (the idea of vLLM's automatic prefix caching).

A block's digest is BLAKE2b over the digest of the block before it and the block's own tokens, so it names the block's
whole history, and equal digests mean equal keys and values. The chain starts at a digest of the tenant's salt under a
secret of this process: nobody outside can work out a digest, let alone make two histories share one, and another
tenant's digests are others throughout (CVE-2025-25183 was a hash() that could be steered).
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Callable
from hashlib import blake2b

import numpy as np

from tsched.scheduling.block_pool import NO_BLOCKS, BlockIds, BlockPool
from tsched.scheduling.policies.base import CacheStats
from tsched.scheduling.policies.lookups import Lookups
from tsched.scheduling.policies.run_queue import RunQueue
from tsched.scheduling.sequence import Sequence

DIGEST_SIZE = 16  # bytes; two of 2**32 blocks are alike with a chance of 2**-65
_EMPTY = blake2b(digest_size=DIGEST_SIZE)


class Run:
    """Blocks that were inserted together and follow each other in one history.

    first    the place of its first block in that history
    digests  DIGEST_SIZE bytes for each of its first blocks, one at least, and for those that were evicted from its end
    pending  the tokens of the blocks after those, as bytes: outputs, whose digests are made if a lookup comes by
    blocks   [n] int32, n >= 1
    parent   the run that ends with the block before; None where there is none
    """

    __slots__ = ("blocks", "digests", "first", "parent", "pending")

    def __init__(self, first: int, digests: bytes, pending: bytes, blocks: BlockIds, parent: Run | None) -> None:
        self.first = first
        self.digests = digests
        self.pending = pending
        self.blocks = blocks
        self.parent = parent

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

    A run is split where histories part, so that its end can be evicted before what others go on using. Eviction takes
    the last blocks of the least recently used leaf.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._secret = secrets.token_bytes(32)
        self._run_at: dict[bytes, Run] = {}  # by the digest of the first block
        self._run_of: dict[int, Run] = {}  # by the number of the first block
        self._first_of = np.zeros(pool.num_blocks, dtype=np.int32)  # each kept block's run, by its first block
        self._unused = RunQueue(pool, self._trim)
        self._lookups = Lookups(pool.block_size)

    @property
    def num_available(self) -> int:
        return self._pool.num_free + self._pool.num_cached

    def prepare(self, sequence: Sequence) -> None:
        self._digests(sequence, sequence.tokens.size // self._pool.block_size)

    def adopt(self, child: Sequence, parent: Sequence) -> None:
        child.prefix = self._digests(parent, 0)[: child.tokens.size // self._pool.block_size * DIGEST_SIZE]

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.prefix = self._digests(sequence, 0)[: num_tokens // self._pool.block_size * DIGEST_SIZE]

    def match(self, sequence: Sequence, usable: Callable[[BlockIds], int] | None = None) -> BlockIds:
        count = (sequence.tokens.size - 1) // self._pool.block_size
        blocks = self._walk(self._digests(sequence, count), 0, count, None)[0]
        if usable is not None:
            blocks = blocks[: usable(blocks)]
        if blocks.size:
            self._pool.share(blocks)
        self._lookups.record(sequence, blocks.size)
        return blocks

    def allocate(self, count: int) -> BlockIds:
        self._unused.make_room(count)
        return self._pool.allocate(count)

    def insert(self, sequence: Sequence, blocks: BlockIds, num_computed: int) -> BlockIds:
        pool = self._pool
        end = num_computed // pool.block_size
        # The blocks that are kept came out of the cache, and so did all before them.
        start = int(np.count_nonzero(pool.is_kept(blocks[:end])))
        if start == end:
            return blocks
        before = self._run(blocks[start - 1]) if start else None
        digests = self._digests(sequence, start + 1)
        num_digests = min(end, len(digests) // DIGEST_SIZE)
        known, parent = self._walk(digests, start, num_digests, before)
        if start + known.size == num_digests < end:  # others had this output too: how much of it?
            digests, num_digests = self._digests(sequence, end), end
            known, parent = self._walk(digests, start, end, before)
        if known.size:
            pool.share(known)
            pool.release(blocks[start : start + known.size])
            blocks = np.concatenate((blocks[:start], known, blocks[start + known.size :]))
            start += known.size
        # A block that a fork has too waits for the last who has it: the others may have other blocks before it.
        new = pool.prefix_before_shared(blocks[start:end]).copy()
        if new.size:
            pool.keep(new)
            if parent is not None and start < parent.first + parent.blocks.size:
                parent = self._split(parent, start - parent.first)
            end = start + new.size
            pending = sequence.tokens[num_digests * pool.block_size : end * pool.block_size].tobytes()
            ready = digests[start * DIGEST_SIZE : min(num_digests, end) * DIGEST_SIZE]
            self._note(Run(start, ready, pending, new, parent))
        return blocks

    def release(self, sequence: Sequence, blocks: BlockIds, num_computed: int) -> None:
        cached = self._pool.release(self.insert(sequence, blocks, num_computed))
        if cached.size:
            self._unused.touch(self._run(cached[-1]))

    def stats(self) -> CacheStats:
        return self._lookups.stats(self._unused.num_evictions)

    def _digests(self, sequence: Sequence, count: int) -> bytes:
        """The digests of at least the first `count` blocks of the sequence; new ones are made from its tokens."""
        digests = sequence.prefix
        if not isinstance(digests, bytes):
            digests = sequence.prefix = b""
        num_ready = len(digests) // DIGEST_SIZE
        if num_ready < count:
            block_size = self._pool.block_size
            data = sequence.tokens[num_ready * block_size : count * block_size].tobytes()
            last = digests[-DIGEST_SIZE:] or self._root(sequence.cache_salt)
            digests = sequence.prefix = digests + self._chain(last, data)
        return digests

    def _chain(self, last: bytes, data: bytes) -> bytes:
        """The digests of the blocks with the int64 tokens `data`, which follow the one of digest `last`."""
        width, digests = self._pool.block_size * 8, []
        for start in range(0, len(data), width):
            hasher = _EMPTY.copy()  # cheaper than a new one
            hasher.update(last + data[start : start + width])
            last = hasher.digest()
            digests.append(last)
        return b"".join(digests)

    def _complete(self, run: Run) -> None:
        """All its blocks have their digests now."""
        if run.pending:
            run.digests += self._chain(run.digests[-DIGEST_SIZE:], run.pending)
            run.pending = b""

    def _root(self, salt: bytes) -> bytes:
        return blake2b(salt, digest_size=DIGEST_SIZE, key=self._secret).digest()

    def _run(self, block: np.int32) -> Run:
        """The run of the kept `block`."""
        return self._run_of[int(self._first_of[block])]

    def _walk(self, digests: bytes, start: int, end: int, before: Run | None) -> tuple[BlockIds, Run | None]:
        """[n] the blocks of the `digests` of places `start` to `start + n`, at most to `end`, where the next one is not
        known; and the run of the last block before there. `before` is the run of the block before `start`.
        """
        found: list[BlockIds] = []
        place, run = start, before
        while place < end:
            if run is not None:
                self._complete(run)
                count = run.count_same(digests, place, end)
                if count:
                    found.append(run.blocks[place - run.first :][:count])
                    place += count
                    before = run
            run = self._run_at.get(digests[place * DIGEST_SIZE : (place + 1) * DIGEST_SIZE])
            if run is None:
                break
        return np.concatenate(found) if found else NO_BLOCKS, before

    def _split(self, run: Run, count: int) -> Run:
        """Part `run` after its first `count` blocks and return the run of those, new; the old one now follows it, with
        its place in the order of use.
        """
        cut = count * DIGEST_SIZE
        head = Run(run.first, run.digests[:cut], b"", run.blocks[:count], run.parent)
        run.first, run.digests, run.blocks, run.parent = head.first + count, run.digests[cut:], run.blocks[count:], head
        self._note(head)
        self._note(run)
        return head

    def _note(self, run: Run) -> None:
        self._run_at[run.digests[:DIGEST_SIZE]] = self._run_of[int(run.blocks[0])] = run
        self._first_of[run.blocks.astype(np.intp)] = run.blocks[0]

    def _trim(self, leaf: Run, count: int) -> None:
        """Take the last `count` blocks from `leaf`, and the leaf from the cache when none is left."""
        first = leaf.blocks[0]
        leaf.blocks = leaf.blocks[:-count]
        if leaf.blocks.size == 0:
            del self._run_at[leaf.digests[:DIGEST_SIZE]], self._run_of[int(first)]
