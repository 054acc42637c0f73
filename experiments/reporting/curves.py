"""Sweep curves: a figure over the numeric axis that varies, a line for each of what else does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.reporting.pictures import PAPER, WIDTH, Picture, compact, legend, legend_rows, log_ticks, look
from experiments.reporting.points import METRICS, Factor, Measured, engine_points, kernel_points, numeric, varying
from experiments.reporting.table_style import told
from experiments.runs.rows import EngineRow, KernelRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LINES = 8
"""Of one picture: more cannot be told apart."""

MOST_PICTURES = 4
"""Of one sweep: what else there is is in the table and in results.jsonl, and the last caption says so."""

_APART = ("dtype", "workload", "model")  # what lines are rather not compared across
_LOG_FROM = 8  # a range of this ratio is shown in doublings
_AXES: Mapping[str, str] = {
    "context": "context, tokens",
    "T": "tokens T",
    "B": "sequences B",
    "M": "rows M",
    "S": "page size S, tokens",
    "block_size": "page size, tokens",
    "max_num_batched_tokens": "token budget of a step",
    "max_chunk_tokens": "chunk, tokens",
}


@dataclass(frozen=True)
class _Line:
    name: str
    points: tuple[tuple[float, Measured], ...]


def kernel_curves(rows: Sequence[KernelRow], asked: Mapping[str, Any], about: str) -> list[Picture]:
    """A picture, or some, for each op whose timed rows differ in a number.

    Args:
        rows: of the kernels stage, merged.
        asked: the experiment's `shapes`; sizes that a workload gives make a curve from three on.
        about: device, timer and spread, for the captions.
    """
    pictures = []
    for op, points in kernel_points(rows).items():
        least = 2 if op in asked else 3
        pictures += _sweeps(f"time-{op}", op, points, "time, µs", least, about)
    return pictures


def engine_curves(rows: Sequence[EngineRow], about: str, waits: str) -> list[Picture]:
    """Tokens per second and waiting times over a numeric option of the sweep; `waits` is the latter's caption."""
    pictures = []
    for metric, unit in METRICS.items():
        caption = about if metric == "tokens_per_s" else f"p50; bars reach up to p90. {waits}"
        name = f"engine-{metric.replace('_', '-')}"
        pictures += _sweeps(name, _capital(unit.split(",")[0]), engine_points(rows, metric), unit, 2, caption)
    return pictures


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sweeps(name: str, title: str, points: Sequence[Measured], unit: str, least: int, about: str) -> list[Picture]:
    """Pictures of `points` over each numeric factor with `least` values or more; pins always count."""
    factors = varying(points)
    sizes = {key for key in factors if key not in ("variant", "dtype", "workload")}
    found = []
    for axis in sorted(sizes, key=lambda key: -len(factors[key])):
        values = factors[axis]
        if not numeric(values) or len(values) < (least if _is_size(axis) else 2):
            continue
        others = [other for other in dict.fromkeys(("variant", *factors)) if other != axis]
        found += _over(name, title, points, axis, others, unit, about)
    return found


def _is_size(axis: str) -> bool:
    """Whether this is an axis of an op's contract, which are capitals, rather than a pin or an option."""
    return axis == "context" or axis[:1].isupper()


