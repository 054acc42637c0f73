"""From a kernel alone to tokens a second: what swapping a variant did at every level, and what else a step consists of.

All of it follows from a run's rows: checks, kernels' times, engines' rates, parity, and the ranges of recorded steps.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.reporting.judged import Judged
from experiments.reporting.table_style import Cell, Column, Line, PlainTable, cells, plain, told
from experiments.runs.comparison import Outcome
from experiments.runs.rows import Row
from experiments.runs.verdicts import Paired
from experiments.stages.serving import spread
from tkernels import OPS

EFFECTS = "From a kernel alone to tokens"
GEMMS = tuple(name for name, op in OPS.items() if op.contract.work == "gemm")


@dataclass(frozen=True)
class Effect:
    """A variant of an op in the place of another, in two arms that differ in nothing else. None: not measured.

    alone: its speed over the other's, the geometric mean over the points of its arm's own workload and sizes at which
    both were timed; where there are none, over those that no workload asks for. share: of its arm's
    step. end_to_end: tokens a second over the other arm's; both ratios with their spread, which of a thing beside
    itself is None. error: the largest error ratio of its checks. drift, differs: its arm beside the first of its model
    and workload, the log-probabilities' largest difference and (request, token) of the first token that is another one;
    differs is None where none is.
    """

    op: str
    before: str
    variant: str
    arm: Mapping[str, str]
    settings: Mapping[str, Any]
    workload: str
    alone: "Ratio | None"
    share: float | None
    end_to_end: "Ratio | None"
    error: float | None
    drift: float | None
    differs: tuple[int, int] | None


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
    def mean(pairs: Sequence[tuple["_Figure", "_Figure"]]) -> "Ratio":
        """The geometric mean of first / second over at least one pair."""
        value = math.exp(math.fsum(math.log(first[0] / second[0]) for first, second in pairs) / len(pairs))
        spreads = [iqr / figure if iqr is not None else None for pair in pairs for figure, iqr in pair]
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
        return Ratio(value, spread(each) if len(each) > 1 else None, outcome)


_Figure = tuple[float, float | None]
"""A figure above 0 and its interquartile range."""


class _Rows:
    """A run's rows by what an effect asks of them: a sweep has thousands of effects, and of rows."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.engines = [row for row in rows if row.stage == "engine" and row.status == "ok"]
        self.parities: dict[Any, Row] = {}
        self.steps: dict[Any, list[Row]] = {}
        self.kernels: dict[Any, list[Row]] = {}
        self.errors: dict[Any, list[float]] = {}
        for row in rows:
            if row.stage == "parity":
                self.parities.setdefault(_place(row), row)
            elif row.stage == "step" and row.status == "ok" and row.total_us is not None:
                self.steps.setdefault(_place(row), []).append(row)
            elif row.stage == "kernels" and row.median_us:
                self.kernels.setdefault((row.op, row.variant, row.dtype), []).append(row)
            elif row.stage == "check" and row.max_error_ratio is not None:
                self.errors.setdefault((row.op, row.variant, row.dtype), []).append(row.max_error_ratio)


_Pair = tuple[Row, Row]
"""What a swap is judged by: a row of the first variant, and one of the other."""


@dataclass(frozen=True)
class _Swap:
    """kernels: timings of both variants at each point that counts."""

    op: str
    first: Row
    row: Row
    kernels: tuple[tuple[Row, Row], ...]

    @property
    def engines(self) -> tuple[tuple[Row, Row], ...]:
        return ((self.first, self.row),) if self.row.tokens_per_s and self.first.tokens_per_s else ()


def effects_of(rows: Sequence[Row], ops: Sequence[str], every: Sequence[Row] = ()) -> list[Effect]:
    """Of each of the swept `ops` and each set of arms that differ in it alone, every variant over the first; the
    first is there too, at 1. rows: merged. every: those of each process, which a test needs.
    """
    swaps = []
    known = _Rows(rows)
    for op in ops:
        groups: dict[Any, list[Row]] = {}
        for row in known.engines:
            if op in row.arm:
                rest_of_arm = {name: label for name, label in row.arm.items() if name != op}
                key = (row.workload, _text(row.settings), _text(rest_of_arm), row.dtype)
                groups.setdefault(key, []).append(row)
        for first, *rest in groups.values():
            if others := [row for row in rest if row.arm[op] != first.arm[op]]:
                swaps += [_Swap(op, first, row, _timings(known, op, first, row)) for row in (first, *others)]
    pairs: list[_Pair] = [pair for swap in swaps for pair in swap.engines]
    judged = Judged.of(every, [*pairs, *(pair for swap in swaps for pair in swap.kernels)])
    return [_effect(known, swap, judged) for swap in swaps]


