"""Runs, or the arms of one, beside each other: a verdict for each figure."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from experiments.document import ExperimentError
from experiments.runs.comparison import (
    LEVEL,
    MIN_REPLICATES,
    POWER,
    Effect,
    Key,
    between_runs,
    judge,
    paired,
)
from experiments.runs.differences import changed_facts, circumstances, forbidding, share_yardstick
from experiments.runs.drift import drift_of, slope_of, slope_spread
from experiments.runs.reading import RecordedRun
from experiments.runs.table import Figure, times_of


@dataclass(frozen=True)
class Verdict:
    """What a comparison says of one figure of one arm.

    first, second: its values, in `unit`, geometric means over processes. processes: how many of each there were.
    beside_yardstick: whether the effect is that of the figure over the yardstick's, so that it need not be
    second / first. reason: why it cannot tell, and what would help. beside: the arm that `first` is of, where it is of
    another one.
    """

    place: str
    arm: str
    figure: str
    unit: str
    effect: Effect
    first: float
    second: float
    processes: tuple[int, int]
    beside_yardstick: bool
    reason: str | None = None
    beside: str = ""


@dataclass(frozen=True)
class Comparison:
    """Two runs, or every arm of one beside the first of its place (`second` is then empty).

    drift: how much more of the figures' variance is slow than white noise would have, 0 or more. across: what the runs
    do not share although it decides speeds, and was allowed. circumstances: what else differs. changed: rows whose
    status, tokens or counts do. only_first, only_second: figures that the other does not have. cut_off: a sentence for
    each run that did not come to its end.
    """

    first: str
    second: str
    verdicts: tuple[Verdict, ...]
    drift: float
    across: Mapping[str, str]
    circumstances: tuple[str, ...]
    changed: tuple[str, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    repairs: tuple[str, ...]
    cut_off: tuple[str, ...]

    def count(self, outcome: str) -> int:
        return sum(verdict.effect.outcome == outcome for verdict in self.verdicts)

    def as_json(self) -> dict[str, Any]:
        """All of it, with the level of a false alarm in any figure, and the power that `smallest` is of."""
        return {"level": LEVEL, "power": POWER, **asdict(self)}


def compare_runs(first: RecordedRun, second: RecordedRun, across: Collection[str] = ()) -> Comparison:
    """The second run's figures beside the first's.

    across: the names of WHATS that they need not share.

    Raises:
        ExperimentError: they differ in something of WHATS that is not allowed; or have no figure in common.
    """
    apart = forbidding(first, second)
    problems = [
        f"{what} of {first.name} and {second.name}: {how} (--across {what} compares them all the same)"
        for what, how in apart.items()
        if what not in across
    ]
    if problems:
        raise ExperimentError([*problems, *cut_off(first, second)])
    among = (*first.rows, *second.rows)
    mine, theirs = (times_of(run.rows, across=across, leave_out=True, among=among) for run in (first, second))
    both = [key for key in mine if key in theirs]
    if not both:
        why = _why_none(mine, theirs)
        problem = f"{first.name} and {second.name} have no figure of time in common{why}"
        raise ExperimentError([problem, *cut_off(first, second)])
    pairs = {key: (mine[key], theirs[key]) for key in both}
    if not share_yardstick(first, second):
        pairs = {
            key: (replace(one, yardsticks={}), replace(other, yardsticks={})) for key, (one, other) in pairs.items()
        }
    enough = {key: pair for key, pair in pairs.items() if min(len(one.values) for one in pair) >= MIN_REPLICATES}
    spread = slope_spread(first.environment.get("host", {}).get("torch_threads"))
    series = {key: series_of_runs(*pair, spread) for key, pair in enough.items()}
    drift = drift_of([values for one in series.values() for values in one.values])
    differences = {
        key: between_runs(one.values[0], one.values[1], drift, one.correction, one.spent) for key, one in series.items()
    }
    counts = {key: (len(one.values), len(other.values)) for key, (one, other) in pairs.items()}
    return Comparison(
        first.name,
        second.name,
        _verdicts(pairs, judge(differences, {key: pairs[key][1].better for key in differences}), counts),
        drift,
        {what: how for what, how in apart.items() if what in across},
        tuple(circumstances(first, second)),
        tuple(changed_facts(first, second)),
        tuple(_told(mine[key]) for key in mine if key not in theirs),
        tuple(_told(theirs[key]) for key in theirs if key not in mine),
        (*first.repairs, *second.repairs),
        cut_off(first, second),
    )


def compare_arms(run: RecordedRun, across: Collection[str] = ()) -> Comparison:
    """Every arm beside the first of its place, paired by process: those of one replicate ran next to each other.

    across: "dtype" and "model" make no other place; nothing else of WHATS differs within a run.

    Raises:
        ExperimentError: no place has figures of several arms.
    """
    figures = times_of(run.rows, across=across)
    pairs = {mine: (figures[first], figures[mine]) for first, mine in beside_the_first(figures)}
    if not pairs:
        problem = f"{run.name} has no two arms with a figure of time in common{_why_none(figures, {})}"
        raise ExperimentError([problem, *cut_off(run)])
    found, drift = judge_pairs(pairs)
    counts = {key: (len(both), len(both)) for key, pair in pairs.items() for both in [_replicates(*pair)]}
    verdicts = _verdicts(pairs, {key: one.effect for key, one in found.items()}, counts)
    return Comparison(run.name, "", verdicts, drift, {}, (), (), (), (), run.repairs, cut_off(run))


def beside_the_first(figures: Mapping[str, Figure]) -> list[tuple[str, str]]:
    """Of a run's figures, by their keys: each with the first of the same place and name."""
    first: dict[tuple[str, str], str] = {}
    pairs = [(first.setdefault((figure.place, figure.name), key), key) for key, figure in figures.items()]
    return [pair for pair in pairs if pair[0] != pair[1]]


