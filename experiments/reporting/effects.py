"""From a kernel alone to tokens a second: what swapping a variant did at every level, and what else a step consists of.

All of it follows from a run's rows: checks, kernels' times, engines' rates, parity, and the ranges of recorded steps.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.reporting.arms import arm_key
from experiments.reporting.judged import Judged
from experiments.reporting.table_style import (
    Cell,
    Column,
    Line,
    PlainTable,
    build_table,
    cells,
    figure,
    format_value,
    setting_name,
)
from experiments.runs.comparison import Outcome
from experiments.runs.rows import Row
from experiments.runs.table import spread
from experiments.runs.verdicts import Paired
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


@dataclass(frozen=True)
class _Swap:
    """kernels: timings of both variants at each point that counts."""

    op: str
    first: Row
    row: Row
    kernels: Sequence[_Pair]

    @property
    def engines(self) -> Sequence[_Pair]:
        return [(self.first, self.row)] if self.row.tokens_per_s and self.first.tokens_per_s else []


def effects_of(rows: Sequence[Row], ops: Sequence[str], every: Sequence[Row] = ()) -> list[Effect]:
    """Of each of the swept `ops` and each set of arms that differ in it alone, every variant over the first; the
    first is there too, at 1. rows: merged. every: those of each process, which a test needs.
    """
    swaps = []
    by_stage: dict[str, list[Row]] = {}
    for row in rows:
        by_stage.setdefault(row.stage, []).append(row)
    timed = _by_variant([row for row in by_stage.get("kernels", ()) if row.median_us])
    for op in ops:
        groups: dict[Any, list[Row]] = {}
        for row in by_stage.get("engine", ()):
            if row.status == "ok" and op in row.arm:
                rest_of_arm = {name: label for name, label in row.arm.items() if name != op}
                groups.setdefault(arm_key(row.model_copy(update={"arm": rest_of_arm})), []).append(row)
        for first, *rest in groups.values():
            if others := [row for row in rest if row.arm[op] != first.arm[op]]:
                swaps += [_Swap(op, first, row, _timings(timed, op, first, row)) for row in (first, *others)]
    judged = Judged.of(every, [pair for swap in swaps for pair in (*swap.engines, *swap.kernels)])
    checks = _by_variant([row for row in by_stage.get("check", ()) if row.max_error_ratio is not None])
    parities = {arm_key(row): row for row in reversed(by_stage.get("parity", ()))}
    steps = _steps_by_arm(by_stage.get("step", ()))
    return [_effect(swap, judged, checks, parities.get(arm_key(swap.row)), steps) for swap in swaps]


def _effect(
    swap: _Swap,
    judged: Judged,
    checks: Mapping[Any, Sequence[Row]],
    parity: Row | None,
    steps: Mapping[tuple[str, str], Sequence[Row]],
) -> Effect:
    op, row = swap.op, swap.row
    variant = row.arm[op]
    divergence = None if parity is None else parity.first_divergence
    shares = {step.clock: step.share for step in steps.get(arm_key(row), ()) if step.range == f"{op}.{variant}"}
    return Effect(
        op, swap.first.arm[op], variant, row.arm, row.settings, str(row.workload),
        alone=_ratio(swap.kernels, judged),
        share=shares.get("device", shares.get("host")),  # by the device's clock where it has one
        end_to_end=_ratio(swap.engines, judged),
        error=max((one.max_error_ratio or 0.0 for one in checks.get((op, variant, row.dtype), ())), default=None),
        drift=None if parity is None else parity.logprob_drift,
        differs=None if divergence is None else (int(divergence["request"] or 0), int(divergence["place"] or 0)),
    )  # fmt: skip


def _by_variant(rows: Sequence[Row]) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault((row.op, row.variant, row.dtype), []).append(row)
    return found


def _steps_by_arm(steps: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in steps:
        if row.status == "ok" and row.total_us is not None:
            found.setdefault(arm_key(row), []).append(row)
    return found


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


def _speed(row: Row) -> _Speed:
    """With its spread, whose share of a time is that of its inverse."""
    if row.stage == "kernels":
        time = row.median_us or math.inf
        return 1 / time, row.iqr_us / time**2 if row.iqr_us is not None else None
    return row.tokens_per_s or 0.0, row.tokens_per_s_iqr


def _timings(timed: Mapping[Any, Sequence[Row]], op: str, first: Row, row: Row) -> Sequence[_Pair]:
    before, mine = (
        {
            str(one.point): one
            for one in timed.get((op, variant, row.dtype), ())
            if all(row.settings.get(name, value) == value for name, value in one.settings.items())
        }
        for variant in (first.arm[op], row.arm[op])
    )
    both = [(before[point], mine[point]) for point in before if point in mine]
    own = [pair for pair in both if any(_is_of(served, row) for served in pair[1].serves or ())]
    return own or [pair for pair in both if not pair[1].serves]


def _is_of(served: Mapping[str, Any], row: Row) -> bool:
    """Whether a point that serves this is one of the arm's steps. What is not swept, all share."""
    about = {"workload": row.workload, **row.settings}
    return all(about.get(name, value) == value for name, value in served.items())


