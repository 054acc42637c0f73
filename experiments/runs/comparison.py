"""Whether two samples of processes differ, with a drifting machine counted in.

A value is the logarithm of one process's figure, so that a difference is a ratio. Samples within a process follow each
other and say little more than one of them: identical runs that were compared by those came out different in 21 of 23
tries. So the process is the unit, and at least MIN_REPLICATES of them are asked for.

The tests are Student's, on means of logarithms: with equal numbers their size holds at five processes for heavy tails
and for skewed ones, which the tests of this module try. But processes that follow each other are on a machine that
drifts, and then a mean over them is less sure than their number says: two runs of the same thing, ten processes each
under 1/f noise, differ in 46% of tries at a level of 1% (four figures). The drift is therefore a variance component of
its own. It is estimated where it shows, in the slowest two waves of each series of processes (its cosine transform's
first coefficients, which of white noise hold no more than any others), pooled over the figures of a comparison, and
carried on over the length of both runs as a random walk would. That brings the 46% to 2%, and costs nothing where there
is no drift.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from experiments.runs.student import quantile, two_sided

MIN_REPLICATES = 5

LEVEL = 0.01
"""Of a false alarm in any figure of one comparison: 1%, so that of 40 comparisons of equals less than one has any."""

POWER = 0.95
"""With which the smallest effect is found that a comparison "could have seen"."""

_WAVES = 2

Outcome = Literal["better", "worse", "within noise", "cannot tell"]
Better = Literal["lower", "higher"]


@dataclass(frozen=True)
class Difference:
    """Of two means of logarithms, the second's less the first's; with the variance's degrees of freedom."""

    mean: float
    variance: float
    df: float

    @property
    def p(self) -> float:
        """How likely a difference this large is between equals."""
        if self.variance == 0:
            return 1.0 if self.mean == 0 else 0.0
        return two_sided(self.mean / math.sqrt(self.variance), self.df)


@dataclass(frozen=True)
class Effect:
    """What a comparison says of one figure. ratio: of the second to the first, a geometric mean over processes; low,
    high: its interval, at the level at which it was judged; smallest: the ratio less 1 that it would have found with
    probability POWER. All but ratio are None where it cannot tell.
    """

    outcome: Outcome
    ratio: float
    low: float | None = None
    high: float | None = None
    smallest: float | None = None


def slow_share(values: Sequence[float]) -> float:
    """The mean power of a series' slowest waves over that of all: 1 in the mean of white noise, (n - 1) / 2 at most.

    A series without any spread, or too short for slow and fast to be told apart, has 1.
    """
    count = len(values)
    spread = statistics.variance(values) if count > _WAVES + 1 else 0.0
    if spread == 0:
        return 1.0
    waves = [
        math.sqrt(2 / count) * sum(v * math.cos(math.pi * k * (i + 0.5) / count) for i, v in enumerate(values))
        for k in range(1, _WAVES + 1)
    ]
    return statistics.fmean(wave * wave for wave in waves) / spread


def drift_of(series: Sequence[Sequence[float]]) -> float:
    """How much more of the variance of `series` is slow than white noise would have: 0 or more, pooled over them."""
    return max(0.0, statistics.fmean(map(slow_share, series)) - 1) if series else 0.0


def between_runs(first: Sequence[float], second: Sequence[float], drift: float) -> Difference:
    """Two runs, one after the other, at least two values each, in the order in which they were taken.

    The white part is Welch's. `drift` is what goes on from one run into the other: a random walk whose slow waves hold
    (1 + drift) times their share moves the difference of two adjacent means by `_carried` times that (its variance is
    2/3 n steps', that of the k-th wave 1 / (4 sin^2(pi k / 2n)) steps').
    """
    parts = [statistics.variance(values) / len(values) for values in (first, second)]
    white = sum(parts)
    count = min(len(first), len(second))
    slow = white * drift * _carried(count)
    return Difference(
        statistics.fmean(second) - statistics.fmean(first),
        white + slow,
        # Two slow waves of each run: of all figures together, which drift together.
        _freedom([(parts[0], len(first) - 1), (parts[1], len(second) - 1), (slow, 2 * _WAVES)]),
    )


def paired(differences: Sequence[float], drift: float) -> Difference:
    """Two arms of one run: at least two differences, one from each replicate, whose processes followed each other.

    What both share cancels; `drift` is that of the differences, whose mean over a longer time is meant.
    """
    count = len(differences)
    white = statistics.variance(differences) / count
    freedom = _freedom([(white, count - 1), (white * drift, _WAVES)])
    return Difference(statistics.fmean(differences), white * (1 + drift), freedom)


def judge(differences: Mapping[str, Difference], better: Mapping[str, Better]) -> dict[str, Effect]:
    """Every figure of one comparison, by name: LEVEL holds for all of them together (Holm, 1979).

    `better`: whether a figure's lower or its higher values are.
    """
    effects: dict[str, Effect] = {}
    names = sorted(differences, key=lambda name: differences[name].p)
    level, found = LEVEL, True
    for place, name in enumerate(names):
        one = differences[name]
        if found:
            level = LEVEL / (len(names) - place)
            found = one.p < level
        outcome: Outcome = "within noise"
        if found:
            outcome = "better" if (one.mean < 0) == (better[name] == "lower") else "worse"
        error = math.sqrt(one.variance)
        edge = quantile(level, one.df) * error
        # One-sided: on its own side of zero, 5% of tries fall short.
        smallest = edge + quantile(2 * (1 - POWER), one.df) * error
        bounds = [_ratio(exponent) for exponent in (one.mean - edge, one.mean + edge, smallest)]
        effects[name] = Effect(outcome, _ratio(one.mean), bounds[0], bounds[1], bounds[2] - 1)
    return {name: effects[name] for name in differences}


def _ratio(exponent: float) -> float:
    """Of a difference of logarithms; beyond what a float holds, infinity."""
    return math.exp(exponent) if exponent < 700 else math.inf


def _carried(count: int) -> float:
    """The variance that a random walk gives the difference of two adjacent means of `count`, over what white noise with
    slow waves like its own gives it.
    """
    waves = statistics.fmean(1 / (4 * math.sin(math.pi * k / (2 * count)) ** 2) for k in range(1, _WAVES + 1))
    return 2 / 3 * count / waves * count / 2


def _freedom(parts: Sequence[tuple[float, float]]) -> float:
    """Of a sum of variances with degrees of freedom each (Welch and Satterthwaite); of no variance at all, 1."""
    squares = sum(variance**2 / df for variance, df in parts)
    return sum(variance for variance, _ in parts) ** 2 / squares if squares else 1.0
