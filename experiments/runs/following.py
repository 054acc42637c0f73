"""How a figure follows the yardstick, and what is left of it when that is taken off.

A slow machine slows a small matrix product less than an attention that the memory decides: on two cores that a dozen
processes shared, within runs of ten processes, prefill's times rose by 2.4% for each 1% of the yardstick's, and a
swiglu's by 1.5%. So the slope is estimated, from each comparison's own processes, beginning at 1. Taken off with that
of 36 runs together, prefill's spread within them was 4.6% instead of 10.5% (with a slope of 1: 7.1%), that of their
levels 2.4% instead of 5.8% (3.8%).
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.runs.comparison import winsorized

_EXPECTED, _SPREAD = 1.0, 0.5
"""Of slopes, before any is known: where the yardstick hardly moves, nothing else is to be had."""

_LEVELS, _AS_WITHIN = 1.0, 3.0
"""How far the slope between the levels of two runs may be from that within them, as a standard deviation, and from how
many standard errors on levels are another matter than what moves within. A machine that is steady within runs and
another one between them shows no slope: the yardstick's own noise draws it to 0, and a level 10% away was taken for
another figure in 920 of 1,000 simulated tries (slope 2.4, four figures, ten processes), with this in none. Of
40 repetitions of `tests.experiments.runs.false_alarms` on two idle cores, whose levels were 1.4% apart in the median
and 7.7% at most, all found a variant that took 15% longer, with this and without; the smallest change seen rose from
8.4% to 8.9%. With 1.4 and 2 standard errors, 38 of them did.
"""

_ROUNDS = 20  # of a fixed point that is reached to 6 digits in 3 or 4


@dataclass(frozen=True)
class Slope:
    """By how much the logarithm of a figure rises with the yardstick's, and the variance of that."""

    value: float
    variance: float

    def between_runs(self, first: Sequence[float], second: Sequence[float]) -> float:
        """The variance of what is taken off the difference of two runs with these yardsticks."""
        moved = statistics.fmean(second) - statistics.fmean(first)
        within = sum(statistics.variance(winsorized(one)) / len(one) for one in (first, second))
        return moved**2 * self.variance + max(0.0, moved**2 - _AS_WITHIN**2 * within) * _LEVELS**2

    def taken_off(self, figures: Sequence[float], yardsticks: Sequence[float]) -> list[float]:
        """What the yardstick does not explain."""
        return [figure - self.value * yardstick for figure, yardstick in zip(figures, yardsticks, strict=True)]


def slope_of(groups: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Slope:
    """The slope within groups of (figures, yardsticks), logarithms of the same processes, whose levels may be any.

    Least squares with a normal prior; what the trimmed means leave out is drawn in here too, figures and yardsticks
    apart, lest one disturbed process decide.
    """
    xx = xy = yy = 0.0
    count = 0
    for figures, yardsticks in groups:
        ys, xs = winsorized(figures), winsorized(yardsticks)
        y_mean, x_mean = statistics.fmean(ys), statistics.fmean(xs)
        xx += sum((x - x_mean) ** 2 for x in xs)
        yy += sum((y - y_mean) ** 2 for y in ys)
        xy += sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
        count += len(ys) - 1
    prior = 1 / _SPREAD**2
    value, precision = _EXPECTED, prior
    for _ in range(_ROUNDS):
        left = (yy - 2 * value * xy + value**2 * xx) / max(count - 1, 1)
        if left <= 0 or xx == 0:
            break
        precision = xx / left + prior
        value = (xy / left + _EXPECTED * prior) / precision
    return Slope(value, 1 / precision)