@dataclass(frozen=True)
class Paired:
    """effect: of the second figure over the first. values: replicate -> the logarithm of that ratio, there alone."""

    effect: Effect
    values: Mapping[int, float]


def judge_pairs(pairs: Mapping[Key, tuple[Figure, Figure]]) -> tuple[dict[Key, Paired], float]:
    """Figures of one run beside each other, judged together, and how much they drift; those of too few processes are
    left out.
    """
    enough = {key: pair for key, pair in pairs.items() if len(_replicates(*pair)) >= MIN_REPLICATES}
    series = {key: _paired_series(*pair) for key, pair in enough.items()}
    drift = drift_of([values for one in series.values() for values in one.values])
    differences = {key: paired(one.values[0], drift, one.correction, one.spent) for key, one in series.items()}
    effects = judge(differences, {key: enough[key][1].better for key in enough})
    found = {
        key: Paired(effects[key], dict(zip(_replicates(*pair), series[key].values[0], strict=True)))
        for key, pair in enough.items()
    }
    return found, drift


def _replicates(first: Figure, second: Figure) -> list[int]:
    """Those that both were timed in, in the order in which they ran."""
    return sorted(first.values.keys() & second.values.keys())


def cut_off(*runs: RecordedRun) -> tuple[str, ...]:
    """A sentence for each of the runs that did not come to its end: what it lacks is no fault of its variants."""
    return tuple(f"{run.name} was cut off after {run.progress}" for run in runs if not run.finished)


def _beside_yardstick(first: Figure, second: Figure) -> bool:
    return first.has_yardstick and second.has_yardstick


@dataclass(frozen=True)
class _Series:
    """Values in the order in which the processes ran, beside the yardstick's where there is one; and the variance that
    this gives the difference of the means, or their mean where it is one series; and the degrees of freedom that went
    into it.
    """

    values: tuple[list[float], ...]
    correction: float = 0.0
    spent: float = 0.0


def series_of_runs(first: Figure, second: Figure, spread: float) -> _Series:
    """One of each run; spread: of slopes, as of `slope_spread`."""
    order = [sorted(one.values) for one in (first, second)]
    values = [[one.values[r] for r in replicates] for one, replicates in zip((first, second), order, strict=True)]
    if not _beside_yardstick(first, second):
        return _Series(tuple(values))
    yardsticks = [
        [one.yardsticks[r] for r in replicates] for one, replicates in zip((first, second), order, strict=True)
    ]
    slope = slope_of(list(zip(values, yardsticks, strict=True)), spread)
    return _Series(
        tuple(map(slope.take_off, values, yardsticks)), slope.variance_between_runs(*yardsticks), slope.spent
    )


def _paired_series(first: Figure, second: Figure) -> _Series:
    """The differences within replicates."""
    replicates = _replicates(first, second)
    values = [second.values[r] - first.values[r] for r in replicates]
    if not _beside_yardstick(first, second):
        return _Series((values,))
    yardsticks = [second.yardsticks[r] - first.yardsticks[r] for r in replicates]
    slope = slope_of([(values, yardsticks)], slope_spread())
    correction = statistics.fmean(yardsticks) ** 2 * slope.variance
    return _Series((slope.take_off(values, yardsticks),), correction, slope.spent)


def _verdicts(
    pairs: Mapping[str, tuple[Figure, Figure]],
    effects: Mapping[str, Effect],
    counts: Mapping[str, tuple[int, int]],
) -> tuple[Verdict, ...]:
    found = []
    for key, (first, second) in pairs.items():
        one, other = counts[key]
        reason = None
        if key not in effects:
            reason = (
                f"{one} and {other} processes; {MIN_REPLICATES} each are needed: put `replicates: {MIN_REPLICATES}` or "
                "more into the YAML"
            )
        effect = effects.get(key) or Effect("cannot tell", second.mean / first.mean)
        found.append(
            Verdict(
                second.place, second.title, second.name, second.unit, effect, first.mean, second.mean, (one, other),
                _beside_yardstick(first, second), reason, first.title if first.arm != second.arm else "",
            )
        )  # fmt: skip
    return tuple(found)


def _told(figure: Figure) -> str:
    return f"{figure.place}: {figure.title}, {figure.name}"


def _why_none(first: Mapping[str, Figure], second: Mapping[str, Figure]) -> str:
    """What there is instead; a figure of an interpreted kernel is never one."""
    if not first and not second:
        return ": nothing was timed (an interpreted kernel is not)"
    names: Sequence[str] = list(dict.fromkeys(_told(one) for one in (*first.values(), *second.values())))
    return f": there is {'; '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
