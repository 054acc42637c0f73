"""No prefix cache: a block is in use or free."""

from __future__ import annotations

from collections.abc import Callable

from tsched.scheduling.block_pool import NO_BLOCKS, BlockIds, BlockPool
from tsched.scheduling.policies.base import CacheStats, Computed
from tsched.scheduling.sequence import Sequence


class NoPrefixCache:
    """Hands the pool's blocks through."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def num_available(self) -> int:
        return self._pool.num_free

    def prepare(self, sequence: Sequence) -> None:
        pass

    def adopt(self, child: Sequence, parent: Sequence) -> None:
        pass

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        pass

    def match(self, sequence: Sequence, usable: Callable[[BlockIds], int] | None = None) -> BlockIds:
        return NO_BLOCKS

    def allocate(self, count: int) -> BlockIds:
        return self._pool.allocate(count)

    def insert(self, sequence: Sequence, blocks: BlockIds, num_computed: int) -> BlockIds:
        return blocks

    def insert_each(self, computed: list[Computed]) -> list[BlockIds]:
        return [blocks for _, blocks, _ in computed]

    def release(self, sequence: Sequence, blocks: BlockIds, num_computed: int) -> None:
        self._pool.release(blocks)

    def release_each(self, left: list[Computed]) -> None:
        self._pool.release_each([blocks for _, blocks, _ in left])

    def stats(self) -> CacheStats:
        return CacheStats()
