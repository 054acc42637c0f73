"""A prefix cache by chained block digests (the idea of vLLM's automatic prefix caching).

A block's digest is BLAKE2b over the digest of the block before it and the block's own tokens, so it names the block's
whole history, and equal digests mean equal keys and values. The chain starts at a digest of the tenant's salt under a
secret of this process: nobody outside can work out a digest, let alone make two histories share one, and another
tenant's digests are others throughout (CVE-2025-25183 was a hash() that could be steered).
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from itertools import repeat

import numpy as np

from tsched.block_pool import NO_BLOCKS, BlockIds, BlockPool
from tsched.policies.base import CacheStats
from tsched.policies.block_queue import BlockQueue, eviction_batch
from tsched.policies.lookups import Lookups
from tsched.sequence import Sequence

_DIGEST_SIZE = 16  # bytes; two of 2**32 blocks are alike with a chance of 2**-65
_EMPTY = blake2b(digest_size=_DIGEST_SIZE)


class HashPrefixCache:
    """Digest -> block, for every block whose content is known; digests are made once for each sequence.

    Whoever refers to a kept block refers to all before it, and a sequence's blocks become unused from its end. So a
    block's descendants are never used later than the block itself: the least recently used one is always a leaf.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._secret = secrets.token_bytes(32)
        self._block_of: dict[bytes, int] = {}
        self._digest_of = np.full(pool.num_blocks, None, dtype=object)
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
        child.prefix = self._digests(parent, 0)[: child.tokens.size // self._pool.block_size]

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        del self._digests(sequence, 0)[num_tokens // self._pool.block_size :]

    def match(self, sequence: Sequence) -> BlockIds:
        count = (sequence.tokens.size - 1) // self._pool.block_size
        digests = self._digests(sequence, count)
        blocks = NO_BLOCKS
        if count and digests[0] in self._block_of:
            blocks = self._known(digests[:count])
            self._pool.share(blocks)
        self._lookups.record(sequence, blocks.size)
        return blocks

    def allocate(self, count: int) -> BlockIds:
        missing = count - self._pool.num_free
        if missing > 0:
            self._evict(max(missing, min(self._batch, self._pool.num_cached)))
        return self._pool.allocate(count)

    def insert(self, sequence: Sequence, blocks: BlockIds, num_computed: int) -> BlockIds:
        pool = self._pool
        end = num_computed // pool.block_size
        # The blocks that are kept came out of the cache, and so did all before them.
        start = np.count_nonzero(pool.is_kept(blocks[:end]))
        if start == end:
            return blocks
        digests = self._digests(sequence, end)[start:end]
        if digests[0] in self._block_of:
            known = self._known(digests)
            pool.share(known)
            pool.release(blocks[start : start + known.size])
            blocks = np.concatenate((blocks[:start], known, blocks[start + known.size :]))
            start += known.size
            digests = digests[known.size :]
        new = blocks[start:end]
        # A block that a fork has too waits for the last who has it: the others may have other blocks before it.
        is_shared = pool.refs(new) > 1
        if np.count_nonzero(is_shared):
            new = new[: is_shared.argmax()]
            digests = digests[: new.size]
        if new.size:
            pool.keep(new)
            self._block_of.update(zip(digests, new.tolist(), strict=True))
            self._digest_of[new.astype(np.intp)] = digests
        return blocks

    def release(self, sequence: Sequence, blocks: BlockIds, num_computed: int) -> None:
        cached = self._pool.release(self.insert(sequence, blocks, num_computed))
        if cached.size:
            self._unused.append(cached[::-1])

    def stats(self) -> CacheStats:
        return self._lookups.stats(self._num_evictions)

    def _digests(self, sequence: Sequence, count: int) -> list[bytes]:
        """The digests of at least the first `count` blocks of the sequence; new ones are made from its tokens."""
        digests = sequence.prefix
        if not isinstance(digests, list):
            digests = sequence.prefix = []
        if len(digests) < count:
            block_size = self._pool.block_size
            data = sequence.tokens[len(digests) * block_size : count * block_size].tobytes()
            width = block_size * sequence.tokens.itemsize
            last = digests[-1] if digests else self._root(sequence.cache_salt)
            for start in range(0, len(data), width):
                hasher = _EMPTY.copy()  # cheaper than a new one
                hasher.update(last + data[start : start + width])
                last = hasher.digest()
                digests.append(last)
        return digests

    def _root(self, salt: bytes) -> bytes:
        return blake2b(salt, digest_size=_DIGEST_SIZE, key=self._secret).digest()

    def _known(self, digests: list[bytes]) -> BlockIds:
        """[n] the blocks of the first n digests; the next one is not known."""
        blocks = np.fromiter(map(self._block_of.get, digests, repeat(-1)), np.int32, len(digests))
        unknown = blocks < 0
        return blocks[: unknown.argmax()] if np.count_nonzero(unknown) else blocks

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
            for digest in self._digest_of.take(evicted).tolist():
                del self._block_of[digest]
            pool.forget(evicted)
            count -= evicted.size
