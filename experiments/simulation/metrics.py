"""What is counted during a simulation, in memory that does not grow with the trace."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_BARS = "▁▂▃▄▅▆▇█"


class Percentiles:
    """Quantiles of positive times, each right to a part in a thousand: a histogram whose buckets grow by that ratio.

    Times under a microsecond count as one, times over 1e9 s as that.
    """

    _LOW, _HIGH, _RATIO = 1e-6, 1e9, 1.002  # a value is at most half a bucket from its bucket's middle

    def __init__(self) -> None:
        self._log_ratio = math.log(self._RATIO)
        self._log_low = math.log(self._LOW)
        size = int((math.log(self._HIGH) - self._log_low) / self._log_ratio) + 1
        self._counts = np.zeros(size, dtype=np.int64)
        self.count = 0
        self.total = 0.0

    def add(self, value: float) -> None:
        """One time in seconds."""
        bounded = min(max(value, self._LOW), self._HIGH)
        place = int((math.log(bounded) - self._log_low) / self._log_ratio)
        self._counts[min(place, self._counts.size - 1)] += 1
        self.count += 1
        self.total += value

    def quantile(self, share: float) -> float | None:
        """The smallest time that at least `share` of all are no longer than; None where there is none."""
        if self.count == 0:
            return None
        rank = max(1, math.ceil(share * self.count))
        place = int(np.searchsorted(np.cumsum(self._counts), rank))
        return math.exp(self._log_low + (place + 0.5) * self._log_ratio)

    def summary(self) -> dict[str, float | None]:
        """mean, p50, p90 and p99, seconds."""
        mean = self.total / self.count if self.count else None
        return {"mean": mean, **{f"p{p}": self.quantile(p / 100) for p in (50, 90, 99)}}


class OverTime:
    """A level over time, as at most `num_bins` means; when they are full, two become one of twice the length."""

    def __init__(self, num_bins: int = 64) -> None:
        self._areas = [0.0] * num_bins
        self._width = 1e-3
        self._end = 0.0

    def add(self, start: float, end: float, level: float) -> None:
        """`level` from `start` to `end`, seconds; `start` is no earlier than the last `end`."""
        while end > self._width * len(self._areas):
            pairs = [a + b for a, b in zip(self._areas[::2], self._areas[1::2], strict=True)]
            self._areas = pairs + [0.0] * len(pairs)
            self._width *= 2
        place = int(start / self._width)
        while start < end:
            until = min(end, (place + 1) * self._width)
            self._areas[place] += level * (until - start)
            start = until
            place += 1
        self._end = max(self._end, end)

    @property
    def mean(self) -> float:
        return sum(self._areas) / self._end if self._end else 0.0

    @property
    def bin_seconds(self) -> float:
        return self._width

    def means(self) -> list[float]:
        """One per bin, from time 0; the last may be shorter than the others."""
        bins = math.ceil(self._end / self._width)
        return [self._areas[i] / (min((i + 1) * self._width, self._end) - i * self._width) for i in range(bins)]


def sparkline(values: Sequence[float], top: float, width: int) -> str:
    """`values` as at most `width` bars, full at `top`; neighbours are averaged."""
    if not values or top <= 0:
        return ""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
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
        self.time_to_first_token = Percentiles()
        self.time_per_output_token = Percentiles()
        self.end_to_end = Percentiles()
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
        self.time_to_first_token.add(moment - request.arrival)

    def finish(self, request: Arrived, num_output: int, moment: float) -> None:
        """`request` got its last token."""
        self.num_finished += 1
        self.output_tokens += num_output
        self.end_to_end.add(moment - request.arrival)
        if num_output > 1 and request.first_token is not None:
            self.time_per_output_token.add((moment - request.first_token) / (num_output - 1))
