"""A worker's deaths and the counts over its lives: when the next one starts, and what all of them did together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tsched.serving.engine_client import StatsSnapshot

MOST_DEATHS = 5
DEATHS_WINDOW_S = 600.0
LONGEST_DELAY_S = 30.0

_SUMS = (
    "num_steps", "num_prompt_tokens", "num_output_tokens", "num_preemptions", "num_cache_queries", "num_cache_hits",
)  # fmt: skip
"""The fields of a StatsSnapshot that only grow; a new worker counts from 0."""


def restart_delay(deaths: Sequence[float], now: float) -> float | None:
    """Seconds to wait before the next start: 1, 2, 4 and so on, 30 at most; None is to give up.

    Args:
        deaths: When workers died, the last one included, in seconds.
        now: On the same clock.
    """
    recent = sum(now - death <= DEATHS_WINDOW_S for death in deaths)
    return None if recent > MOST_DEATHS else min(LONGEST_DELAY_S, 2.0 ** max(0, recent - 1))


def longest_load(first: float, stall_timeout: float) -> float:
    """Seconds that a later worker has to get ready: it may have to compile what the first one found compiled.

    Args:
        first: Seconds that the first one took.
        stall_timeout: Seconds without a step after which a worker is taken for hung.
    """
    return stall_timeout + 4 * first


def add_counts(before: StatsSnapshot | None, now: StatsSnapshot) -> StatsSnapshot:
    """The snapshot `now` with the sums of both."""
    if before is None:
        return now
    sums: dict[str, Any] = {name: getattr(before, name) + getattr(now, name) for name in _SUMS}
    phases = {name: before.phase_seconds.get(name, 0.0) + value for name, value in now.phase_seconds.items()}
    return replace(now, **sums, phase_seconds={**before.phase_seconds, **phases})


def forget_counts(stats: StatsSnapshot) -> StatsSnapshot:
    """The snapshot of a worker that has just begun in the place of the one that left `stats`."""
    sums: dict[str, Any] = dict.fromkeys(_SUMS, 0)
    return replace(stats, **sums, phase_seconds={})
