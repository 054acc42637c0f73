"""Where a step's time goes: what each named range took itself, for every arm, up to the whole step."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.reporting.arms import arm_key, swept_names, title_of
from experiments.reporting.drawing import draw_legend, format_tick, printable
from experiments.reporting.pictures import INK, PAPER, RULE, SERIES, WIDTH, Picture
from experiments.reporting.table_style import (
    Cell,
    Column,
    PlainTable,
    build_table,
    format_microseconds,
    group_by,
    number_column,
)
from experiments.runs.rows import Row
from tkernels import OPS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GEMMS = tuple(name for name, op in OPS.items() if op.contract.work == "gemm")

_OWN = {"layer": "layers themselves", "step": "between phases"}  # what is not in a range nested in these
_OTHERS = "everything else"
_WHOLE = ("ops", "GEMMs", "model", "sample", "prepare", "schedule", "commit", "gaps")
_MOST_BARS = 24


@dataclass(frozen=True)
class Step:
    """One arm's mean step at one workload, by one clock.

    steps: how many were recorded. step_us: of one. parts: range -> microseconds a step that it took itself, the largest
    first. calls: of each range, in all steps. whole: where the whole of it goes, as shares that add up to 1.
    """

    workload: str
    arm: str
    clock: str
    steps: int
    step_us: float
    parts: Mapping[str, float]
    calls: Mapping[str, int]
    whole: Mapping[str, float]

    @property
    def title(self) -> str:
        return ", ".join(filter(None, [self.workload, self.arm]))


def steps_of(rows: Sequence[Row], engines: Sequence[Row]) -> list[Step]:
    """The recorded steps. On a GPU they are the device's time, of which what no range holds is a gap of its own."""
    names = swept_names(engines)
    recorded = [row for row in rows if row.stage == "step" and row.total_us is not None and row.steps]
    return [_mean_step(mine, title_of(mine[0], names)) for mine in group_by(recorded, arm_key).values()]


def _mean_step(rows: Sequence[Any], arm: str) -> Step:
    """Over the processes that recorded an arm's steps, of which each has the same ranges and as many steps."""
    clock = "device" if any(row.clock == "device" for row in rows) else "host"
    rows = [row for row in rows if row.clock == clock]
    firsts = list({row.replicate: row for row in rows}.values())
    parts: dict[str, float] = defaultdict(float)
    whole = dict.fromkeys(_WHOLE, 0.0)
    calls: Counter[str] = Counter()
    for row in rows:
        name = _OWN.get(str(row.category), str(row.range))
        parts[name] += row.self_us / row.steps / len(firsts)
        whole[_part_of(row)] += row.self_us / row.step_us / len(firsts)
        calls[name] += row.calls
    steps = sum(row.steps for row in firsts)
    mean_us = statistics.fmean(row.step_us / row.steps for row in firsts)
    ordered = dict(sorted(parts.items(), key=lambda part: -part[1]))
    return Step(str(rows[0].workload), arm, clock, steps, mean_us, ordered, calls, whole)


def _part_of(row: Row) -> str:
    if row.category in ("op", "section"):
        return "GEMMs" if row.op in GEMMS else "ops"
    if row.category in ("layer", "part") or row.range == "forward":
        return "model"
    if row.range in ("sample", "prepare", "schedule"):
        return str(row.range)
    return "commit" if row.range in ("commit", "wait", "detokenize") else "gaps"


def whole_steps_table(steps: Sequence[Step]) -> PlainTable:
    """A line for each arm whose steps were recorded."""
    caption = (
        "Shares of a step that was recorded apart, without overlap. ops: kernels but GEMMs, which are "
        f"{', '.join(GEMMS[:-1])} and {GEMMS[-1]}; model: what its layers do besides; commit: tokens to the host, the "
        "scheduler and text; gaps: between these. On a GPU it is the device's time, and what the host does meanwhile "
        "is in the gaps."
    )
    show: dict[Column, Callable[[Step], str | Cell]] = {
        Column("arm"): lambda step: step.title,
        number_column("us"): lambda step: f"{step.step_us:,.0f}",
    }
    for name in _WHOLE:
        show[number_column(name)] = lambda step, name=name: f"{step.whole[name]:.0%}"  # type: ignore[misc]
    return build_table("Where a step goes", show, steps, caption)


