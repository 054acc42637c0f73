"""The blocks of a paged KV cache, by number: which are free, which are kept for later prefixes, which are in use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BlockIds = NDArray[np.int32]

NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int32)


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, each with a count of references.

    A block is free, or cached (nobody refers to it, but the prefix cache keeps its content), or referenced; at any
    moment num_free + num_cached + num_referenced == num_blocks. Free ones form a stack, so a warm block is lent again
    first. Every call is a few array operations over the blocks that it names, whatever the number of all blocks; they
    are distinct [n] int32. Misuse (a block given back that nobody has, or named twice) raises RuntimeError and changes
    nothing: an error here, and not another request's garbled text later.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a block pool needs num_blocks >= 1 and block_size >= 1, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: BlockIds = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # block 0 on top
        self._num_free = num_blocks
        self._num_cached = 0
        self._refs = np.zeros(num_blocks, dtype=np.int32)
        self._kept = np.zeros(num_blocks, dtype=np.bool_)
        self._place = np.zeros(num_blocks, dtype=np.int32)  # scratch: where in a call's blocks each one stands

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Blocks without a reference whose content is kept."""
        return self._num_cached

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self._num_free - self._num_cached

    def blocks_for(self, num_tokens: int) -> int:
        """The blocks that `num_tokens` tokens of one sequence take."""
        return -(-num_tokens // self.block_size)

    def refs(self, blocks: BlockIds) -> NDArray[np.int32]:
        """[n] int32, the references to each of `blocks` [n], which may name a block twice."""
        return self._refs[blocks]

    def is_kept(self, blocks: BlockIds) -> NDArray[np.bool_]:
        """[n] bool, which of `blocks` [n] the prefix cache keeps, referenced or not."""
        return self._kept[blocks]

    def allocate(self, count: int) -> BlockIds:
        """[count] int32, free blocks with one reference now, the caller's; RuntimeError where fewer are free."""
        if count > self._num_free:
            raise RuntimeError(f"{count} blocks asked for, {self._num_free} of {self.num_blocks} are free")
        if count < 0:
            raise RuntimeError(f"{count} blocks asked for")
        self._num_free -= count
        blocks = self._free[self._num_free : self._num_free + count][::-1].copy()
        self._refs[blocks] = 1
        return blocks

    def share(self, blocks: BlockIds) -> None:
        """One more reference to each of `blocks`, which are cached or referenced."""
        refs = self._distinct(blocks, "shared")
        unused = refs == 0
        if unused.any():
            self._require(self._kept[blocks[unused]], blocks, "shared", "one is free")
            self._num_cached -= int(np.count_nonzero(unused))
        self._refs[blocks] = refs + 1

    def release(self, blocks: BlockIds) -> BlockIds:
        """One reference less to each of `blocks`, which are referenced. Returns those that are cached now; the others
        without a reference are free.
        """
        refs = self._distinct(blocks, "released")
        self._require(refs > 0, blocks, "released", "nobody refers to one")
        self._refs[blocks] = refs - 1
        unused = blocks[refs == 1]
        if unused.size == 0:
            return NO_BLOCKS
        kept = self._kept[unused]
        if not kept.any():
            self._push(unused)
            return NO_BLOCKS
        cached = unused[kept]
        self._num_cached += cached.size
        self._push(unused[~kept])
        return cached

    def keep(self, blocks: BlockIds) -> None:
        """The prefix cache keeps `blocks`, which are referenced and not kept yet, past their last reference."""
        refs = self._distinct(blocks, "kept")
        self._require((refs > 0) & ~self._kept[blocks], blocks, "kept", "nobody refers to one, or it is kept already")
        self._kept[blocks] = True

    def forget(self, blocks: BlockIds) -> None:
        """The prefix cache keeps `blocks` no longer; those without a reference are free now."""
        refs = self._distinct(blocks, "forgotten")
        self._require(self._kept[blocks], blocks, "forgotten", "one is not kept")
        self._kept[blocks] = False
        cached = blocks[refs == 0]
        self._num_cached -= cached.size
        self._push(cached)

    def _push(self, blocks: BlockIds) -> None:
        self._free[self._num_free : self._num_free + blocks.size] = blocks
        self._num_free += blocks.size

    def _distinct(self, blocks: BlockIds, verb: str) -> NDArray[np.int32]:
        """The references [n] to `blocks` [n]; RuntimeError where one is no block or is named twice."""
        # As uint32, so that a negative number is out of range and does not count from the end.
        index = blocks.astype(np.uint32, copy=False)
        try:
            refs = self._refs[index]
        except IndexError:
            raise RuntimeError(
                f"blocks {blocks.tolist()} cannot be {verb}: there are blocks 0 to {self.num_blocks - 1}"
            ) from None
        if blocks.size > 1:  # each block remembers its last place: two places of one block differ. No sort is needed
            places = np.arange(blocks.size, dtype=np.int32)
            self._place[index] = places
            self._require(self._place[index] == places, blocks, verb, "one is named twice")
        return refs

    def _require(self, fits: NDArray[np.bool_], blocks: BlockIds, verb: str, reason: str) -> None:
        if not fits.all():
            raise RuntimeError(f"blocks {blocks.tolist()} cannot be {verb}: {reason}")
