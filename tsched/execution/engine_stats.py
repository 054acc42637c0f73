"""What an engine has done, and how full its pool was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from tsched.scheduling.policies.base import CacheStats
from tsched.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class PeakUse:
    """The pool when most of it was lent, since the last `reset`."""

    used_blocks: int = 0
    last_page_waste: float = 0.0

    def record(self, scheduler: Scheduler) -> None:
        used = scheduler.pool.num_referenced
        if used > self.used_blocks:
            self.used_blocks = used
            self.last_page_waste = scheduler.last_page_waste()

    def reset(self) -> None:
        self.used_blocks, self.last_page_waste = 0, 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Sums since the engine was made, the pool as it is, and as it was when most of it was lent since the peak was last
    forgotten.
    """

    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_finished: int
    num_forks: int
    num_blocks_swapped_out: int
    num_blocks_swapped_in: int
    num_blocks_copied: int  # on write
    num_running: int
    num_waiting: int
    num_blocks: int
    block_size: int
    num_used_blocks: int
    peak_used_blocks: int
    peak_occupancy: float  # of all blocks, the fraction lent at the peak
    last_page_waste: float  # of the slots lent at the peak, the fraction past their sequences' ends
    prefix_cache: CacheStats
    saved_bytes: int  # of keys and values that were found in the prefix cache
    num_states: int  # slots for states of sequences; 0 where no layer keeps states
    num_used_states: int  # of these, in use
    num_kept_states: int  # and those that are kept for later prefixes alone

    @classmethod
    def collect(cls, scheduler: Scheduler, peak: PeakUse, kv_bytes: int) -> Self:
        """Of an engine whose blocks take `kv_bytes` in all."""
        counters, pool, found = scheduler.counters, scheduler.pool, scheduler.cache_stats()
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
            prefix_cache=found,
            saved_bytes=found.bytes_saved(kv_bytes // (pool.num_blocks * pool.block_size)),
            num_states=0 if states is None else states.num_blocks,
            num_used_states=0 if states is None else states.num_referenced,
            num_kept_states=0 if states is None else states.num_cached,
        )
