"""Preemption by recomputing: the victim's blocks are freed, its tokens are prefilled again when it is back."""

from __future__ import annotations

from tsched.policies.base import PrefixCache
from tsched.sequence import Sequence, SequenceTable


class Recompute:
    """Costs one prefill of prompt and output, and no memory."""

    def preempt(self, table: SequenceTable, row: int, cache: PrefixCache) -> Sequence:
        computed = min(int(table.computed[row]), int(table.known[row]))
        sequence, blocks = table.remove(row)
        sequence.num_preemptions += 1
        cache.release(sequence, blocks, computed)
        return sequence
