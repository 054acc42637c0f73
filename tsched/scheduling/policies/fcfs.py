"""First come, first served: the oldest request is admitted first, the newest gives way first."""

from __future__ import annotations

from tsched.scheduling.sequence import Sequence


class FirstComeFirstServed:
    """The key is the arrival, so nothing overtakes anything."""

    def key(self, sequence: Sequence) -> int:
        return sequence.arrival