def _over(
    name: str, title: str, points: Sequence[Measured], axis: str, others: Sequence[str], unit: str, about: str
) -> list[Picture]:
    """Pictures over one axis: of each size and workload its own where many lines would share one, and not too many."""
    x_name = _AXES.get(axis, axis)
    title = f"{title} by {x_name.split(',')[0]}"
    lines = _lines(points, axis, others)
    apart = [other for other in others if _is_size(other) or other in _APART or other.startswith("workload.")]
    facets = list(dict.fromkeys(tuple(point.factors.get(other) for other in apart) for point in points))
    parts = [(title, lines[start : start + MOST_LINES]) for start in range(0, len(lines), MOST_LINES)]
    if len(parts) > 1:
        parts = [(f"{title} ({number} of {len(parts)})", part) for number, (_, part) in enumerate(parts, 1)]
    if len(lines) > MOST_LINES // 2 and 1 < len(facets) <= MOST_PICTURES:
        inside = [other for other in others if other not in apart]
        each = [[p for p in points if tuple(p.factors.get(other) for other in apart) == facet] for facet in facets]
        faceted = [
            (f"{title}, {_series(apart, facet)}", _lines(mine, axis, inside))
            for facet, mine in zip(facets, each, strict=True)
        ]
        if all(1 < len(mine) <= MOST_LINES for _, mine in faceted):
            parts = faceted
    pictures = []
    for number, (heading, part) in enumerate(parts[:MOST_PICTURES], 1):
        left_out = len(lines) - MOST_LINES * MOST_PICTURES if number == MOST_PICTURES < len(parts) else 0
        suffix = f"-{number}" if len(parts) > 1 else ""
        pictures.append(
            Picture(
                name=f"{name}-by-{axis}{suffix}".replace(".", "-").replace("/", "-"),
                title=heading,
                caption=about + (f" {left_out} more lines are in results.jsonl." if left_out else ""),
                columns=("series", axis, "median", "low", "high", "unit"),
                records=tuple((one.name, x, p.median, p.low, p.high, unit) for one in part for x, p in one.points),
                draw=_drawing(part, x_name, unit),
            )
        )
    return pictures


def _lines(points: Sequence[Measured], axis: str, others: Sequence[str]) -> list[_Line]:
    """A line for each combination of the other factors that has several values of the axis."""
    groups: dict[tuple[Factor | None, ...], list[tuple[float, Measured]]] = {}
    for point in points:
        if axis in point.factors:
            key = tuple(point.factors.get(other) for other in others)
            groups.setdefault(key, []).append((float(point.factors[axis]), point))
    return [
        _Line(_series(others, key), tuple(sorted(mine, key=lambda one: one[0])))
        for key, mine in groups.items()
        if len({x for x, _ in mine}) > 1 and len({_names(point) for _, point in mine}) == 1
    ]


def _names(point: Measured) -> tuple[tuple[str, Factor], ...]:
    """What of a point is no number. Where that changes along with a number, the number alone explains nothing."""
    return tuple((name, value) for name, value in point.factors.items() if not numeric([value]))


def _series(names: Sequence[str], values: Sequence[Factor | None]) -> str:
    shown = []
    for name, value in zip(names, values, strict=True):
        if value is not None and value != "":
            plain = name in ("variant", "dtype", "workload") or isinstance(value, str)
            shown.append(str(value) if plain else f"{name.removeprefix('workload.')} {told(value)}")
    return ", ".join(shown)


def _drawing(lines: Sequence[_Line], x_name: str, unit: str) -> Any:
    def draw(figure: "Figure") -> None:
        figure.set_size_inches(WIDTH, 2.9 + 0.17 * legend_rows([one.name for one in lines]))
        axes = figure.subplots()
        for index, one in enumerate(lines):
            style = look(index)
            places = [x for x, _ in one.points]
            lows, highs = [p.low for _, p in one.points], [p.high for _, p in one.points]
            axes.vlines(places, lows, highs, color=style["color"], linewidth=3.2, alpha=0.35)
            medians = [p.median for _, p in one.points]
            axes.plot(places, medians, markeredgecolor=PAPER, markeredgewidth=0.5, **style)
        xs = sorted({x for one in lines for x, _ in one.points})
        ys = [p.median for one in lines for _, p in one.points]
        _scale(axes, xs, ys)
        axes.set_xlabel(x_name)
        axes.set_title(unit)
        if any(one.name for one in lines):
            legend(figure, [(one.name, look(index)) for index, one in enumerate(lines)])

    return draw


def _scale(axes: Any, xs: Sequence[float], ys: Sequence[float]) -> None:
    """Doublings on a logarithmic axis, everything else from zero."""
    if xs[0] > 0 and xs[-1] / xs[0] >= _LOG_FROM:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    axes.margins(x=0.06)
    shown = xs if len(xs) <= 7 else xs[:: -(-len(xs) // 7)]
    axes.set_xticks(shown, [compact(x) for x in shown])
    if min(ys) > 0 and max(ys) / min(ys) >= 2 * _LOG_FROM:
        axes.set_yscale("log")
        log_ticks(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
        axes.margins(y=0.12)
        axes.yaxis.set_major_formatter(lambda value, _: compact(value))
