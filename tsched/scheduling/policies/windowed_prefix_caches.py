"""Prefix caches where every layer has a window: a hit needs the blocks that its next token sees, and none before them.

So each block is kept for itself, under its own digest or at its own node, and the one used least recently is evicted
wherever it stands in its history. Of the blocks that are given back together the earliest goes first: who comes back
with a whole history needs its end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items

import numpy as np

from tsched.scheduling.block_pool import NO_BLOCK, BlockIds, BlockPool
from tsched.scheduling.policies.base import CacheStats, Computed
from tsched.scheduling.policies.hash_prefix_cache import DIGEST_SIZE, BlockDigests
from tsched.scheduling.policies.run_cache import Lookups
from tsched.scheduling.policies.run_queue import eviction_batch
from tsched.scheduling.sequence import Sequence
from tsched.scheduling.window import Window


class WindowedPrefixCache(ABC):
    """What the caches share: all but how tokens lead to blocks.

    A sequence's blocks begin with its place `first_block`: `match` says where, and what `insert` and `release` are
    given begins there.
    """

    def __init__(self, pool: BlockPool, window: Window) -> None:
        self._pool = pool
        self._window = window
        # Kept blocks, the least recently used first; those that are in use again fall out when an eviction meets them.
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._batch = eviction_batch(pool)
        self._num_evictions = 0
        self._lookups = Lookups(pool.block_size)

    @abstractmethod
    def _find(self, sequence: Sequence, end: int) -> list[int]:
        """The kept blocks of the sequence's first `end` places, NO_BLOCK where none is; places at the end of which none
        is may be left out.
        """

    @abstractmethod
    def _add(self, sequence: Sequence, places: Items[int], blocks: Items[int]) -> None:
        """The `blocks` of the sequence's `places`, ascending, where none was kept, are kept from now on."""

    @abstractmethod
    def _remove(self, block: int) -> None:
        """`block` is kept no longer."""

    @property
    def num_available(self) -> int:
        return self._pool.num_free + self._pool.num_cached

    def match(self, sequence: Sequence, usable: Callable[[BlockIds], int] | None = None) -> BlockIds:
        """As any prefix cache's, but the blocks begin with `sequence.first_block`, which it sets. No layer keeps states
        beside windows, so there is no `usable`.
        """
        # Whoever is admitted runs a token at least.
        found = self._find(sequence, (sequence.tokens.size - 1) // self._pool.block_size)
        place = end = len(found)
        first = self._first_needed(end)
        while place > first:
            place -= 1
            if found[place] == NO_BLOCK:
                end, first = place, self._first_needed(place)
        blocks = np.array(found[first:end], dtype=np.int32)
        if blocks.size:
            self._pool.share(blocks)
            sequence.first_block = first
        self._lookups.record(sequence, end)
        return blocks

    def _first_needed(self, end: int) -> int:
        """The first block that a sequence needs to go on after its first `end` blocks, of which it needs one."""
        passed = int(self._window.count_passed(end * self._pool.block_size))
        return max(0, min(passed, end - 1))

    def allocate(self, count: int) -> BlockIds:
        missing = count - self._pool.num_free
        if missing > 0:
            self._evict(max(missing, min(missing + self._batch - 1, self._pool.num_cached)))
        return self._pool.allocate(count)

    def _evict(self, count: int) -> None:
        if count > self._pool.num_cached:
            raise RuntimeError(f"{count} blocks are to be evicted, {self._pool.num_cached} are cached")
        evicted: list[int] = []
        while len(evicted) < count:
            if not self._unused:
                raise RuntimeError("cached blocks wait in no queue: the cache's accounts are wrong")
            block, _ = self._unused.popitem(last=False)
            if self._pool.refs(np.array([block]))[0] == 0:
                self._remove(block)
                evicted.append(block)
        self._pool.forget(np.array(evicted, dtype=np.int32))
        self._num_evictions += count

    def insert(self, sequence: Sequence, blocks: BlockIds, num_computed: int) -> BlockIds:
        pool, first = self._pool, sequence.first_block
        end = num_computed // pool.block_size
        own = blocks[: max(end - first, 0)]
        fresh = np.flatnonzero(~pool.is_kept(own))
        if fresh.size == 0:
            return blocks
        places = (fresh + first).tolist()
        found = self._find(sequence, end)
        known = np.array([found[place] if place < len(found) else NO_BLOCK for place in places], dtype=np.int32)
        is_known = known != NO_BLOCK
        if np.count_nonzero(is_known):
            blocks = blocks.copy()
            pool.share(known[is_known])
            pool.release(own[fresh[is_known]])
            blocks[fresh[is_known]] = known[is_known]
        new = np.flatnonzero(~is_known)
        if new.size:
            added = own[fresh[new]]
            pool.keep(added)
            self._add(sequence, [places[i] for i in new.tolist()], added.tolist())
        return blocks

    def insert_each(self, computed: list[Computed]) -> list[BlockIds]:
        return [self.insert(*one) for one in computed]

    def release(self, sequence: Sequence, blocks: BlockIds, num_computed: int) -> None:
        for block in self._pool.release(self.insert(sequence, blocks, num_computed)).tolist():
            self._unused[block] = None
            self._unused.move_to_end(block)

    def release_each(self, left: list[Computed]) -> None:
        for one in left:
            self.release(*one)

    def stats(self) -> CacheStats:
        return self._lookups.stats(self._num_evictions)


class WindowedHashCache(BlockDigests, WindowedPrefixCache):
    """Digest -> block, for every block whose content is known."""

    def __init__(self, pool: BlockPool, window: Window) -> None:
        super().__init__(pool, window)
        self._draw_secret()
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def _find(self, sequence: Sequence, end: int) -> list[int]:
        digests = self._digests(sequence, end)
        return [self._block_of.get(_digest_at(digests, place), NO_BLOCK) for place in range(end)]

    def _add(self, sequence: Sequence, places: Items[int], blocks: Items[int]) -> None:
        digests = self._digests(sequence, places[-1] + 1)
        for place, block in zip(places, blocks, strict=True):
            digest = _digest_at(digests, place)
            self._block_of[digest], self._digest_of[block] = block, digest

    def _remove(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]


def _digest_at(digests: bytes, place: int) -> bytes:
    return digests[place * DIGEST_SIZE : (place + 1) * DIGEST_SIZE]


class _Node:
    """A block of tokens after those of its parent.

    tokens    of the block, as bytes; a root's are its salt
    block     NO_BLOCK where it is not kept, but one that comes after it is
    children  by their tokens
    parent    None at a root
    """

    __slots__ = ("block", "children", "parent", "tokens")

    def __init__(self, tokens: bytes, parent: _Node | None) -> None:
        self.tokens = tokens
        self.block = NO_BLOCK
        self.children: dict[bytes, _Node] = {}
        self.parent = parent


class WindowedRadixCache(WindowedPrefixCache):
    """Trees of blocks by their tokens, one for each salt: nothing can collide."""

    def __init__(self, pool: BlockPool, window: Window) -> None:
        super().__init__(pool, window)
        self._roots: dict[bytes, _Node] = {}
        self._node_of: dict[int, _Node] = {}

    def prepare(self, sequence: Sequence) -> None:
        pass  # the tokens are the key

    def adopt(self, child: Sequence, parent: Sequence) -> None:
        pass

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        pass

    def _find(self, sequence: Sequence, end: int) -> list[int]:
        node = self._roots.get(sequence.cache_salt)
        found: list[int] = []
        for tokens in self._split(sequence, end):
            node = None if node is None else node.children.get(tokens)
            if node is None:
                break
            found.append(node.block)
        return found

    def _add(self, sequence: Sequence, places: Items[int], blocks: Items[int]) -> None:
        block_at = dict(zip(places, blocks, strict=True))
        node = self._roots.setdefault(sequence.cache_salt, _Node(sequence.cache_salt, None))
        for place, tokens in enumerate(self._split(sequence, places[-1] + 1)):
            if tokens not in node.children:
                node.children[tokens] = _Node(tokens, node)
            node = node.children[tokens]
            if place in block_at:
                node.block = block_at[place]
                self._node_of[node.block] = node

    def _remove(self, block: int) -> None:
        node = self._node_of.pop(block)
        node.block = NO_BLOCK
        while node.block == NO_BLOCK and not node.children:
            if node.parent is None:
                del self._roots[node.tokens]
                break
            del node.parent.children[node.tokens]
            node = node.parent

    def _split(self, sequence: Sequence, end: int) -> Iterator[bytes]:
        """The tokens of each of the sequence's first `end` blocks."""
        width = self._pool.block_size * 8  # of int64
        data = sequence.tokens[: end * self._pool.block_size].tobytes()
        for start in range(0, len(data), width):
            yield data[start : start + width]
