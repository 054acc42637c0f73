"""What the scheduler asks of a policy."""

from __future__ import annotations

from typing import Protocol

from tsched.block_pool import BlockIds, BlockPool
from tsched.sequence import Ints, Sequence, SequenceTable


class Order(Protocol):
    """The waiting queue, and the rank among the running."""

    def add(self, sequence: Sequence) -> None:
        """A sequence that has just arrived, or that was preempted; `sequence.arrival` tells its place."""

    def head(self) -> Sequence | None:
        """Who is admitted next; None when nobody waits."""

    def remove(self, sequence: Sequence) -> None:
        """`sequence` no longer waits: it was admitted or aborted."""

    def victim(self, running: Ints, table: SequenceTable) -> int:
        """Which of `running` [n >= 2], the running rows in the order of admission, gives way first. Never the one
        that must be able to go on for the whole to progress."""

    def __len__(self) -> int: ...


class PrefixCache(Protocol):
    """The owner of the free blocks: what it keeps for later prefixes, it must give up when `allocate` asks."""

    def __init__(self, pool: BlockPool) -> None: ...

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give now."""

    def match(self, tokens: Ints) -> BlockIds:
        """Blocks that hold the keys and values of a prefix of `tokens` [n], shorter than n, now also the caller's."""

    def allocate(self, count: int) -> BlockIds:
        """[count] blocks, now the caller's."""

    def release(self, tokens: Ints, blocks: BlockIds) -> None:
        """Take back `blocks` [b], which hold the keys and values of `tokens` [n], n <= b * block_size, from the
        left.
        """


class Preemption(Protocol):
    def preempt(self, table: SequenceTable, row: int, cache: PrefixCache) -> Sequence:
        """Take the sequence in `row` off the table, with what is needed to go on later; its blocks go back to
        `cache`.
        """