def _effect(rows: _Rows, swap: _Swap, judged: Judged) -> Effect:
    op, first, row = swap.op, swap.first, swap.row
    before, variant = first.arm[op], row.arm[op]
    parity = rows.parities.get(_place(row))
    divergence = None if parity is None else parity.first_divergence
    return Effect(
        op, before, variant, row.arm, row.settings, str(row.workload),
        alone=_ratio(swap.kernels, judged),
        share=_share(rows, op, row),
        end_to_end=_ratio(swap.engines, judged),
        error=max(rows.errors.get((op, variant, row.dtype), ()), default=None),
        drift=None if parity is None else parity.logprob_drift,
        differs=None if divergence is None else (int(divergence["request"] or 0), int(divergence["place"] or 0)),
    )  # fmt: skip


def _ratio(pairs: Sequence[_Pair], judged: Judged) -> Ratio | None:
    """Of speeds: a second row's over its first one's."""
    if not pairs:
        return None
    if pairs[0][0] is pairs[0][1]:
        return Ratio(1.0)
    if (found := judged.between(pairs)) is not None:
        return Ratio.judged(found, -1 if pairs[0][0].stage == "kernels" else 1)
    merged = Ratio.mean([(_speed(other), _speed(one)) for one, other in pairs])
    return replace(merged, outcome="cannot tell") if judged.found else merged


def _speed(row: Row) -> _Figure:
    """With its spread, whose share of a time is that of its inverse."""
    if row.stage == "kernels":
        time = row.median_us or math.inf
        return 1 / time, row.iqr_us / time**2 if row.iqr_us is not None else None
    assert row.stage == "engine"
    return row.tokens_per_s or 0.0, row.tokens_per_s_iqr


def _timings(rows: _Rows, op: str, first: Row, row: Row) -> tuple[tuple[Row, Row], ...]:
    before, mine = (
        {
            str(one.point): one
            for one in rows.kernels.get((op, variant, row.dtype), ())
            if all(row.settings.get(name, value) == value for name, value in one.settings.items())
        }
        for variant in (first.arm[op], row.arm[op])
    )
    both = [(before[point], mine[point]) for point in before if point in mine]
    own = [pair for pair in both if any(_is_of(served, row) for served in pair[1].serves or ())]
    return tuple(own or [pair for pair in both if not pair[1].serves])


def _is_of(served: Mapping[str, Any], row: Row) -> bool:
    """Whether a point that serves this is one of the arm's steps. What is not swept, all share."""
    about = {"workload": row.workload, **row.settings}
    return all(about.get(name, value) == value for name, value in served.items())


def _share(rows: _Rows, op: str, arm: Row) -> float | None:
    """The op's share of the arm's step: by the device's clock where it has one."""
    name = f"{op}.{arm.arm[op]}"
    shares = {step.clock: step.share for step in rows.steps.get(_place(arm), ()) if step.range == name}
    return shares.get("device", shares.get("host"))


def _place(row: Row) -> tuple[Any, ...]:
    return row.workload, _text(row.arm), _text(row.settings), row.dtype


def _text(values: Mapping[str, Any]) -> str:
    return str(sorted(values.items()))


def effects_table(rows: Sequence[Row], names: Sequence[str], every: Sequence[Row] = ()) -> PlainTable | None:
    """The effects of the swept ops among `names`, as of `effects_of`; None where no op was swept, or no step was
    recorded.
    """
    ops = [name for name in names if any(row.stage == "engine" and name in row.arm for row in rows)]
    effects = effects_of(rows, ops, every)
    if all(effect.share is None for effect in effects):
        return None
    several = len(ops) > 1 or any(effect.settings for effect in effects)
    right = ("alone", "of step", "tokens/s", "error", "drift", "differs")
    columns = (
        Column("variant"), *([Column("with")] if several else []), *(Column(name, right=True) for name in right)
    )  # fmt: skip
    lines: list[Line] = []
    for effect in effects:
        heading = ": ".join(filter(None, [effect.workload, effect.op]))
        if heading not in lines:
            lines.append(heading)
        others = [effect.arm[name] for name in ops if name != effect.op]
        others += [f"{plain(name)} {told(value)}" for name, value in effect.settings.items()]
        lines.append(
            cells(
                effect.variant,
                *([", ".join(others)] if several else []),
                _times(effect.alone),
                _percent(effect.share),
                _times(effect.end_to_end),
                "-" if effect.error is None else f"{effect.error:.2f}",
                "-" if effect.drift is None else f"{effect.drift:.0e}",
                _where(effect),
            )
        )
    caption = (
        "alone: speed of the kernel over the first variant's, the geometric mean over the points of the arm's own "
        "workload; of step: its share of a step; tokens/s: over those with the first variant; in brackets the ratio's "
        f"IQR.{_marks(effects)} error: over what is allowed; drift, differs: of log-probabilities, and request/token "
        "of the first other token, beside the first arm of the same model and workload. n/m: not measured."
    )
    return PlainTable(EFFECTS, columns, tuple(lines), caption)


