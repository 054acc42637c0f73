"""A prefix cache as a radix tree over tokens (RadixAttention, Zheng et al., "SGLang", 2023).

The tokens themselves are compared, whole runs at a time, so nothing can collide; each salt has a tree of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tsched.scheduling.block_pool import NO_BLOCKS, BlockIds, BlockPool
from tsched.scheduling.policies.base import CacheStats
from tsched.scheduling.policies.lookups import Lookups
from tsched.scheduling.policies.run_queue import RunQueue
from tsched.scheduling.sequence import Sequence


class _Node:
    """A run of blocks that follow each other, with what may come after it.

    first     blocks before it, from the root on
    tokens    the run's tokens, as bytes; past `blocks`, those of blocks evicted since, until the next cut
    blocks    [n] int32, n >= 1; none at a root
    children  by the bytes of their first block's tokens
    parent    None at a root, whose `tokens` are its salt
    """

    __slots__ = ("blocks", "children", "first", "parent", "tokens")

    def __init__(self, first: int, tokens: bytes, blocks: BlockIds, parent: _Node | None) -> None:
        self.first = first
        self.tokens = tokens
        self.blocks = blocks
        self.children: dict[bytes, _Node] = {}
        self.parent = parent


class RadixPrefixCache:
    """Trees of runs of blocks; a run is split, between blocks, where sequences part.

    Eviction takes the last blocks of the least recently used leaf.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._width = pool.block_size * 8  # bytes of a block's tokens, which are int64
        self._roots: dict[bytes, _Node] = {}
        self._node_of: dict[int, _Node] = {}  # by the number of the node's first block
        self._first_of = np.zeros(pool.num_blocks, dtype=np.int32)  # each kept block's node, by its first block
        self._unused = RunQueue(pool, self._trim)
        self._lookups = Lookups(pool.block_size)

    @property
    def num_available(self) -> int:
        return self._pool.num_free + self._pool.num_cached

    def prepare(self, sequence: Sequence) -> None:
        pass  # the tokens are the key

    def adopt(self, child: Sequence, parent: Sequence) -> None:
        pass

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        pass

    def match(self, sequence: Sequence, usable: Callable[[BlockIds], int] | None = None) -> BlockIds:
        blocks = NO_BLOCKS
        root = self._roots.get(sequence.cache_salt)
        if root is not None:
            count = (sequence.tokens.size - 1) // self._pool.block_size
            blocks = self._walk(root, 0, sequence.tokens[: count * self._pool.block_size].tobytes())[0]
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
        # The blocks that are kept came out of the tree, and so did all before them.
        start = int(np.count_nonzero(pool.is_kept(blocks[:end])))
        if start == end:
            return blocks
        if start:
            node = self._node(blocks[start - 1])
        else:
            node = self._roots.setdefault(sequence.cache_salt, _Node(0, sequence.cache_salt, NO_BLOCKS, None))
        tokens = sequence.tokens[start * pool.block_size : end * pool.block_size].tobytes()
        known, node, taken = self._walk(node, start - node.first, tokens)
        if known.size:
            pool.share(known)
            pool.release(blocks[start : start + known.size])
            blocks = np.concatenate((blocks[:start], known, blocks[start + known.size :]))
        # A block that a fork has too waits for the last who has it: the others may have other blocks before it.
        new = pool.prefix_before_shared(blocks[start + known.size : end]).copy()
        if new.size:
            pool.keep(new)
            if taken < node.blocks.size:
                node = self._split(node, taken)
            at = known.size * self._width
            self._append(node, tokens[at : at + new.size * self._width], new)
        elif node.parent is None and not node.children:
            del self._roots[sequence.cache_salt]
        return blocks

    def release(self, sequence: Sequence, blocks: BlockIds, num_computed: int) -> None:
        cached = self._pool.release(self.insert(sequence, blocks, num_computed))
        if cached.size:
            self._unused.touch(self._node(cached[-1]))

    def stats(self) -> CacheStats:
        return self._lookups.stats(self._unused.num_evictions)

    def _node(self, block: np.int32) -> _Node:
        """The node that holds the kept `block`."""
        return self._node_of[int(self._first_of[block])]

    def _walk(self, node: _Node, taken: int, tokens: bytes) -> tuple[BlockIds, _Node, int]:
        """Down from the first `taken` blocks of `node` along `tokens`, whole blocks of them: the blocks found [n], the
        last node reached and how many of its blocks have been passed.
        """
        width, place = self._width, 0
        found: list[BlockIds] = []
        while place < len(tokens):
            if taken == node.blocks.size:
                child = node.children.get(tokens[place : place + width])
                if child is None:
                    break
                node, taken = child, 0
            same = self._count_same(node, taken, tokens, place)
            found.append(node.blocks[taken : taken + same])
            taken += same
            place += same * width
            if taken < node.blocks.size:
                break
        return np.concatenate(found) if found else NO_BLOCKS, node, taken

    def _count_same(self, node: _Node, start: int, tokens: bytes, place: int) -> int:
        """How many of the node's blocks from its `start` on have the tokens that follow `place` in `tokens`."""
        width, size = self._width, node.blocks.size
        if start == 0 and tokens.startswith(node.tokens, place):
            return size
        count = min((size - start) * width, len(tokens) - place) // 8
        run = np.frombuffer(node.tokens, np.int64, count, start * width)
        differs = run != np.frombuffer(tokens, np.int64, count, place)
        same = int(differs.argmax()) if differs.any() else count
        return same * 8 // width

    def _split(self, node: _Node, count: int) -> _Node:
        """Part `node` after its first `count` blocks and return the node of those, new; the old one is now its child,
        with its place in the order of use.
        """
        parent = node.parent
        if parent is None:
            raise RuntimeError("a root has no blocks to part")
        width, cut = self._width, count * self._width
        head = _Node(node.first, node.tokens[:cut], node.blocks[:count], parent)
        parent.children[head.tokens[:width]] = head
        self._node_of[int(head.blocks[0])] = head
        node.first, node.tokens, node.blocks, node.parent = (
            head.first + count,
            node.tokens[cut:],
            node.blocks[count:],
            head,
        )
        head.children[node.tokens[:width]] = node
        self._note(node)
        return head

    def _append(self, node: _Node, tokens: bytes, blocks: BlockIds) -> None:
        """Let `blocks` with `tokens` follow all of `node`."""
        child = _Node(node.first + node.blocks.size, tokens, blocks, node)
        node.children[tokens[: self._width]] = child
        self._note(child)

    def _note(self, node: _Node) -> None:
        self._first_of[node.blocks.astype(np.intp)] = node.blocks[0]
        self._node_of[int(node.blocks[0])] = node

    def _trim(self, leaf: _Node, count: int) -> None:
        """Take the last `count` blocks from `leaf`, and the leaf from the tree when none is left."""
        parent, first = leaf.parent, leaf.blocks[0]
        leaf.blocks = leaf.blocks[:-count]
        size = leaf.blocks.size * self._width
        if size == 0 and parent is not None:
            del parent.children[leaf.tokens[: self._width]], self._node_of[int(first)]
            if parent.parent is None and not parent.children:
                del self._roots[parent.tokens]
        elif 2 * size <= len(leaf.tokens):  # rarely, so that trimming block by block copies each token once
            leaf.tokens = leaf.tokens[:size]
