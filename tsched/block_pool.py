"""The blocks of the paged KV cache, by number: which are free and which are lent out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BlockIds = NDArray[np.int32]


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. Free ones form a stack, so a warm block is lent again first.

    Taking and giving back are bounded by one array copy, whatever the number of blocks; a block that is given back
    twice, or that was never lent, is an error here and not another request's garbled text later.
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
        self._lent = np.zeros(num_blocks, dtype=np.bool_)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._num_free

    def blocks_for(self, num_tokens: int) -> int:
        """The blocks that `num_tokens` tokens of one sequence take."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> BlockIds:
        """[count] int32, blocks that are the caller's until freed; RuntimeError where fewer are free."""
        if count > self._num_free:
            raise RuntimeError(f"{count} blocks asked for, {self._num_free} of {self.num_blocks} are free")
        self._num_free -= count
        blocks = self._free[self._num_free : self._num_free + count][::-1].copy()
        self._lent[blocks] = True
        return blocks

    def free(self, blocks: BlockIds) -> None:
        """Give back `blocks` [n] int32; RuntimeError, and nothing changes, where one of them is not lent."""
        lent = self._lent[blocks]
        if not lent.all() or (blocks.size > 1 and np.unique(blocks).size != blocks.size):
            raise RuntimeError(f"blocks {blocks.tolist()} cannot be given back: one is not lent, or is named twice")
        self._lent[blocks] = False
        self._free[self._num_free : self._num_free + blocks.size] = blocks
        self._num_free += blocks.size
