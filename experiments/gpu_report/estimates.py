"""What steps are reckoned to take, and how that is corrected by what steps took.

Where a figure was measured, it says so; no GPU was among what it was measured on, and the others are by reasoning. What
a report measures soon counts for more than any of them: see `Pace`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

START_S = 15.0
"""A server starts: on a machine whose disk cache is cold, importing torch, Triton and the house. 10 s on two busy
cores, measured."""

AGAIN_S = 8.0
"""Servers start whose modules are in the disk's cache."""

CONTEXT_S = 2.0
"""A process's first use of the device: a CUDA context, its libraries' handles, the first kernels' code."""

DRAW_S = 0.4
"""Inputs are drawn at a point: one core takes 0.05 to 0.5 s for most marked ones, measured."""

JUDGE_S = 0.6
"""The float64 oracle, the baseline and a variant run on them: some milliseconds, but seconds at the largest prefill."""

TIME_S = 0.7
"""The copies of a point's arguments that fill a cold cache, the graph of their calls, and 30 samples of it."""

CONFIG_S = 0.15
"""A config's kernel is loaded and timed: some 25 samples behind a flushed cache, of 60 us to 10 ms."""

COMPILE_S = 1.3
"""One config compiled on one core: 60 candidates of the marked kernels took Triton 3.7.1 between 0.1 and 2.3 s, 1.0 s
in the mean, for sm_90 (user and system time of one core, ptxas included); the rest makes what it is compiled on."""

RATES_S = 4.0
"""Copies of 4 GiB and products of 8192 x 8192 matrices, some 25 of each."""

RUNS_S = 1.5
"""1,000 runs of a call, each compared on the device: some 10 launches a run, queued by one core."""

DRAWN_S = 8.0
"""200 drawn cases of toy sizes, each against float64."""

BATCHED_S = 30.0
"""Batches of some ten sizes of four cases, whose kernels are compiled then: some ten at COMPILE_S each, on one core."""

SANITIZED_S = 25.0
"""A process under compute-sanitizer, which slows its kernels some tenfold, after a start without a cache."""

MODEL_S, BILLION_S = 11.0, 2.2
"""Steps of a whole model beside transformers': its import and the timings; and for every billion weights, 2 GB read
from the disk's cache twice."""

WEIGHT_S = 5.2e-9 + 2.0e-9
"""One random weight: drawn in 5.2 ns, measured on one core, and two bytes written at 1 GB/s."""

_PRIOR_S = 20.0
"""The estimates count as much as so many seconds of steps that took what they were reckoned to."""


@dataclass(frozen=True)
class Pace:
    """By how much steps take longer than reckoned, learned from those that came to their end.

    spent: kind -> (seconds by estimate, seconds that they took), all steps of the kind together.
    """

    spent: Mapping[str, tuple[float, float]]

    def ratio(self, kind: str) -> float:
        """What steps of this kind take over their estimate: of a kind that was rarely met, mostly what others take."""
        own, took_own = self.spent.get(kind, (0.0, 0.0))
        return (_PRIOR_S * self._overall + took_own) / (_PRIOR_S + own)

    @cached_property
    def _overall(self) -> float:
        reckoned, took = (_PRIOR_S + sum(sums[place] for sums in self.spent.values()) for place in range(2))
        return took / reckoned
