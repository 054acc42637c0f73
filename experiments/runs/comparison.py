"""Whether two samples of processes differ, with a drifting machine counted in.

A value is the logarithm of one process's figure, so that a difference is a ratio. Samples within a process follow each
other and say little more than one of them: identical runs that were compared by those came out different in 21 of 23
tries. So the process is the unit, and at least MIN_REPLICATES of them are asked for.

The tests are Student's, on trimmed means of logarithms: with equal numbers their size holds at five processes for heavy
tails and for skewed ones, which the tests of this module try. What the machine does from process to process is in
`experiments.runs.drift`. What stays as it is for the length of a run, and leaves no trace within it, is RUN_SPREAD.

Arms of one run need less: what slows all of a replicate's processes down cancels.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from experiments.runs.drift import NUM_WAVES, carried_drift, trimmed_share, winsorized
from experiments.runs.table import Better

MIN_REPLICATES = 5

LEVEL = 0.005
"""Of a false alarm in any figure of one comparison, as the tests are made; half of the 1% that is promised, for what a
machine does is not normal. On 10,000 simulated experiments with the drift of two cores that a dozen processes shared,
beside a yardstick on one thread, a level of 1% raised 1.8% false alarms between arms.
"""

POWER = 0.95
"""With which the smallest effect is found that a comparison "could have seen"."""

RUN_SPREAD = 0.015
"""Of the levels of runs of the same thing, beyond what their processes' spread explains, as a standard deviation of
logarithms. On the drift of two cores at a load of 8 to 10, simulated runs of the same (`simulated_experiments`) were
told apart in 1.0% of 400 tries on one thread and 2.0% on two with 0.01, in none and 1.3% with this, and in none and
0.8% with 0.02; of 26 real pairs of runs with a variant that takes 15% longer, 24, 24 and 22 were found.
"""

Outcome = Literal["better", "worse", "within noise", "cannot tell"]
Key = TypeVar("Key")
"""What a figure is told by."""


@dataclass(frozen=True)
class Difference:
    """Of two means of logarithms, the second's less the first's; with the variance's degrees of freedom."""

    mean: float
    variance: float
    df: float

    @property
    def p(self) -> float:
        """How likely a difference this large is between equals."""
        from scipy.special import stdtr

        if self.variance == 0:
            return 1.0 if self.mean == 0 else 0.0
        return 2 * float(stdtr(self.df, -abs(self.mean) / math.sqrt(self.variance)))


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


@dataclass(frozen=True)
class Sample:
    """What two figures are compared by: logarithms in the order in which their processes ran, at least two of each.

    series: the values of two runs, one after the other; or those of one run alone, which are the differences of two
    arms, one from each replicate, whose processes followed each other: what both share cancels.
    correction: the variance that what was taken off the values gives their difference; spent: the degrees of freedom
    that went into that, of all series together.
    """

    series: Sequence[Sequence[float]]
    correction: float = 0.0
    spent: float = 0.0

    def difference(self, drift: float) -> Difference:
        """Of the second run, or arm, from the first.

        The white part is Welch's, of trimmed means (Yuen, 1974). `drift` is what goes on for longer than the processes
        tell: slow waves hold (1 + drift) times their share. From one run into the other it goes on as a random walk,
        which moves the difference of two adjacent means by `carried_drift` times that.
        """
        means, variances, freedoms = zip(
            *(_trimmed_mean(one, self.spent / len(self.series)) for one in self.series), strict=True
        )
        slow, known = sum(variances) * drift, self.correction
        if len(self.series) == 2:
            slow *= carried_drift(min(map(len, self.series)))
            known += 2 * RUN_SPREAD**2
        # The slow waves are those of all figures together, which drift together.
        freedom = _freedom(
            [*zip(variances, freedoms, strict=True), (slow, NUM_WAVES * len(self.series)), (known, math.inf)]
        )
        mean = means[0] if len(self.series) == 1 else means[1] - means[0]
        return Difference(mean, sum(variances) + slow + known, freedom)


def _trimmed_mean(values: Sequence[float], spent: float) -> tuple[float, float, float]:
    """The mean, its variance and that one's degrees of freedom, of independent values (Tukey and McLaughlin, 1963);
    untrimmed, Student's. spent: degrees of freedom that went into what was taken off the values.
    """
    from scipy.stats import trim_mean

    count, share = len(values), trimmed_share(len(values))
    kept = count - 2 * int(share * count)
    freedom = kept - 1 - spent
    variance = statistics.variance(winsorized(values)) * (count - 1) / (kept * freedom)
    return float(trim_mean(values, share)), variance, freedom


def judge(differences: Mapping[Key, Difference], better: Mapping[Key, Better]) -> dict[Key, Effect]:
    """Every figure of one comparison, by name: LEVEL holds for all of them together (Holm, 1979).

    `better`: whether a figure's lower or its higher values are.
    """
    effects: dict[Key, Effect] = {}
    names = sorted(differences, key=lambda name: differences[name].p)
    found = True
    for place, name in enumerate(names):
        one = differences[name]
        if found:
            level = LEVEL / (len(names) - place)
            found = one.p < level
        outcome: Outcome = "within noise"
        if found:
            outcome = "better" if (one.mean < 0) == (better[name] == "lower") else "worse"
        error = math.sqrt(one.variance)
        edge = two_sided_quantile(level, one.df) * error
        # One-sided: on its own side of zero, 5% of tries fall short.
        smallest = edge + two_sided_quantile(2 * (1 - POWER), one.df) * error
        bounds = [_ratio(exponent) for exponent in (one.mean - edge, one.mean + edge, smallest)]
        effects[name] = Effect(outcome, _ratio(one.mean), bounds[0], bounds[1], bounds[2] - 1)
    return {name: effects[name] for name in differences}


def two_sided_quantile(level: float, df: float) -> float:
    """The t that a |t| of Student's distribution exceeds with probability `level`, 0 < level < 1."""
    from scipy.special import stdtrit

    return -float(stdtrit(df, level / 2))


def _ratio(exponent: float) -> float:
    """Of a difference of logarithms; beyond what a float holds, infinity."""
    return math.exp(exponent) if exponent < 700 else math.inf


def _freedom(parts: Sequence[tuple[float, float]]) -> float:
    """Of a sum of variances with degrees of freedom each (Welch and Satterthwaite); of no variance at all, 1."""
    squares = sum(variance**2 / df for variance, df in parts)
    return sum(variance for variance, _ in parts) ** 2 / squares if squares else 1.0