def effects_table(rows: Sequence[Row], names: Sequence[str], every: Sequence[Row] = ()) -> PlainTable | None:
    """The effects of the swept ops among `names`, as of `effects_of`; None where no op was swept, or no step was
    recorded.
    """
    ops = [name for name in names if any(row.stage == "engine" and name in row.arm for row in rows)]
    effects = effects_of(rows, ops, every)
    if all(effect.share is None for effect in effects):
        return None
    several = len(ops) > 1 or any(effect.settings for effect in effects)
    show: dict[Column, Callable[[Effect], str | Cell]] = {Column("variant"): lambda effect: effect.variant}
    if several:
        show[Column("with")] = lambda effect: _others(effect, ops)
    show |= {
        figure("alone"): lambda effect: _times(effect.alone),
        figure("of step"): lambda effect: "n/m" if effect.share is None else f"{effect.share:.1%}",
        figure("tokens/s"): lambda effect: _times(effect.end_to_end),
        figure("error"): lambda effect: "-" if effect.error is None else f"{effect.error:.2f}",
        figure("drift"): lambda effect: "-" if effect.drift is None else f"{effect.drift:.0e}",
        figure("differs"): _divergence,
    }
    items: list[Effect | str] = []
    for (workload, op), mine in itertools.groupby(effects, key=lambda effect: (effect.workload, effect.op)):
        items += [": ".join(filter(None, [workload, op])), *mine]
    caption = (
        "alone: speed of the kernel over the first variant's, the geometric mean over the points of the arm's own "
        "workload; of step: its share of a step; tokens/s: over those with the first variant; in brackets the ratio's "
        f"IQR.{_marks(effects)} error: over what is allowed; drift, differs: of log-probabilities, and request/token "
        "of the first other token, beside the first arm of the same model and workload. n/m: not measured."
    )
    return build_table(EFFECTS, show, items, caption)


def _others(effect: Effect, ops: Sequence[str]) -> str:
    """What else the arm is made of."""
    others = [effect.arm[name] for name in ops if name != effect.op]
    return ", ".join([*others, *(f"{setting_name(name)} {format_value(v)}" for name, v in effect.settings.items())])


def _divergence(effect: Effect) -> str:
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


def step_table(rows: Sequence[Row], titles: Mapping[tuple[str, str], str]) -> PlainTable | None:
    """A line for each arm whose steps were recorded, and None where none was. titles: what arms are called."""
    arms = _steps_by_arm([row for row in rows if row.stage == "step"])
    lines: list[Line] = []
    for key, mine in arms.items():
        clock = "device" if any(row.clock == "device" for row in mine) else "host"
        mean = (mine[0].step_us or 0.0) / max(mine[0].steps or 1, 1)
        shares = whole_step([row for row in mine if row.clock == clock]).values()
        lines.append(cells(titles.get(key, key[1]), f"{mean:,.0f}", *(f"{share:.0%}" for share in shares)))
    if not lines:
        return None
    columns = (Column("arm"), *(figure(name) for name in ("us", *_WHOLE)))
    caption = (
        "Shares of a step that was recorded apart, without overlap. ops: kernels but GEMMs, which are "
        f"{', '.join(GEMMS[:-1])} and {GEMMS[-1]}; model: what its layers do besides; commit: tokens to the host, the "
        "scheduler and text; gaps: between these. On a GPU it is the device's time, and what the host does meanwhile "
        "is in the gaps."
    )
    return PlainTable("Where a step goes", columns, tuple(lines), caption)
