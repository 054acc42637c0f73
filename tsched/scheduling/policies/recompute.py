"""Preemption by recomputing: the victim's blocks are freed, its tokens are prefilled again when it is back."""

from __future__ import annotations

from tsched.scheduling.sequence import Holding


class Recompute:
    """Costs one prefill of prompt and output, and no memory."""

    def moves_to_host(self, held: Holding) -> bool:
        return False
