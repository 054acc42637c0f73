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

import numpy as np

NUM_WAVES = 2

_TRIMMED, _TRIMMED_FROM = 0.2, 8
"""A fifth is left out at either end, of so many processes: of ten on a busy machine, one or two took half as long
again, or twice as long, for as long as they were measured. Of fewer, too few would be left.
"""

_NOISE = 0.01
"""Of a process's yardstick, as a standard deviation of logarithms: what moves less than that moves no figure. Counted
as movement, it draws slopes to 0: on one thread of a quiet machine, where figures moved between runs by 1.06 times what
the yardstick did, the median of 154 slopes within runs was 0.81, and with this 1.00.
"""

_AS_WITHIN = 3.0
"""Standard errors from which on the levels of two runs are another matter than what moves within them. A machine that
is steady within runs and another one between them shows no slope.
"""

_FAR = 7.0
"""Times the median distance from the slope: what lies farther, 4.7 standard deviations of normal noise, is left out."""

_ROUNDS = 20  # of a fixed point that is reached to 6 digits in 3 or 4


def slope_spread(threads: int | None = None) -> float:
    """How far slopes are from 1, as a standard deviation, before a comparison's own processes say more; and how far one
    between the levels of two runs is from that within them.

    Of pairs of runs whose yardsticks were 5 to 20% apart, they lay 0.12 from it on one thread (45 pairs, two ops). On
    several, what threads wait for one another is more of one call than of another: from 0.6 to 2.0 (four ops). Where
    these had 0.75, 1.9% of 2,000 simulated pairs of runs of the same were told apart on two loaded cores instead of
    2.4%, but 1.5% of equal arms on one thread instead of 1.1% (`simulated_experiments`).
    """
    return 0.15 if threads == 1 else 0.5


def trimmed_share(count: int) -> float:
    """Of `count` processes, the share that is left out at either end."""
    return _TRIMMED if count >= _TRIMMED_FROM else 0.0


def winsorized(values: Sequence[float]) -> list[float]:
    """In their order, those that a trimmed mean leaves out replaced by the nearest that it keeps."""
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

    spread: as of `slope_spread`. spent: how much of a degree of freedom of the figure's own processes went into it: 1
    where they alone tell it, 0 where it is what was expected. What is left of them lies too close together by as much.
    """

    value: float
    variance: float
    spread: float
    spent: float

    def variance_between_runs(self, first: Sequence[float], second: Sequence[float]) -> float:
        """The variance of what is taken off the difference of two runs with these yardsticks."""
        moved = statistics.fmean(second) - statistics.fmean(first)
        within = sum(statistics.variance(winsorized(one)) / len(one) for one in (first, second))
        return moved**2 * self.variance + max(0.0, moved**2 - _AS_WITHIN**2 * within) * self.spread**2

    def take_off(self, figures: Sequence[float], yardsticks: Sequence[float]) -> list[float]:
        """What the yardstick does not explain."""
        return [figure - self.value * yardstick for figure, yardstick in zip(figures, yardsticks, strict=True)]


def slope_of(groups: Sequence[tuple[Sequence[float], Sequence[float]]], spread: float) -> Slope:
    """The slope within groups of (figures, yardsticks), logarithms of the same processes, whose levels may be any.

    Least squares with a normal prior about 1, whose standard deviation is `spread`. What lies far off the slope weighs
    less (Tukey's bisquare), lest one disturbed process decide; the yardstick's own noise is no movement (`_NOISE`).
    """
    figures, yardsticks = (
        np.concatenate([np.array(group[which]) - statistics.median(group[which]) for group in groups])
        for which in (0, 1)
    )
    prior = 1 / spread**2
    value, precision = 1.0, prior
    for _ in range(_ROUNDS):
        residuals = np.abs(figures - value * yardsticks)
        usual = _FAR * float(np.median(residuals))
        weights = np.maximum(0.0, 1 - (residuals / usual) ** 2) ** 2 if usual > 0 else np.ones_like(residuals)
        moved = float(weights @ yardsticks**2)
        noise = float(weights.sum()) * _NOISE**2
        left = float(weights @ residuals**2) / max(len(residuals) - len(groups) - 1, 1)
        if left == 0 or moved <= noise:
            break
        share = 1 - noise / moved
        precision = share**2 * moved / left + prior
        value = (share * float(weights @ (figures * yardsticks)) / left + prior) / precision
    return Slope(value, 1 / precision, spread, 1 - prior / precision)
