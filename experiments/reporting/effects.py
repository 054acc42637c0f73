"""From a kernel alone to tokens a second: what swapping a variant did at every level.

All of it follows from a run's rows: checks, kernels' times, engines' rates, parity, and the ranges of recorded steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from experiments.document import ExperimentError
from experiments.reporting.arms import arm_key, count_processes, select_stages, select_timed
from experiments.reporting.table_style import (
    Cell,
    Column,
    PlainTable,
    build_table,
    format_number,
    format_value,
    group_by,
    number_column,
    setting_name,
)
from experiments.runs.comparison import MIN_REPLICATES, Outcome
from experiments.runs.rows import Row
from experiments.runs.table import figure_key, spread, times_of
from experiments.runs.verdicts import Paired, beside_the_first, judge_pairs


@dataclass(frozen=True)
class Effect:
    """A variant of an op in the place of another, in two arms that differ in nothing else. None: not measured.

    first, row: the other's arm and its own, as they were served. alone: its speed over the other's, the geometric mean
    over the points of its arm's own workload and sizes at which both were timed; where there are none, over those that
    no workload asks for. share: of its arm's step. end_to_end: tokens a second over the other arm's; both ratios with
    their spread, which of a thing beside itself is None. error: the largest error ratio of its checks. parity: its arm
    beside the first of its model and workload.
    """

    op: str
    first: Row
    row: Row
    alone: "Ratio | None"
    share: float | None
    end_to_end: "Ratio | None"
    error: float | None
    parity: Row | None

    @property
    def variant(self) -> str:
        return self.row.arm[self.op]


@dataclass(frozen=True)
class Ratio:
    """iqr: the distance between its quartiles, as far as those of both sides tell, taken for independent: of arms whose
    processes took turns it is rather too large. None where a side has no spread. outcome: where a run has processes
    enough for a test, what that says, "within noise" where it says so of every point; the value is then the test's own
    estimate, and the spread that of the processes' ratios.
    """

    value: float
    iqr: float | None = None
    outcome: Outcome | None = None

    @staticmethod
    def mean(pairs: Sequence[tuple["_Speed", "_Speed"]]) -> "Ratio":
        """The geometric mean of first / second over at least one pair."""
        value = math.exp(math.fsum(math.log(first[0] / second[0]) for first, second in pairs) / len(pairs))
        spreads = [iqr / speed if iqr is not None else None for pair in pairs for speed, iqr in pair]
        known = [spread for spread in spreads if spread is not None]
        return Ratio(value, value * math.hypot(*known) / len(pairs) if len(known) == len(spreads) else None)

    @staticmethod
    def judged(found: Sequence[Paired], sign: int) -> "Ratio":
        """The geometric mean of judged ratios, of times where `sign` is -1: a speed is their inverse."""
        value = math.exp(sign * math.fsum(math.log(one.effect.ratio) for one in found) / len(found))
        common = set.intersection(*(set(one.values) for one in found))
        each = [math.exp(sign * math.fsum(one.values[r] for one in found) / len(found)) for r in sorted(common)]
        outcomes = {one.effect.outcome for one in found}
        outcome: Outcome = "within noise" if outcomes == {"within noise"} else "better" if value > 1 else "worse"
        return Ratio(value, spread(each), outcome)


_Speed = tuple[float, float | None]
"""Above 0, and its interquartile range."""

_Pair = tuple[Row, Row]
"""What a swap is judged by: a row of the first variant, and one of the other."""


_Judged = Mapping[tuple[str, str], Paired]
"""The keys of two figures of time -> the second over the first."""


def effects_of(rows: Sequence[Row], ops: Sequence[str], every: Sequence[Row] = ()) -> list[Effect]:
    """Of each of the swept `ops` and each set of arms that differ in it alone, every variant over the first; the
    first is there too, at 1. rows: merged. every: those of each process, which a test needs.
    """
    timed = group_by(select_timed(select_stages(rows, "kernels")), _variant_of)
    errors = _worst_errors(select_stages(rows, "check"))
    parities = {arm_key(row): row for row in reversed(select_stages(rows, "parity"))}
    # By the device's clock where it has one: that comes last.
    steps = sorted(select_stages(rows, "step"), key=lambda row: row.clock == "device")
    shares = {(arm_key(row), row.range): row.share for row in steps}
    swaps = [(op, pair) for op in ops for pair in _arms_that_differ(op, select_stages(rows, "engine"))]
    kernels = [_timings(timed, op, pair) for op, pair in swaps]
    engines = [[pair] if len(select_timed(pair)) == 2 else [] for _, pair in swaps]
    judged = _judge(every, list(chain(*kernels, *engines)))
    return [
        Effect(
            op, first, row, _ratio(alone, judged), shares.get((arm_key(row), f"{op}.{row.arm[op]}")),
            _ratio(together, judged), errors.get((op, row.arm[op], row.dtype)), parities.get(arm_key(row)),
        )
        for (op, (first, row)), alone, together in zip(swaps, kernels, engines, strict=True)
    ]  # fmt: skip


def _variant_of(row: Row) -> tuple[str | None, str | None, str]:
    return row.op, row.variant, row.dtype


def _worst_errors(checks: Sequence[Row]) -> dict[Any, float]:
    worst: dict[Any, float] = {}
    for row in checks:
        if (error := row.max_error_ratio) is not None:
            worst[_variant_of(row)] = max(error, worst.get(_variant_of(row), error))
    return worst


def _arms_that_differ(op: str, engines: Sequence[Row]) -> list[_Pair]:
    """In the op alone: each beside the first, which is beside itself too."""
    served = [row for row in engines if row.status == "ok" and op in row.arm]

    def rest_of_arm(row: Row) -> tuple[str, str]:
        return arm_key(row.model_copy(update={"arm": {name: row.arm[name] for name in row.arm if name != op}}))

    pairs: list[_Pair] = []
    for first, *rest in group_by(served, rest_of_arm).values():
        if others := [row for row in rest if row.arm[op] != first.arm[op]]:
            pairs += [(first, row) for row in (first, *others)]
    return pairs


def _timings(timed: Mapping[Any, Sequence[Row]], op: str, arms: _Pair) -> list[_Pair]:
    """Of both arms' variants, at each point that counts."""
    row = arms[1]

    def by_point(variant: str) -> dict[str | None, Row]:
        return {one.point: one for one in timed.get((op, variant, row.dtype), ()) if _is_of(one.settings, row)}

    before, mine = by_point(arms[0].arm[op]), by_point(row.arm[op])
    both = [(before[point], mine[point]) for point in before if point in mine]
    own = [pair for pair in both if any(_is_of(served, row) for served in pair[1].serves or ())]
    return own or [pair for pair in both if not pair[1].serves]


