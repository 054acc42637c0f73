"""A prefix cache by chained block digests (the idea of vLLM's automatic prefix caching).

A block's digest is BLAKE2b over the digest of the block before it and the block's own tokens, so it names the block's
whole history, and equal digests mean equal keys and values. The chain starts at a digest of the tenant's salt under a
secret of this process: nobody outside can work out a digest, let alone make two histories share one, and another
tenant's digests are others throughout (CVE-2025-25183 was a hash() that could be steered).
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from functools import lru_cache
from hashlib import blake2b

import numpy as np

from tsched.scheduling.block_pool import NO_BLOCKS, BlockIds, BlockPool
from tsched.scheduling.policies.run_cache import RunCache
from tsched.scheduling.sequence import Sequence

DIGEST_SIZE = 16  # bytes; two of 2**32 blocks are alike with a chance of 2**-65
_EMPTY = blake2b(digest_size=DIGEST_SIZE)


class BlockDigests:
    """The digests of a sequence's blocks, made once for each sequence and kept in its `prefix`."""

    _pool: BlockPool

    def _draw_secret(self) -> None:
        """Chains begin where nobody outside of this process knows."""
        self._secret = secrets.token_bytes(32)
        self._root_of = lru_cache(maxsize=256)(self._root)  # most tenants come often

    def prepare(self, sequence: Sequence) -> None:
        self._digests(sequence, sequence.tokens.size // self._pool.block_size)

    def adopt(self, child: Sequence, parent: Sequence) -> None:
        child.prefix = self._digests(parent, 0)[: child.tokens.size // self._pool.block_size * DIGEST_SIZE]

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.prefix = self._digests(sequence, 0)[: num_tokens // self._pool.block_size * DIGEST_SIZE]

    def _digests(self, sequence: Sequence, count: int) -> bytes:
        """The digests of at least the first `count` blocks of the sequence; new ones are made from its tokens."""
        digests = sequence.prefix
        if not isinstance(digests, bytes):
            digests = sequence.prefix = b""
        num_ready = len(digests) // DIGEST_SIZE
        if num_ready < count:
            block_size = self._pool.block_size
            data = sequence.tokens[num_ready * block_size : count * block_size].tobytes()
            last = digests[-DIGEST_SIZE:] or self._root_of(sequence.cache_salt)
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

    def _root(self, salt: bytes) -> bytes:
        return blake2b(salt, digest_size=DIGEST_SIZE, key=self._secret).digest()


class Run:
    """Blocks that were inserted together and follow each other in one history.

    first     the place of its first block in that history
    digests   DIGEST_SIZE bytes for each of its first blocks, one at least, and for those that were evicted from its end
    pending   the tokens of the blocks after those, as bytes: their digests are made if a lookup comes by
    blocks    [n] int32, n >= 1
    parent    the run that ends with the block before; None where there is none
    children  the number of runs whose parent it is
    """

    __slots__ = ("blocks", "children", "digests", "first", "parent", "pending")

    def __init__(self, first: int, digests: bytes, pending: bytes, blocks: BlockIds, parent: Run | None) -> None:
        self.first = first
        self.digests = digests
        self.pending = pending
        self.blocks = blocks
        self.parent = parent
        self.children = 0

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


class HashPrefixCache(BlockDigests, RunCache[Run]):
    """Digest of a run's first block -> run, for runs of blocks whose content is known; digests are made once for each
    sequence. A prompt's blocks take one entry and not thousands, and a long common prefix is found by one comparison.

    A sequence whose first block nobody has kept needs the digest of no other: the rest wait until a lookup comes by.
    """

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self._draw_secret()
        self._run_at: dict[bytes, Run] = {}  # by the digest of the first block

    def prepare(self, sequence: Sequence) -> None:
        count = sequence.tokens.size // self._pool.block_size
        if count and self._has_first_of(sequence):  # what a lookup will compare
            self._complete(self._run_at[self._digests(sequence, count)[:DIGEST_SIZE]])

    def _has_first_of(self, sequence: Sequence) -> bool:
        digests = sequence.prefix or self._digests(sequence, 1)
        return digests[:DIGEST_SIZE] in self._run_at  # type: ignore[index]

    def _find(self, sequence: Sequence, start: int, end: int, before: Run | None) -> tuple[BlockIds, Run | None]:
        digests = self._digests(sequence, min(start + 1, end))
        num_digests = min(end, len(digests) // DIGEST_SIZE)
        blocks, last = self._walk(digests, start, num_digests, before)
        if start + blocks.size == num_digests < end:  # others had this too: how much of it?
            blocks, last = self._walk(self._digests(sequence, end), start, end, before)
        return blocks, last

    def _append(self, sequence: Sequence, start: int, blocks: BlockIds, parent: Run | None) -> Run:
        digests, end = self._digests(sequence, start + 1), start + blocks.size
        num_digests = len(digests) // DIGEST_SIZE
        pending = sequence.tokens[num_digests * self._pool.block_size : end * self._pool.block_size].tobytes()
        run = Run(start, digests[start * DIGEST_SIZE : end * DIGEST_SIZE], pending, blocks, parent)
        self._run_at[run.digests[:DIGEST_SIZE]] = run
        if parent is not None:
            parent.children += 1
        return run

    def _is_leaf(self, run: Run) -> bool:
        return run.children == 0

    def _extend(self, leaf: Run, sequence: Sequence, blocks: BlockIds) -> None:
        size, block_size = leaf.blocks.size, self._pool.block_size
        start = leaf.first + size
        leaf.digests = leaf.digests[: size * DIGEST_SIZE]  # those of evicted blocks go
        num_pending = size - len(leaf.digests) // DIGEST_SIZE
        tokens = sequence.tokens[start * block_size : (start + blocks.size) * block_size]
        leaf.pending = leaf.pending[: num_pending * block_size * 8] + tokens.tobytes()
        leaf.blocks = np.concatenate((leaf.blocks, blocks))

    def _complete(self, run: Run) -> None:
        """All its blocks have their digests now."""
        if run.pending:
            run.digests += self._chain(run.digests[-DIGEST_SIZE:], run.pending)
            run.pending = b""

    def _walk(self, digests: bytes, start: int, end: int, before: Run | None) -> tuple[BlockIds, Run | None]:
        """`_find` by `digests`, which has those of all blocks before `end`."""
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
        cut = count * DIGEST_SIZE
        head = Run(run.first, run.digests[:cut], b"", run.blocks[:count], run.parent)
        head.children = 1
        run.first, run.digests, run.blocks, run.parent = head.first + count, run.digests[cut:], run.blocks[count:], head
        for one in (head, run):
            self._run_at[one.digests[:DIGEST_SIZE]] = one
        return head

    def _cut(self, leaf: Run, size: int) -> None:
        leaf.blocks = leaf.blocks[:size]

    def _remove(self, leaf: Run) -> None:
        del self._run_at[leaf.digests[:DIGEST_SIZE]]
        if leaf.parent is not None:
            leaf.parent.children -= 1
