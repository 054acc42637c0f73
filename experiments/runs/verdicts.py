"""Runs, or the arms of one, beside each other: a verdict for each figure."""

import statistics
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from experiments.document import ExperimentError
from experiments.runs.comparison import LEVEL, MIN_REPLICATES, POWER, Effect, Key, Sample, judge
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
    reason: str | None
    beside: str


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
    across: Mapping[str, str] = field(default_factory=dict)
    circumstances: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()
    repairs: tuple[str, ...] = ()
    cut_off: tuple[str, ...] = ()

    def count(self, outcome: str) -> int:
        return sum(verdict.effect.outcome == outcome for verdict in self.verdicts)

    def as_json(self) -> dict[str, Any]:
        """All of it, with the level of a false alarm in any figure, and the power that `smallest` is of."""
        return {"level": LEVEL, "power": POWER, **asdict(self)}


def compare_runs(first: RecordedRun, second: RecordedRun, across: Collection[str] = ()) -> Comparison:
    """The second run's figures beside the first's.

    across: the names of WHATS that they need not share.

    Raises:
        ExperimentError: They differ in something of WHATS that is not allowed; or have no figure in common.
    """
    allowed = _allowed_differences(first, second, across)
    among = (*first.rows, *second.rows)
    mine, theirs = (times_of(run.rows, across=across, leave_out=True, among=among) for run in (first, second))
    pairs = {key: (mine[key], theirs[key]) for key in mine if key in theirs}
    if not pairs:
        problem = f"{first.name} and {second.name} have no figure of time in common{_why_none(mine, theirs)}"
        raise ExperimentError([problem, *_cut_off(first, second)])
    if not share_yardstick(first, second):
        pairs = {key: (one, replace(other, yardsticks={})) for key, (one, other) in pairs.items()}
    threads = first.environment.get("host", {}).get("torch_threads")
    found, drift = judge_pairs(pairs, of_runs=True, spread=slope_spread(threads))
    return Comparison(
        first.name,
        second.name,
        _verdicts(pairs, found, of_runs=True),
        drift,
        across=allowed,
        circumstances=tuple(circumstances(first, second)),
        changed=tuple(changed_facts(first, second)),
        only_first=tuple(str(mine[key]) for key in mine if key not in theirs),
        only_second=tuple(str(theirs[key]) for key in theirs if key not in mine),
        repairs=(*first.repairs, *second.repairs),
        cut_off=_cut_off(first, second),
    )


def _allowed_differences(first: RecordedRun, second: RecordedRun, across: Collection[str]) -> dict[str, str]:
    """Name of WHATS -> how the runs differ; ExperimentError where one is not among `across`."""
    apart = forbidding(first, second)
    problems = [
        f"{what} of {first.name} and {second.name}: {how} (--across {what} compares them all the same)"
        for what, how in apart.items()
        if what not in across
    ]
    if problems:
        raise ExperimentError([*problems, *_cut_off(first, second)])
    return apart


def compare_arms(run: RecordedRun, across: Collection[str] = ()) -> Comparison:
    """Every arm beside the first of its place, paired by process: those of one replicate ran next to each other.

    across: "dtype" and "model" make no other place; nothing else of WHATS differs within a run.

    Raises:
        ExperimentError: No place has figures of several arms.
    """
    figures = times_of(run.rows, across=across)
    pairs = {mine: (figures[first], figures[mine]) for first, mine in beside_the_first(figures)}
    if not pairs:
        problem = f"{run.name} has no two arms with a figure of time in common{_why_none(figures, {})}"
        raise ExperimentError([problem, *_cut_off(run)])
    found, drift = judge_pairs(pairs)
    verdicts = _verdicts(pairs, found, of_runs=False)
    return Comparison(run.name, "", verdicts, drift, repairs=run.repairs, cut_off=_cut_off(run))


def beside_the_first(figures: Mapping[str, Figure]) -> list[tuple[str, str]]:
    """Of a run's figures, by their keys: each with the first of the same place and name."""
    first: dict[tuple[str, str], str] = {}
    pairs = [(first.setdefault((figure.place, figure.name), key), key) for key, figure in figures.items()]
    return [pair for pair in pairs if pair[0] != pair[1]]


