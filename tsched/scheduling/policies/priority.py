"""By priority, lower numbers first, with ageing: a request that has waited long goes before a more urgent newcomer."""

from __future__ import annotations

from tsched.scheduling.sequence import Sequence

AGEING = 256  # one level of priority is worth so many later arrivals


class Priority:
    """The age is counted in arrivals and not in seconds, so that a key never changes: two requests keep their order
    for ever, whatever the moment, and only finitely many go before any one. A heap suffices.
    """

    def key(self, sequence: Sequence) -> int:
        return sequence.priority * AGEING + sequence.arrival
