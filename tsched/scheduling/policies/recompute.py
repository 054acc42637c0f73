"""Preemption by recomputing: the victim's blocks are freed, its tokens are prefilled again when it is back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tsched.scheduling.block_pool import BlockIds
from tsched.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from tsched.scheduling.kv_memory import KVMemory


class Recompute:
    """Costs one prefill of prompt and output, and no memory."""

    def leave(self, sequence: Sequence, blocks: BlockIds, num_computed: int, memory: KVMemory) -> None:
        pass
