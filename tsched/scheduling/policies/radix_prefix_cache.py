"""A prefix cache as a radix tree over tokens (RadixAttention, Zheng et al., "SGLang", 2023).

The tokens themselves are compared, whole runs at a time, so nothing can collide; each salt has a tree of its own.
"""

from __future__ import annotations

import numpy as np

from tsched.scheduling.block_pool import NO_BLOCKS, BlockIds, BlockPool
from tsched.scheduling.policies.run_cache import RunCache
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


class RadixPrefixCache(RunCache[_Node]):
    """Trees of runs of blocks, one for each salt."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self._width = pool.block_size * 8  # bytes of a block's tokens, which are int64
        self._roots: dict[bytes, _Node] = {}

    def prepare(self, sequence: Sequence) -> None:
        pass  # the tokens are the key

    def adopt(self, child: Sequence, parent: Sequence) -> None:
        pass

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        pass

    def _find(self, sequence: Sequence, start: int, end: int, before: _Node | None) -> tuple[BlockIds, _Node | None]:
        node = before if before is not None else self._roots.get(sequence.cache_salt)
        if node is None:
            return NO_BLOCKS, None
        return self._walk(node, start - node.first, self._tokens(sequence, start, end))

    def _append(self, sequence: Sequence, start: int, blocks: BlockIds, parent: _Node | None) -> _Node:
        if parent is None:
            parent = self._roots.get(sequence.cache_salt)
        if parent is None:
            parent = self._roots[sequence.cache_salt] = _Node(0, sequence.cache_salt, NO_BLOCKS, None)
        child = _Node(start, self._tokens(sequence, start, start + blocks.size), blocks, parent)
        parent.children[child.tokens[: self._width]] = child
        return child

    def _has_first_of(self, sequence: Sequence) -> bool:
        root = self._roots.get(sequence.cache_salt)
        return root is not None and self._tokens(sequence, 0, 1) in root.children

    def _is_leaf(self, node: _Node) -> bool:
        return not node.children

    def _extend(self, leaf: _Node, sequence: Sequence, blocks: BlockIds) -> None:
        size = leaf.blocks.size
        start = leaf.first + size
        leaf.tokens = leaf.tokens[: size * self._width] + self._tokens(sequence, start, start + blocks.size)
        leaf.blocks = np.concatenate((leaf.blocks, blocks))

    def _tokens(self, sequence: Sequence, start: int, end: int) -> bytes:
        """Those of the sequence's blocks from place `start` to `end`."""
        return sequence.tokens[start * self._pool.block_size : end * self._pool.block_size].tobytes()

    def _walk(self, node: _Node, taken: int, tokens: bytes) -> tuple[BlockIds, _Node]:
        """Down from the first `taken` blocks of `node` along `tokens`, whole blocks of them: the blocks found [n], and
        the last node reached.
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
        return np.concatenate(found) if found else NO_BLOCKS, node

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
        parent = node.parent
        if parent is None:
            raise RuntimeError("a root has no blocks to part")
        width, cut = self._width, count * self._width
        head = _Node(node.first, node.tokens[:cut], node.blocks[:count], parent)
        parent.children[head.tokens[:width]] = head
        node.first, node.tokens, node.blocks = head.first + count, node.tokens[cut:], node.blocks[count:]
        node.parent, head.children[node.tokens[:width]] = head, node
        return head

    def _cut(self, leaf: _Node, size: int) -> None:
        leaf.blocks = leaf.blocks[:size]
        if 2 * size * self._width <= len(leaf.tokens):  # rarely, so that cutting block by block copies each token once
            leaf.tokens = leaf.tokens[: size * self._width]

    def _remove(self, leaf: _Node) -> None:
        parent = leaf.parent
        if parent is None:
            raise RuntimeError("a root has no blocks to take")
        del parent.children[leaf.tokens[: self._width]]
        if parent.parent is None and not parent.children:
            del self._roots[parent.tokens]
