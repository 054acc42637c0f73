"""What is counted during a simulation: sums, the times of requests, and levels over time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_BARS = "▁▂▃▄▅▆▇█"
_NUM_BINS = 64


def summarize_times(seconds: Sequence[float]) -> dict[str, float | None]:
    """mean, p50, p90 and p99: the shortest time that at least this share of all are no longer than. None of none."""
    if not seconds:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    p50, p90, p99 = np.quantile(seconds, (0.5, 0.9, 0.99), method="inverted_cdf").tolist()
    return {"mean": float(np.mean(seconds)), "p50": p50, "p90": p90, "p99": p99}


class OverTime:
    """A level over time, as the area under it at moments from 0 on."""

    def __init__(self) -> None:
        self._moments, self._areas = array("d", [0.0]), array("d", [0.0])

    def add(self, end: float, area: float) -> None:
        """`area` more lies under the level up to `end`, seconds, which is later than the last one."""
        self._moments.append(end)
        self._areas.append(self._areas[-1] + area)

    @property
    def mean(self) -> float:
        return self._areas[-1] / self._moments[-1] if self._moments[-1] else 0.0

    def means(self, num_bins: int = _NUM_BINS) -> list[float]:
        """One for each of `num_bins` equal parts of the time; none where there was no time."""
        if not self._moments[-1]:
            return []
        edges = np.linspace(0.0, self._moments[-1], num_bins + 1)
        means: list[float] = (np.diff(np.interp(edges, self._moments, self._areas)) / np.diff(edges)).tolist()
        return means


def sparkline(values: Sequence[float], top: float, width: int) -> str:
    """`values` as at most `width` bars, full at `top`; neighbours are averaged."""
    if not values or top <= 0:
        return ""
    means = [part.mean() for part in np.array_split(values, min(width, len(values)))]
    return "".join(_BARS[min(int(mean / top * len(_BARS)), len(_BARS) - 1)] for mean in means)


@dataclass(slots=True)
class Arrived:
    """When a request that is in the scheduler came, and when its first token did."""

    arrival: float
    input_len: int
    started: bool = False
    first_token: float | None = None


class Metrics:
    """Sums and distributions of one run. Time is the simulated clock's, in seconds."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.time_to_first_token, self.time_per_output_token, self.end_to_end = array("d"), array("d"), array("d")
        self.used = OverTime()  # blocks that sequences hold
        self.cached = OverTime()  # blocks that only the prefix cache holds
        self.running = OverTime()  # sequences
        self.peak_used = self.peak_running = 0
        self.lent_slot_seconds = self.filled_slot_seconds = 0.0
        self.num_requests = 0
        self.num_refused = 0
        self.num_finished = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.wanted_blocks = self.hit_blocks = self.hit_tokens = 0
        self.busy_seconds = self.idle_seconds = 0.0  # together the clock, but for its rounding
        self.clock = 0.0

    @property
    def busy_share(self) -> float:
        """Of the time, the share in which a step ran; 0 where there was no time."""
        total = self.busy_seconds + self.idle_seconds
        return self.busy_seconds / total if total else 0.0

    def start(self, request: Arrived, num_cached: int) -> None:
        """`request` was admitted for the first time, with `num_cached` tokens found in the prefix cache."""
        request.started = True
        self.wanted_blocks += -(-request.input_len // self._page_size)
        self.hit_blocks += num_cached // self._page_size
        self.hit_tokens += num_cached
        self.prompt_tokens += request.input_len

    def first_token(self, request: Arrived, moment: float) -> None:
        request.first_token = moment
        self.time_to_first_token.append(moment - request.arrival)

    def finish(self, request: Arrived, num_output: int, moment: float) -> None:
        """`request` got its last token."""
        self.num_finished += 1
        self.output_tokens += num_output
        self.end_to_end.append(moment - request.arrival)
        if num_output > 1 and request.first_token is not None:
            self.time_per_output_token.append((moment - request.first_token) / (num_output - 1))
