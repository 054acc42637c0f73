"""What prefix caches count of their lookups."""

from __future__ import annotations

from tsched.scheduling.policies.base import CacheStats
from tsched.scheduling.sequence import Sequence


class Lookups:
    """Lookups and hits. A sequence that is looked up again and again because there is no room for it counts once."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._last: Sequence | None = None
        self._last_size = self._last_hits = 0
        self._num_lookups = 0
        self._lookup_blocks = 0
        self._hit_blocks = 0
        self._lookup_tokens = 0

    def record(self, sequence: Sequence, num_hits: int) -> None:
        """`num_hits` blocks of the sequence's were found."""
        if sequence is self._last and sequence.tokens.size == self._last_size:
            self._hit_blocks -= self._last_hits
        else:
            self._num_lookups += 1
            self._lookup_blocks += -(-sequence.tokens.size // self._block_size)
            self._lookup_tokens += sequence.tokens.size
            self._last, self._last_size = sequence, sequence.tokens.size
        self._last_hits = num_hits
        self._hit_blocks += num_hits

    def stats(self, num_evictions: int) -> CacheStats:
        return CacheStats(
            num_lookups=self._num_lookups,
            lookup_blocks=self._lookup_blocks,
            hit_blocks=self._hit_blocks,
            lookup_tokens=self._lookup_tokens,
            hit_tokens=self._hit_blocks * self._block_size,
            num_evictions=num_evictions,
        )