def _where(effect: Effect) -> str:
    if effect.differs is not None:
        return f"{effect.differs[0]}/{effect.differs[1]}"
    return "-" if effect.drift is None else "never"


_MARKS: Mapping[Outcome | None, str] = {"within noise": "~", "cannot tell": "?"}


def _marks(effects: Sequence[Effect]) -> str:
    """What the marks mean, where any ratio was put to a test."""
    outcomes = {ratio.outcome for effect in effects for ratio in (effect.alone, effect.end_to_end) if ratio is not None}
    if outcomes <= {None}:
        return ""
    untested = " ?: of too few processes to tell." if "cannot tell" in outcomes else ""
    tested = " Both ratios are those that were tested, of means over processes, beside the yardstick's;"
    return f"{tested} ~: within noise, of several points at each; the others are real differences.{untested}"


def _times(ratio: Ratio | None) -> str | Cell:
    if ratio is None:
        return "n/m"
    text = f"{_MARKS.get(ratio.outcome, '')}{ratio.value:.2f}x"
    return Cell(text + (f" ({ratio.iqr:.2f})" if ratio.iqr is not None else ""), ratio.outcome or "")


def _percent(share: float | None) -> str:
    return "n/m" if share is None else f"{share:.1%}"


_WHOLE = ("ops", "GEMMs", "model", "sample", "prepare", "schedule", "commit", "gaps")


def whole_step(steps: Sequence[Row]) -> dict[str, float]:
    """Where the whole of one arm's step goes, as shares that add up to 1, of one clock's rows."""
    found = dict.fromkeys(_WHOLE, 0.0)
    for row in steps:
        found[_part_of(row)] += (row.self_us or 0.0) / (row.step_us or 1.0)
    return found


def _part_of(row: Row) -> str:
    if row.category == "op":
        return "GEMMs" if row.op in GEMMS else "ops"
    if row.category in ("layer", "part") or row.range == "forward":
        return "model"
    if row.range in ("sample", "prepare", "schedule"):
        return str(row.range)
    return "commit" if row.range in ("commit", "wait", "detokenize") else "gaps"


def step_table(rows: Sequence[Row], titles: Mapping[str, str]) -> PlainTable | None:
    """A line for each arm whose steps were recorded; titles: what arms are called, by `key_of`. None where none was."""
    arms: dict[str, list[Row]] = {}
    for row in rows:
        if row.stage == "step" and row.status == "ok" and row.total_us is not None:
            arms.setdefault(key_of(row), []).append(row)
    lines: list[Line] = []
    for key, mine in arms.items():
        clock = "device" if any(row.clock == "device" for row in mine) else "host"
        chosen = [row for row in mine if row.clock == clock]
        mean = (mine[0].step_us or 0.0) / max(mine[0].steps or 1, 1)
        shares = whole_step(chosen).values()
        lines.append(cells(titles.get(key, key), f"{mean:,.0f}", *(f"{share:.0%}" for share in shares)))
    if not lines:
        return None
    columns = (Column("arm"), *(Column(name, right=True) for name in ("us", *_WHOLE)))
    caption = (
        "Shares of a step that was recorded apart, without overlap. ops: kernels but GEMMs, which are "
        f"{', '.join(GEMMS[:-1])} and {GEMMS[-1]}; model: what its layers do besides; commit: tokens to the host, the "
        "scheduler and text; gaps: between these. On a GPU it is the device's time, and what the host does meanwhile "
        "is in the gaps."
    )
    return PlainTable("Where a step goes", columns, tuple(lines), caption)


def key_of(row: Row) -> str:
    """What an arm's rows at one workload share."""
    return str(_place(row))
