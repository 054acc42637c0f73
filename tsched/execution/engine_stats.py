"""Counts of what an engine has done, and the use of its pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from tsched.scheduling.policies.base import CacheStats
from tsched.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class PeakUse:
    """The pool's use at its peak since the last `reset`.

    Attributes:
        used_blocks: Blocks in use.
        last_page_waste: The fraction of their slots past their sequences' ends.
    """

    used_blocks: int = 0
    last_page_waste: float = 0.0

    def record(self, scheduler: Scheduler) -> None:
        """Records the pool's use where it is higher than before."""
        used = scheduler.pool.num_referenced
        if used > self.used_blocks:
            self.used_blocks = used
            self.last_page_waste = scheduler.last_page_waste()

    def reset(self) -> None:
        """Forgets the peak."""
        self.used_blocks, self.last_page_waste = 0, 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Sums since the engine was made, and the pool's use now and at its peak since the last reset."""

    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_finished: int
    num_forks: int
    num_blocks_swapped_out: int
    num_blocks_swapped_in: int
    num_blocks_copied: int  # because a fork wrote to a shared block
    num_running: int
    num_waiting: int
    num_blocks: int
    block_size: int
    num_used_blocks: int
    peak_used_blocks: int
    peak_occupancy: float  # fraction of all blocks in use at the peak
    last_page_waste: float  # fraction of the slots in use at the peak that are past their sequences' ends
    prefix_cache: CacheStats
    saved_bytes: int  # of keys and values that the prefix cache had
    num_states: int  # slots for states of sequences; 0 where no layer keeps states
    num_used_states: int  # slots in use
    num_kept_states: int  # slots kept only for later prefixes

    @classmethod
    def collect(cls, scheduler: Scheduler, peak: PeakUse, kv_bytes: int) -> Self:
        """Collects the stats of an engine whose blocks take `kv_bytes` in all."""
        counters, pool, cache_stats = scheduler.counters, scheduler.pool, scheduler.cache_stats()
        states = None if scheduler.states is None else scheduler.states.pool
        return cls(
            num_steps=counters.num_steps,
            num_prefill_tokens=counters.num_prefill_tokens,
            num_decode_tokens=counters.num_decode_tokens,
            num_output_tokens=counters.num_output_tokens,
            num_preemptions=counters.num_preemptions,
            num_finished=counters.num_finished,
            num_forks=counters.num_forks,
            num_blocks_swapped_out=counters.num_swapped_out,
            num_blocks_swapped_in=counters.num_swapped_in,
            num_blocks_copied=counters.num_copied,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            num_used_blocks=pool.num_referenced,
            peak_used_blocks=peak.used_blocks,
            peak_occupancy=peak.used_blocks / pool.num_blocks,
            last_page_waste=peak.last_page_waste,
            prefix_cache=cache_stats,
            saved_bytes=cache_stats.bytes_saved(kv_bytes // (pool.num_blocks * pool.block_size)),
            num_states=0 if states is None else states.num_blocks,
            num_used_states=0 if states is None else states.num_referenced,
            num_kept_states=0 if states is None else states.num_cached,
        )