@dataclass(frozen=True)
class Paired:
    """effect: of the second figure over the first. values: replicate -> the logarithm of that ratio, there alone; of
    two runs none, whose replicates have nothing in common.
    """

    effect: Effect
    values: Mapping[int, float]


def judge_pairs(
    pairs: Mapping[Key, tuple[Figure, Figure]], *, of_runs: bool = False, spread: float = slope_spread()
) -> tuple[dict[Key, Paired], float]:
    """Figures beside each other, judged together, and how much they drift; those of too few processes are left out.

    of_runs: of two runs, one after the other; if not, they are of arms of one run, whose replicates' processes followed
    each other. spread: of slopes, as of `slope_spread`.
    """
    samples = {
        key: _sample(*pair, of_runs, spread)
        for key, pair in pairs.items()
        if min(_processes(*pair, of_runs)) >= MIN_REPLICATES
    }
    drift = drift_of([values for one in samples.values() for values in one.series])
    differences = {key: one.difference(drift) for key, one in samples.items()}
    effects = judge(differences, {key: pairs[key][1].better for key in samples})
    shared = {key: sorted(first.values.keys() & second.values.keys()) for key, (first, second) in pairs.items()}
    return {
        key: Paired(effects[key], {} if of_runs else dict(zip(shared[key], one.series[0], strict=True)))
        for key, one in samples.items()
    }, drift


def _sample(first: Figure, second: Figure, of_runs: bool, spread: float) -> Sample:
    """Beside the yardstick, where there is one."""
    series = _series(first.values, second.values, of_runs)
    if not _beside_yardstick(first, second):
        return Sample(series)
    yardsticks = _series(first.yardsticks, second.yardsticks, of_runs)
    slope = slope_of(list(zip(series, yardsticks, strict=True)), spread)
    if of_runs:
        correction = slope.variance_between_runs(*yardsticks)
    else:
        correction = statistics.fmean(yardsticks[0]) ** 2 * slope.variance
    return Sample(list(map(slope.take_off, series, yardsticks)), correction, slope.spent)


def _series(first: Mapping[int, float], second: Mapping[int, float], of_runs: bool) -> list[list[float]]:
    """By replicate: the values of each run, or the differences in those that both arms were timed in."""
    if of_runs:
        return [[one[replicate] for replicate in sorted(one)] for one in (first, second)]
    return [[second[replicate] - first[replicate] for replicate in sorted(first.keys() & second.keys())]]


def _processes(first: Figure, second: Figure, of_runs: bool) -> tuple[int, int]:
    """How many of each are compared."""
    counts = [len(values) for values in _series(first.values, second.values, of_runs)]
    return counts[0], counts[-1]


def _beside_yardstick(first: Figure, second: Figure) -> bool:
    return first.has_yardstick and second.has_yardstick


def _verdicts(
    pairs: Mapping[str, tuple[Figure, Figure]], found: Mapping[str, Paired], of_runs: bool
) -> tuple[Verdict, ...]:
    verdicts = []
    for key, (first, second) in pairs.items():
        one, other = processes = _processes(first, second, of_runs)
        if key in found:
            effect, reason = found[key].effect, None
        else:
            effect = Effect("cannot tell", second.mean / first.mean)
            reason = (
                f"{one} and {other} processes; {MIN_REPLICATES} each are needed: put `replicates: {MIN_REPLICATES}` or "
                "more into the YAML"
            )
        verdicts.append(
            Verdict(
                second.place, second.title, second.name, second.unit, effect, first.mean, second.mean, processes,
                _beside_yardstick(first, second), reason, first.title if first.arm != second.arm else "",
            )
        )  # fmt: skip
    return tuple(verdicts)


def _cut_off(*runs: RecordedRun) -> tuple[str, ...]:
    """A sentence for each of the runs that did not come to its end: what it lacks is no fault of its variants."""
    return tuple(f"{run.name} was cut off after {run.progress}" for run in runs if not run.finished)


def _why_none(first: Mapping[str, Figure], second: Mapping[str, Figure]) -> str:
    """What there is instead; a figure of an interpreted kernel is never one."""
    if not first and not second:
        return ": nothing was timed (an interpreted kernel is not)"
    names = list(dict.fromkeys(map(str, (*first.values(), *second.values()))))
    return f": there is {'; '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
