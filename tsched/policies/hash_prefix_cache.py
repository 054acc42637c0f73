"""A prefix cache by chained block digests (the idea of vLLM's automatic prefix caching).

A block's digest is BLAKE2b over the digest of the block before it and the block's own tokens, so it names the block's
whole history, and equal digests mean equal keys and values. The chain starts at a digest of the tenant's salt under a
secret of this process: nobody outside can work out a digest, let alone make two histories share one, and another
tenant's digests are others throughout (CVE-2025-25183 was a hash() that could be steered).
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b
from itertools import islice, repeat

import numpy as np

from tsched.block_pool import NO_BLOCKS, BlockIds, BlockPool
from tsched.policies.base import CacheStats
from tsched.policies.lookups import Lookups
from tsched.sequence import Sequence

_DIGEST_SIZE = 16  # bytes; two of 2**32 blocks are alike with a chance of 2**-65


class HashPrefixCache:
    """Digest -> block, for every block whose content is known; digests are made once for each sequence.

    Whoever refers to a kept block refers to all before it, and a sequence's blocks become unused from its end. So a
    block's descendants are never used later than the block itself: the least recently used one is always a leaf.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._secret = secrets.token_bytes(32)
        self._block_of: dict[bytes, int] = {}
        self._digest_of: list[bytes] = [b""] * pool.num_blocks
        # Every cached block, the least recently used first. Also blocks that were cached and are referenced again:
        # these fall out when an eviction meets them, so that a hit costs nothing here.
        self._unused: OrderedDict[int, None] = OrderedDict()
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
            blocks = self._known(islice(digests, count), count)
            self._pool.share(blocks)
        self._lookups.record(sequence, blocks.size)
        return blocks

    def allocate(self, count: int) -> BlockIds:
        missing = count - self._pool.num_free
        if missing > 0:
            self._evict(missing)
        return self._pool.allocate(count)

    def insert(self, sequence: Sequence, blocks: BlockIds, num_computed: int) -> BlockIds:
        pool = self._pool
        end = num_computed // pool.block_size
        kept = pool.is_kept(blocks[:end])
        if kept.all():
            return blocks
        start = int(kept.argmin())  # those before it are in the cache under their digests: they came out of it
        digests = self._digests(sequence, end)
        known = self._known(islice(digests, start, end), end - start)
        if known.size:
            own = blocks[start : start + known.size]
            pool.share(known)
            pool.release(own)
            blocks = np.concatenate((blocks[:start], known, blocks[start + known.size :]))
            start += known.size
        new = blocks[start:end]
        # A block that a fork has too waits for the last who has it: the others may have other blocks before it.
        is_shared = pool.refs(new) > 1
        if is_shared.any():
            new = new[: is_shared.argmax()]
        pool.keep(new)
        for block, digest in zip(new.tolist(), islice(digests, start, end), strict=False):
            self._block_of[digest] = block
            self._digest_of[block] = digest
        return blocks

    def release(self, sequence: Sequence, blocks: BlockIds, num_computed: int) -> None:
        unused = self._unused
        for block in self._pool.release(self.insert(sequence, blocks, num_computed))[::-1].tolist():
            unused[block] = None
            unused.move_to_end(block)

    def stats(self) -> CacheStats:
        return self._lookups.stats(self._num_evictions)

    def _digests(self, sequence: Sequence, count: int) -> list[bytes]:
        """The digests of at least the first `count` blocks of the sequence; new ones are made from its tokens."""
        digests = sequence.prefix
        if not isinstance(digests, list):
            digests = sequence.prefix = []
        if len(digests) < count:
            width = self._pool.block_size * sequence.tokens.itemsize
            data = sequence.tokens.data.cast("B")
            last = digests[-1] if digests else self._root(sequence.cache_salt)
            for start in range(len(digests) * width, count * width, width):
                last = blake2b(last + data[start : start + width], digest_size=_DIGEST_SIZE).digest()
                digests.append(last)
        return digests

    def _root(self, salt: bytes) -> bytes:
        return blake2b(salt, digest_size=_DIGEST_SIZE, key=self._secret).digest()

    def _known(self, digests: Iterable[bytes], count: int) -> BlockIds:
        """[n <= count] the blocks of the first of the `count` digests, up to one that is not known."""
        blocks = np.fromiter(map(self._block_of.get, digests, repeat(-1)), np.int32, count)
        unknown = blocks < 0
        return blocks[: unknown.argmax()] if unknown.any() else blocks

    def _evict(self, count: int) -> None:
        """Free the `count` least recently used blocks; RuntimeError, and nothing changes, where fewer are cached."""
        pool, unused = self._pool, self._unused
        if count > pool.num_cached:
            raise RuntimeError(
                f"{count} blocks asked for over the {pool.num_free} free ones, {pool.num_cached} are cached"
            )
        while count:
            oldest = np.array([unused.popitem(last=False)[0] for _ in range(min(count, len(unused)))], dtype=np.int32)
            evicted = oldest[pool.refs(oldest) == 0]
            for block in evicted.tolist():
                del self._block_of[self._digest_of[block]]
            pool.forget(evicted)
            self._num_evictions += evicted.size
            count -= evicted.size