def _is_of(served: Mapping[str, Any], row: Row) -> bool:
    """Whether what was timed for this is one of the arm's steps. What is not swept, all share."""
    about = {"workload": row.workload, **row.settings}
    return all(about.get(name, value) == value for name, value in served.items())


def _judge(rows: Sequence[Row], pairs: Sequence[_Pair]) -> _Judged:
    """What the processes say of the speeds of `pairs`. rows: those of each; where there are too few, nothing is found.

    A pair that the comparison of the run's arms has too is judged there: an outcome depends on how many others it is
    judged with, and a report must not say two things of one pair. The others are a comparison of their own.
    """
    if count_processes(rows) < MIN_REPLICATES:
        return {}
    try:
        figures = times_of(rows)
    except ExperimentError:  # two rows of one process that cannot be told apart: nothing can be said of them
        return {}
    arms = dict.fromkeys(beside_the_first(figures))
    wanted = dict.fromkeys(_keys(pair) for pair in pairs if pair[0] is not pair[1])
    rest = [keys for keys in wanted if keys not in arms and figures.keys() >= {*keys}]
    found: dict[tuple[str, str], Paired] = {}
    for family in (arms, rest):
        found |= judge_pairs({keys: (figures[keys[0]], figures[keys[1]]) for keys in family})[0]
    return found


def _keys(pair: _Pair) -> tuple[str, str]:
    return figure_key(pair[0]), figure_key(pair[1])


