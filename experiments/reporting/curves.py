"""Sweep curves: a figure over the numeric axis that varies, a line for each of what else does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.reporting.pictures import PAPER, WIDTH, Picture, compact, legend, legend_rows, log_ticks, look
from experiments.reporting.points import METRICS, Factor, Measured, engine_points, kernel_points, numeric, varying
from experiments.reporting.table_style import format_value, setting_name
from experiments.runs.rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LINES = 8
"""Of one picture: more cannot be told apart."""

MOST_PICTURES = 4
"""Of one sweep: what else there is is in the table and in results.jsonl, and the last caption says so."""

_APART = ("dtype", "workload", "model")  # what lines are rather not compared across
_LOG_FROM = 8  # a range of this ratio is shown in doublings
_LEVEL = "Dashed: what has no {}, the same everywhere."
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
class Curves:
    """Pictures of one figure. complete: every arm that has the figure is on one of them."""

    pictures: tuple[Picture, ...]
    complete: bool


@dataclass(frozen=True)
class _Line:
    """Over the axis; at nothing, where its one point has no such number, it is the same everywhere."""

    name: str
    points: tuple[tuple[float | None, Measured], ...]


def kernel_curves(rows: Sequence[Row], asked: Mapping[str, Any], about: str) -> dict[str, Curves]:
    """op -> a picture, or some, where its timed rows differ in a number.

    Args:
        rows: of the kernels stage, merged.
        asked: the experiment's `shapes`; sizes that a workload gives make a curve from three on.
        about: device, timer and spread, for the captions.
    """
    return {
        op: _sweeps(f"time-{op}", op, points, "time, µs", 2 if op in asked else 3, about)
        for op, points in kernel_points(rows).items()
    }


def engine_curves(rows: Sequence[Row], about: str, waits: str) -> dict[str, Curves]:
    """Of tokens per second and of waiting times, by column, over a numeric option of the sweep; `waits` is the latter's
    caption.
    """
    found = {}
    for metric, unit in METRICS.items():
        caption = about if metric == "tokens_per_s" else f"p50; bars reach up to p90. {waits}"
        name = f"engine-{metric.replace('_', '-')}"
        found[metric] = _sweeps(name, _capital(unit.split(",")[0]), engine_points(rows, metric), unit, 2, caption)
    return found


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sweeps(name: str, title: str, points: Sequence[Measured], unit: str, least: int, about: str) -> Curves:
    """Pictures of `points` over each numeric factor with `least` values or more; pins always count."""
    factors = varying(points)
    sizes = {key for key in factors if key not in ("variant", "dtype", "workload")}
    axes: dict[str, list[str]] = {}
    for axis in sorted(sizes, key=lambda key: -len(factors[key])):
        values = factors[axis]
        if numeric(values) and len(values) >= (least if _is_size(axis) else 2):
            axes[axis] = [other for other in dict.fromkeys(("variant", *factors)) if other != axis]
    on_lines = {id(p) for axis, others in axes.items() for one in _lines(points, axis, others) for _, p in one.points}
    alone = [point for point in points if id(point) not in on_lines]
    pictures: list[Picture] = []
    shown: set[int] = set()
    for axis, others in axes.items():
        for picture, lines in _over(name, title, points, alone, axis, others, unit, about):
            pictures.append(picture)
            shown |= {id(point) for one in lines for _, point in one.points}
    return Curves(tuple(pictures), all(id(point) in shown for point in points))


def _is_size(axis: str) -> bool:
    """Whether this is an axis of an op's contract, which are capitals, rather than a pin or an option."""
    return axis == "context" or axis[:1].isupper()


def _over(
    name: str,
    title: str,
    points: Sequence[Measured],
    alone: Sequence[Measured],
    axis: str,
    others: Sequence[str],
    unit: str,
    about: str,
) -> list[tuple[Picture, list[_Line]]]:
    """Pictures over one axis, with what is on each: of each size and workload its own where many lines would share one,
    and not too many. alone: points that no picture has on a line.
    """  # fmt: skip
    x_name = _AXES.get(axis, setting_name(axis))
    title = f"{title} by {x_name.split(',')[0]}"
    lines = _with_those_alone(_lines(points, axis, others), alone, axis, others)
    apart = [other for other in others if _is_size(other) or other in _APART or other.startswith("workload.")]
    facets = list(dict.fromkeys(tuple(point.factors.get(other) for other in apart) for point in points))
    parts = [(title, lines[start : start + MOST_LINES]) for start in range(0, len(lines), MOST_LINES)]
    if len(parts) > 1:
        parts = [(f"{title} ({number} of {len(parts)})", part) for number, (_, part) in enumerate(parts, 1)]
    if len(lines) > MOST_LINES // 2 and 1 < len(facets) <= MOST_PICTURES:
        inside = [other for other in others if other not in apart]
        faceted = []
        for facet in facets:
            mine, single = (
                [p for p in some if tuple(p.factors.get(other) for other in apart) == facet] for some in (points, alone)
            )
            part = _with_those_alone(_lines(mine, axis, inside), single, axis, inside)
            faceted.append((f"{title}, {_series(apart, facet)}", part))
        if all(1 < len(mine) <= MOST_LINES for _, mine in faceted):
            parts = faceted
    pictures = []
    for number, (heading, part) in enumerate(parts[:MOST_PICTURES], 1):
        left_out = len(lines) - MOST_LINES * MOST_PICTURES if number == MOST_PICTURES < len(parts) else 0
        suffix = f"-{number}" if len(parts) > 1 else ""
        level = any(x is None for one in part for x, _ in one.points)
        caption = f"{_LEVEL.format(x_name.split(',')[0])} {about}" if level else about
        picture = Picture(
            name=f"{name}-by-{setting_name(axis)}{suffix}".replace(".", "-").replace("/", "-"),
            title=heading,
            caption=caption + (f" {left_out} more lines are in results.jsonl." if left_out else ""),
            columns=("series", setting_name(axis), "median", "low", "high", "unit"),
            records=tuple((one.name, x, p.median, p.low, p.high, unit) for one in part for x, p in one.points),
            draw=_drawing(part, x_name, unit),
        )
        pictures.append((picture, part))
    return pictures


