"""The sequences that wait for a row, in the order in which they get one."""

from __future__ import annotations

import heapq

from tsched.scheduling.sequence import Sequence


class WaitingQueue:
    """A heap by `Sequence.rank`: swapped ones first, then by key. O(log n) each; removal is lazy.

    The rank of a sequence must not change while it waits here.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[bool, int, int], int, Sequence]] = []
        self._tickets: dict[int, int] = {}  # sequence id -> the ticket of its entry that counts
        self._num_tickets = 0

    def add(self, sequence: Sequence) -> None:
        self._num_tickets += 1
        self._tickets[sequence.id] = self._num_tickets
        heapq.heappush(self._heap, (sequence.rank, self._num_tickets, sequence))

    def head(self) -> Sequence | None:
        """Who is admitted next; None where nobody waits."""
        heap = self._heap
        while heap:
            _, ticket, sequence = heap[0]
            if self._tickets.get(sequence.id) == ticket:
                return sequence
            heapq.heappop(heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        """`sequence` no longer waits. KeyError where it does not wait here."""
        del self._tickets[sequence.id]
        if len(self._heap) > 2 * len(self._tickets) + 64:  # most entries are dead: forget them, at O(1) a removal
            self._heap = [entry for entry in self._heap if self._tickets.get(entry[2].id) == entry[1]]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._tickets)
