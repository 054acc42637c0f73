"""Preemption by swapping: the victim's blocks are copied to host memory, and back before any newcomer is admitted."""

from __future__ import annotations

from tsched.scheduling.sequence import Holding


class Swap:
    """Costs two copies and host memory; without room there the victim is computed again."""

    def moves_to_host(self, held: Holding) -> bool:
        return True