def ranges_table(steps: Sequence[Step]) -> PlainTable:
    """A line for each range of each arm's step."""
    items = [(step, name) for step in steps for name, us in step.parts.items() if us >= 0.001 * step.step_us]
    left_out = sum(len(step.parts) for step in steps) - len(items)
    caption = "What each range took itself, less what is nested in it; recorded in a round of its own, without overlap."
    caption += f" {left_out} ranges of less than 0.1% are in results.jsonl." if left_out else ""
    show = {
        Column("range"): lambda item: item[1],
        number_column("calls"): lambda item: f"{item[0].calls[item[1]]:,}",
        number_column("µs a step"): lambda item: format_microseconds(item[0].parts[item[1]]),
        number_column("of the step"): lambda item: _share(item[0].parts[item[1]], item[0], ".1%"),
    }
    return build_table("Every range of a step", show, items, caption, lambda item: _heading(item[0]))


def _heading(step: Step) -> str:
    return f"{step.title}: {format_microseconds(step.step_us)} µs a step, {step.steps} steps, {step.clock} clock"


def _share(us: float, step: Step, spec: str) -> str:
    return format(us / step.step_us, spec) if step.step_us else "-"


def steps_picture(steps: Sequence[Step], about: str) -> Picture:
    """A bar for each arm, in parts; the same range has the same colour in all."""
    weights: dict[str, float] = defaultdict(float)
    for step in steps:
        for name, us in step.parts.items():
            weights[_op(name)] += us / (step.step_us or 1.0)
    largest = sorted(weights, key=lambda name: -weights[name])[: len(SERIES)]
    records = [
        {"workload": step.workload, "arm": step.arm, "clock": step.clock, "range": name, "us_per_step": us}
        | {"share": us / step.step_us if step.step_us else None}
        for step in steps
        for name, us in step.parts.items()
    ]
    caption = f"Time that each range took itself, without what is nested in it, up to the whole step. {about}"
    if len(steps) > _MOST_BARS:
        caption += f" The first {_MOST_BARS} of {len(steps)} arms; all are in the CSV."
    title = "Where a step's time goes"
    return Picture("step-time", title, caption, records, lambda f: _draw_bars(f, steps[:_MOST_BARS], largest))


def _op(name: str) -> str:
    """ "paged_decode.split_kv" -> "paged_decode": variants of an op share its colour."""
    return name.partition(".")[0]


def _draw_bars(figure: "Figure", steps: Sequence[Step], largest: Sequence[str]) -> None:
    figure.set_size_inches(WIDTH, 1.2 + 0.5 * len(steps))
    axes = figure.subplots()
    colours = {name: SERIES[index] for index, name in enumerate(largest)} | {_OTHERS: RULE}
    for place, step in enumerate(steps):
        widths = dict.fromkeys(colours, 0.0)
        for name, us in step.parts.items():
            widths[_op(name) if _op(name) in widths else _OTHERS] += us
        left = 0.0
        for name, width in widths.items():
            axes.barh(place, width, left=left, height=0.42, color=colours[name], edgecolor=PAPER, linewidth=0.8)
            if width > 0.09 * step.step_us:
                middle, ink = left + width / 2, INK if name == _OTHERS else PAPER
                axes.text(middle, place, _share(width, step, ".0%"), color=ink, ha="center", va="center", fontsize=8)
            left += width
        axes.text(0, place - 0.36, printable(step.title, 60), color=INK, fontsize=8.5)
    axes.set_ylim(len(steps) - 0.6, -0.75)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: format_tick(value))
    axes.set_xlabel("µs a step")
    square = {"marker": "s", "linestyle": "none", "markersize": 7}
    draw_legend(figure, [(name, {**square, "color": colour}) for name, colour in colours.items()])