def _ratio(pairs: Sequence[_Pair], judged: _Judged) -> Ratio | None:
    """Of speeds: a second row's over its first one's."""
    if not pairs:
        return None
    if pairs[0][0] is pairs[0][1]:
        return Ratio(1.0)
    found = [judged[keys] for keys in map(_keys, pairs) if keys in judged]
    if len(found) == len(pairs):
        return Ratio.judged(found, -1 if pairs[0][0].stage == "kernels" else 1)
    merged = Ratio.mean([(_speed(other), _speed(one)) for one, other in pairs])
    return replace(merged, outcome="cannot tell") if judged else merged


def _speed(row: Row) -> _Speed:
    """With its spread, whose share of a time is that of its inverse."""
    if row.stage == "kernels":
        time = row.median_us or math.inf
        return 1 / time, row.iqr_us / time**2 if row.iqr_us is not None else None
    return row.tokens_per_s or 0.0, row.tokens_per_s_iqr


def effects_table(rows: Sequence[Row], names: Sequence[str], every: Sequence[Row] = ()) -> PlainTable | None:
    """The effects of the swept ops among `names`, as of `effects_of`; None where no op was swept, or no step was
    recorded.
    """
    engines = select_stages(rows, "engine")
    ops = [name for name in names if any(name in row.arm for row in engines)]
    effects = effects_of(rows, ops, every)
    if all(effect.share is None for effect in effects):
        return None
    show: dict[Column, Callable[[Effect], str | Cell]] = {Column("variant"): lambda effect: effect.variant}
    if len(ops) > 1 or any(effect.row.settings for effect in effects):
        show[Column("with")] = lambda effect: _others(effect, ops)
    show |= {
        number_column("alone"): lambda effect: _ratio_cell(effect.alone),
        number_column("of step"): lambda effect: format_number(effect.share, ".1%", "n/m"),
        number_column("tokens/s"): lambda effect: _ratio_cell(effect.end_to_end),
        number_column("error"): lambda effect: format_number(effect.error, ".2f"),
        number_column("drift"): lambda effect: format_number(
            effect.parity.logprob_drift if effect.parity else None, ".0e"
        ),
        number_column("differs"): _divergence,
    }
    caption = (
        "alone: speed of the kernel over the first variant's, the geometric mean over the points of the arm's own "
        "workload; of step: its share of a step; tokens/s: over those with the first variant; in brackets the ratio's "
        f"IQR.{_explain_marks(effects)} error: over what is allowed; drift, differs: of log-probabilities, and "
        "request/token of the first other token, beside the first arm of the same model and workload. n/m: not "
        "measured."
    )
    title = "From a kernel alone to tokens"
    return build_table(title, show, effects, caption, lambda one: ": ".join(filter(None, [one.row.workload, one.op])))


def _others(effect: Effect, ops: Sequence[str]) -> str:
    """What else the arm is made of."""
    settings = [f"{setting_name(name)} {format_value(value)}" for name, value in effect.row.settings.items()]
    return ", ".join([*(effect.row.arm[name] for name in ops if name != effect.op), *settings])


def _divergence(effect: Effect) -> str:
    if effect.parity is None:
        return "-"
    first = effect.parity.first_divergence
    return f"{first['request']}/{first['place']}" if first else "never"


_MARKS: Mapping[Outcome | None, str] = {"within noise": "~", "cannot tell": "?"}


def _explain_marks(effects: Sequence[Effect]) -> str:
    """What the marks mean, where any ratio was put to a test."""
    outcomes = {ratio.outcome for effect in effects for ratio in (effect.alone, effect.end_to_end) if ratio is not None}
    if outcomes <= {None}:
        return ""
    untested = " ?: of too few processes to tell." if "cannot tell" in outcomes else ""
    tested = " Both ratios are those that were tested, of means over processes, beside the yardstick's;"
    return f"{tested} ~: within noise, of several points at each; the others are real differences.{untested}"


def _ratio_cell(ratio: Ratio | None) -> str | Cell:
    if ratio is None:
        return "n/m"
    text = f"{_MARKS.get(ratio.outcome, '')}{ratio.value:.2f}x"
    return Cell(text + (f" ({ratio.iqr:.2f})" if ratio.iqr is not None else ""), ratio.outcome or "")
