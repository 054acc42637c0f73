"""No prefix cache: every block is either one sequence's or free."""

from __future__ import annotations

import numpy as np

from tsched.block_pool import BlockIds, BlockPool
from tsched.sequence import Ints

_NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int32)


class NoPrefixCache:
    """Hands the pool's blocks through."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def num_available(self) -> int:
        return self._pool.num_free

    def match(self, tokens: Ints) -> BlockIds:
        return _NO_BLOCKS

    def allocate(self, count: int) -> BlockIds:
        return self._pool.allocate(count)

    def release(self, tokens: Ints, blocks: BlockIds) -> None:
        self._pool.free(blocks)
