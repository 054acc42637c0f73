"""What of a machine's noise no library knows: how it drifts, and how times follow a yardstick.

Drift. Processes that follow each other are on a machine that drifts, and then a mean over them is less sure than their
number says: two runs of the same thing, ten processes each under 1/f noise, differ in 30% of tries at a level of 1%
(four figures), and in 78% where the noise is a random walk. So the drift is a variance component of its own. It is
estimated where it shows, in the slowest two waves of each series of processes (its cosine transform's first
coefficients, which of white noise hold no more than any others), pooled over the figures of a comparison, and carried
on over the length of both runs as a random walk would. That brings them to 3% and 1% (five processes: 10% and 41% to 4%
and 7%). Its price, where there is no drift: a change of 8 standard errors is found in 86% of tries instead of 99%.

The yardstick. What slows it slows a kernel by more or less: the more of a call two threads hand to one another, the
more; on two cores a swiglu's times rose by 0.9% for each 1% of the yardstick's, an attention's by 1.1%, a small norm's
by 2.0% and a product with a [512, 512] matrix by 0.6% (`experiments.stages.yardstick`). So the slope is estimated, from
each comparison's own processes, beginning at 1.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NUM_WAVES = 2

_TRIMMED, _TRIMMED_FROM = 0.2, 8
"""A fifth is left out at either end, of so many processes: of ten on a busy machine, one or two took half as long
again, or twice as long, for as long as they were measured. Of fewer, too few would be left.
"""


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


def trimmed_share(count: int) -> float:
    """Of `count` processes, the share that is left out at either end."""
    return _TRIMMED if count >= _TRIMMED_FROM else 0.0


def winsorized(values: Sequence[float]) -> list[float]:
    """In their order, those that a trimmed mean leaves out replaced by the nearest that it keeps."""
    import numpy as np
    from scipy.stats import mstats

    share = trimmed_share(len(values))
    return [float(value) for value in mstats.winsorize(np.array(values), (share, share))]


def slow_share(values: Sequence[float]) -> float:
    """The mean power of a series' slowest waves over that of all: 1 in the mean of white noise, (n - 1) / 2 at most.

    A series without any spread, or too short for slow and fast to be told apart, has 1.
    """
    from scipy.fft import dct

    values = winsorized(values)
    spread = statistics.variance(values) if len(values) > NUM_WAVES + 1 else 0.0
    if spread == 0:
        return 1.0
    waves = dct(values, norm="ortho")[1 : NUM_WAVES + 1]
    return statistics.fmean(float(wave) ** 2 for wave in waves) / spread


def drift_of(series: Sequence[Sequence[float]]) -> float:
    """How much more of the variance of `series` is slow than white noise would have: 0 or more, pooled over them."""
    return max(0.0, statistics.fmean(map(slow_share, series)) - 1) if series else 0.0


def carried_drift(count: int) -> float:
    """The variance that a random walk gives the difference of two adjacent means of `count`, over what white noise with
    slow waves like its own gives it: it is 2/3 n steps', that of the k-th wave 1 / (4 sin^2(pi k / 2n)) steps'.
    """
    waves = statistics.fmean(1 / (4 * math.sin(math.pi * k / (2 * count)) ** 2) for k in range(1, NUM_WAVES + 1))
    return 2 / 3 * count / waves * count / 2


@dataclass(frozen=True)
class Slope:
    """By how much the logarithm of a figure rises with the yardstick's, and the variance of that.

    levels: how far that between the levels of two runs may be from it, as a standard deviation. spent: how much of a
    degree of freedom of the figure's own processes went into it: 1 where they alone tell it, 0 where it is what was
    expected. What is left of them lies too close together by that much.
    """

    value: float
    variance: float
    levels: float = 0.0
    spent: float = 0.0

    def variance_between_runs(self, first: Sequence[float], second: Sequence[float]) -> float:
        """The variance of what is taken off the difference of two runs with these yardsticks."""
        moved = statistics.fmean(second) - statistics.fmean(first)
        within = sum(statistics.variance(winsorized(one)) / len(one) for one in (first, second))
        return moved**2 * self.variance + max(0.0, moved**2 - _AS_WITHIN**2 * within) * self.levels**2

    def take_off(self, figures: Sequence[float], yardsticks: Sequence[float]) -> list[float]:
        """What the yardstick does not explain."""
        return [figure - self.value * yardstick for figure, yardstick in zip(figures, yardsticks, strict=True)]


BESIDE, ELSEWHERE = Slope(1.0, 0.0, levels=0.25), Slope(1.0, 0.5**2)
"""With which arms follow others, whose processes took turns with theirs: at one place they do the same work, though
they may hand more or less of it to other threads; elsewhere it is other work. No process tells these: what is common to
all is lost in what each has of its own, which would draw a slope that is estimated to 0.
"""


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
    return Slope(value, 1 / precision, _LEVELS, 1 - prior / precision)
