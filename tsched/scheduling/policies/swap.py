"""Preemption by swapping: the victim's blocks are copied to host memory, and back before any newcomer is admitted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tsched.scheduling.block_pool import BlockIds
from tsched.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from tsched.scheduling.kv_memory import KVMemory


class Swap:
    """Costs two copies and host memory; without room there the victim is computed again."""

    def leave(self, sequence: Sequence, blocks: BlockIds, num_computed: int, memory: KVMemory) -> None:
        memory.swap_out(sequence, blocks, num_computed)