def _lines(points: Sequence[Measured], axis: str, others: Sequence[str]) -> list[_Line]:
    """A line for each combination of the other factors that has several values of the axis."""
    groups: dict[tuple[Factor | None, ...], list[tuple[float, Measured]]] = {}
    for point in points:
        if axis in point.factors:
            key = tuple(point.factors.get(other) for other in others)
            groups.setdefault(key, []).append((float(point.factors[axis]), point))
    found = []
    for key, mine in groups.items():
        mine.sort(key=lambda one: one[0])
        if len({x for x, _ in mine}) > 1 and len({_names(point) for _, point in mine}) == 1:
            found.append(_Line(_series(others, key), tuple(mine)))
    return found


def _with_those_alone(
    lines: list[_Line], alone: Sequence[Measured], axis: str, others: Sequence[str]
) -> list[_Line]:  # fmt: skip
    """Lines, and first the points that are on none, such as a baseline's, which has no pins: a mark, or a level. Points
    of which several would be called the same are left to the dots.
    """
    if not lines:
        return []
    taken = {one.name for one in lines}
    named: dict[str, list[_Line]] = {}
    for point in alone:
        x = float(point.factors[axis]) if axis in point.factors else None
        one = _Line(_series(others, [point.factors.get(other) for other in others]), ((x, point),))
        named.setdefault(one.name, []).append(one)
    return [*(same[0] for same in named.values() if len(same) == 1 and same[0].name not in taken), *lines]


def _names(point: Measured) -> tuple[tuple[str, Factor], ...]:
    """What of a point is no number. Where that changes along with a number, the number alone explains nothing."""
    return tuple((name, value) for name, value in point.factors.items() if not numeric([value]))


def _series(names: Sequence[str], values: Sequence[Factor | None]) -> str:
    shown = []
    for name, value in zip(names, values, strict=True):
        if value is not None and value != "":
            bare = name in ("variant", "dtype", "workload") or isinstance(value, str)
            shown.append(str(value) if bare else f"{setting_name(name)} {format_value(value)}")
    return ", ".join(shown)


def _drawing(lines: Sequence[_Line], x_name: str, unit: str) -> Any:
    def draw(figure: "Figure") -> None:
        figure.set_size_inches(WIDTH, 2.9 + 0.17 * legend_rows([one.name for one in lines]))
        axes = figure.subplots()
        looks = [look(index) | ({"linestyle": "--"} if _is_level(one) else {}) for index, one in enumerate(lines)]
        xs = sorted({x for one in lines for x, _ in one.points if x is not None})
        for one, style in zip(lines, looks, strict=True):
            if _is_level(one):
                point = one.points[0][1]
                axes.axhspan(point.low, point.high, color=style["color"], linewidth=0, alpha=0.2)
                axes.axhline(point.median, markeredgecolor=PAPER, markeredgewidth=0.5, **style)
                continue
            places = [x for x, _ in one.points if x is not None]
            lows, highs = [p.low for _, p in one.points], [p.high for _, p in one.points]
            axes.vlines(places, lows, highs, color=style["color"], linewidth=3.2, alpha=0.35)
            medians = [p.median for _, p in one.points]
            axes.plot(places, medians, markeredgecolor=PAPER, markeredgewidth=0.5, **style)
        ys = [p.median for one in lines for _, p in one.points]
        _scale(axes, xs, ys)
        axes.set_xlabel(x_name)
        axes.set_title(unit)
        if any(one.name for one in lines):
            legend(figure, [(one.name, style) for one, style in zip(lines, looks, strict=True)])

    return draw


def _is_level(line: _Line) -> bool:
    return line.points[0][0] is None


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
