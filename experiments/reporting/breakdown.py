"""Where a step's time goes: what each named range took itself, for every arm, up to the whole step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.reporting.arms import swept_names, title_of
from experiments.reporting.pictures import INK, PAPER, RULE, SERIES, WIDTH, Picture, compact, label, legend
from experiments.reporting.table_style import Column, Line, PlainTable, cells, format_microseconds
from experiments.runs.rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OTHERS = "everything else"
_OWN = {"layer": "layers themselves", "step": "between phases"}  # what is not in a range nested in these


@dataclass(frozen=True)
class Step:
    """One arm's step at one workload: microseconds a step that each range took itself, the largest first."""

    workload: str
    arm: str
    clock: str
    steps: int
    step_us: float
    parts: Mapping[str, float]
    calls: Mapping[str, int]


def steps_of(rows: Sequence[Row], engines: Sequence[Row]) -> list[Step]:
    """The recorded steps. On a GPU they are the device's time, of which what no range holds is a gap of its own."""
    names = swept_names(engines)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.status == "ok" and row.total_us is not None:
            about = Row.model_construct(stage="engine", arm=row.arm, settings=row.settings)
            groups.setdefault((str(row.workload), title_of(about, names)), []).append(row)
    found = []
    for (workload, arm), mine in groups.items():
        clock = "device" if any(row.clock == "device" for row in mine) else "host"
        parts: dict[str, float] = {}
        calls: dict[str, int] = {}
        chosen = [row for row in mine if row.clock == clock and row.steps]
        # Each process that recorded has the same number of rows, and of steps: the workload is the same.
        count = len({row.replicate for row in chosen})
        for row in chosen:
            name = _OWN.get(str(row.category), str(row.range))
            parts[name] = parts.get(name, 0.0) + (row.self_us or 0.0) / (row.steps or 1) / count
            calls[name] = calls.get(name, 0) + (row.calls or 0)
        if chosen:
            ordered = dict(sorted(parts.items(), key=lambda part: -part[1]))
            whole = {row.replicate: ((row.step_us or 0.0) / (row.steps or 1), row.steps or 1) for row in chosen}
            mean = sum(us for us, _ in whole.values()) / count
            found.append(Step(workload, arm, clock, sum(steps for _, steps in whole.values()), mean, ordered, calls))
    return found


def not_recorded(rows: Sequence[Row]) -> str:
    """Why there is no breakdown."""
    return next((str(row.speed_reason or row.reason) for row in rows if row.speed_reason or row.reason), "not measured")


def step_table(steps: Sequence[Step], most: int = 60) -> PlainTable:
    """A line for each range of each arm."""
    columns = (Column("range"), *(Column(name, right=True) for name in ("calls", "µs a step", "of the step")))
    lines: list[Line] = []
    left_out = 0
    for step in steps:
        where = f"{step.workload}, {step.arm}" if step.workload else step.arm
        lines.append(f"{where}: {format_microseconds(step.step_us)} µs a step, {step.steps} steps, {step.clock} clock")
        shown = [name for name, value in step.parts.items() if value >= 0.001 * step.step_us][:most]
        left_out += len(step.parts) - len(shown)
        for name in shown:
            value = step.parts[name]
            share = f"{value / step.step_us:.1%}" if step.step_us else "-"
            lines.append(cells(name, f"{step.calls[name]:,}", format_microseconds(value), share))
    caption = "What each range took itself, less what is nested in it; recorded in a round of its own, without overlap."
    caption += f" {left_out} ranges of less than 0.1% are in results.jsonl." if left_out else ""
    return PlainTable("Every range of a step", columns, tuple(lines), caption)


def breakdown_picture(steps: Sequence[Step], about: str, most: int = 24) -> Picture | None:
    """A bar for each arm, in parts; the same range has the same colour in all."""
    if not steps:
        return None
    weights: dict[str, float] = {}
    for step in steps:
        for name, value in step.parts.items():
            weights[_op(name)] = weights.get(_op(name), 0.0) + value / (step.step_us or 1.0)
    largest = sorted(weights, key=lambda name: -weights[name])[: len(SERIES)]
    records = tuple(
        (step.workload, step.arm, step.clock, name, value, value / step.step_us if step.step_us else None)
        for step in steps
        for name, value in step.parts.items()
    )
    caption = f"Time that each range took itself, without what is nested in it, up to the whole step. {about}"
    if len(steps) > most:
        caption += f" The first {most} of {len(steps)} arms; all are in the CSV."

    def draw(figure: "Figure") -> None:
        _draw(figure, steps[:most], largest)

    columns = ("workload", "arm", "clock", "range", "us_per_step", "share")
    return Picture("step-time", "Where a step's time goes", caption, columns, records, draw)


def _op(name: str) -> str:
    """ "paged_decode.split_kv" -> "paged_decode": variants of an op share its colour."""
    return name.partition(".")[0]


def _draw(figure: "Figure", steps: Sequence[Step], largest: Sequence[str]) -> None:
    figure.set_size_inches(WIDTH, 1.5 + 0.5 * len(steps))
    axes = figure.subplots()
    for place, step in enumerate(steps):
        widths = dict.fromkeys([*largest, _OTHERS], 0.0)
        for name, value in step.parts.items():
            widths[_op(name) if _op(name) in widths else _OTHERS] += value
        left = 0.0
        for index, (name, width) in enumerate(widths.items()):
            colour = RULE if name == _OTHERS else SERIES[index]
            axes.barh(place, width, left=left, height=0.42, color=colour, edgecolor=PAPER, linewidth=0.8)
            if step.step_us and width / step.step_us > 0.09:
                share = f"{width / step.step_us:.0%}"
                axes.text(left + width / 2, place, share, color=PAPER if name != _OTHERS else INK, ha="center",
                          va="center", fontsize=8)  # fmt: skip
            left += width
        where = f"{step.workload}: {step.arm}" if step.workload else step.arm
        axes.text(0, place - 0.36, f"{label(where, 60)}", color=INK, fontsize=8.5)
    axes.set_ylim(len(steps) - 0.6, -0.75)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: compact(value))
    axes.set_xlabel("µs a step")
    square = {"marker": "s", "linestyle": "none", "markersize": 7}
    entries = [(name, {**square, "color": SERIES[index]}) for index, name in enumerate(largest)]
    legend(figure, [*entries, (_OTHERS, {**square, "color": RULE})])
