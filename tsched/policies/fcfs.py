"""First come, first served: the oldest request is admitted first, the newest gives way first."""

from __future__ import annotations

from bisect import insort
from collections import deque

from tsched.sequence import Ints, Sequence, SequenceTable


class FirstComeFirstServed:
    """Waiting requests in the order of arrival. A preempted one takes its old place, so nothing overtakes it."""

    def __init__(self) -> None:
        self._waiting: deque[Sequence] = deque()

    def add(self, sequence: Sequence) -> None:
        waiting = self._waiting
        if not waiting or waiting[-1].arrival < sequence.arrival:
            waiting.append(sequence)
        elif sequence.arrival < waiting[0].arrival:
            waiting.appendleft(sequence)
        else:
            insort(waiting, sequence, key=lambda other: other.arrival)

    def head(self) -> Sequence | None:
        return self._waiting[0] if self._waiting else None

    def remove(self, sequence: Sequence) -> None:
        if self._waiting and self._waiting[0] is sequence:
            self._waiting.popleft()
        else:
            self._waiting.remove(sequence)

    def victim(self, running: Ints, table: SequenceTable) -> int:
        return int(running[-1])  # admission follows arrival, so the last admitted is the newest

    def __len__(self) -> int:
        return len(self._waiting)
