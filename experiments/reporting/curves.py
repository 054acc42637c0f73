"""Sweep curves: a figure over the numeric axis that varies, a line for each of what else does."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from experiments.reporting.drawing import Point, Series, draw_series, format_tick, set_log_ticks
from experiments.reporting.measured import Factor, Measured, Plot
from experiments.reporting.pictures import Picture
from experiments.reporting.table_style import format_value, group_by, setting_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LINES = 8
"""Of one picture: more cannot be told apart."""

MOST_PICTURES = 4
"""Of one sweep: what else there is is in the table and in results.jsonl, and the last caption says so."""

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
class _Curve:
    """Points that the factors of `key` tell from the others. Where a single point has no such number, it is the same
    everywhere: a level.
    """

    key: Mapping[str, Factor | None]
    points: tuple[Measured, ...]


def curves_of(plot: Plot) -> tuple[list[Picture], list[Measured]]:
    """Pictures over each number that varies, and the points that are on none."""
    points = [point for point in plot.points if point.factors] if plot.curve is not None else []
    curves = _curves_by_axis(points, plot.least)
    alone = _not_on(points, chain(*curves.values()))
    pictures: list[Picture] = []
    shown: list[_Curve] = []
    for axis, some in curves.items():
        parts = _divide([*_lone_points(alone, some), *some])
        left_out = sum(map(len, parts.values())) - MOST_LINES * MOST_PICTURES if len(parts) > MOST_PICTURES else 0
        for number, (ending, part) in enumerate(list(parts.items())[:MOST_PICTURES], 1):
            suffix = f"-{number}" if len(parts) > 1 else ""
            pictures.append(_picture(plot, axis, suffix, ending, part, left_out if number == MOST_PICTURES else 0))
            shown += part.values()
    return pictures, _not_on(plot.points, shown)


def _not_on(points: Sequence[Measured], curves: Iterable[_Curve]) -> list[Measured]:
    on_curves = {id(point) for curve in curves for point in curve.points}
    return [point for point in points if id(point) not in on_curves]


def _curves_by_axis(points: Sequence[Measured], least: int) -> dict[str, list[_Curve]]:
    """Over each factor that is a number and has values enough: of a size `least`, of pins and options two."""
    factors = varying_factors(points)
    found = {}
    for axis in sorted(factors, key=lambda name: -len(factors[name])):
        if _is_numeric(factors[axis]) and len(factors[axis]) >= (least if _is_size(axis) else 2):
            others = [name for name in dict.fromkeys(("variant", *factors)) if name != axis]
            if curves := _curves_over(axis, points, others):
                found[axis] = curves
    return found


def varying_factors(points: Sequence[Measured]) -> dict[str, list[Factor]]:
    """The factors that differ among points, with their values in order of appearance; a factor that follows from those
    before it (the pages of a pool from its batch and context) is none of its own.
    """
    kept: dict[str, list[Factor]] = {}
    for name in dict.fromkeys(name for point in points for name in point.factors):
        having = [point for point in points if name in point.factors]
        values = list(dict.fromkeys(point.factors[name] for point in having))
        if len(values) > 1 and not _follows(name, having, list(kept)):
            kept[name] = values
    return kept


def _follows(name: str, points: Sequence[Measured], others: Sequence[str]) -> bool:
    """Whether the others' values say what this one's is."""
    alike = group_by(points, lambda point: tuple(point.factors.get(other) for other in others))
    return bool(others) and all(len({point.factors[name] for point in mine}) == 1 for mine in alike.values())


def _is_numeric(values: Sequence[Factor]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _is_size(axis: str) -> bool:
    """Whether this is an axis of an op's contract, which are capitals, rather than a pin or an option."""
    return axis == "context" or axis[:1].isupper()


def _curves_over(axis: str, points: Sequence[Measured], others: Sequence[str]) -> list[_Curve]:
    """A curve for each combination of the other factors that has several values of the axis."""
    having = [point for point in points if axis in point.factors]
    curves = []
    for key, mine in group_by(having, lambda point: tuple(point.factors.get(other) for other in others)).items():
        mine.sort(key=lambda point: float(point.factors[axis]))
        # Where a factor that is no number changes along with the number, the number alone explains nothing.
        if len({point.factors[axis] for point in mine}) > 1 and len(set(map(_words, mine))) == 1:
            curves.append(_Curve(dict(zip(others, key, strict=True)), tuple(mine)))
    return curves


def _words(point: Measured) -> tuple[tuple[str, Factor], ...]:
    """The factors that are no numbers."""
    return tuple((name, value) for name, value in point.factors.items() if not _is_numeric([value]))


def _lone_points(alone: Sequence[Measured], curves: Sequence[_Curve]) -> list[_Curve]:
    """The points that are on no curve, such as a baseline's, which has no pins: each a mark, or a level. Points of
    which several would be called the same are left to the dots.
    """
    names = list(curves[0].key)
    lone = [_Curve({name: point.factors.get(name) for name in names}, (point,)) for point in alone]
    taken = {_name(curve, names) for curve in curves}
    named = group_by(lone, lambda curve: _name(curve, names))
    return [same[0] for name, same in named.items() if len(same) == 1 and name not in taken]


def _divide(curves: Sequence[_Curve]) -> dict[str, dict[str, _Curve]]:
    """What each picture's title ends with -> its curves by name: of each size and workload a picture where many curves
    would share one, and not too many of any.
    """
    names = list(curves[0].key)
    apart = list(filter(_is_apart, names))
    facets = group_by(curves, lambda curve: _name(curve, apart))
    if len(curves) > MOST_LINES // 2 and _are_few(facets):
        inside = [name for name in names if name not in apart]
        return {f", {facet}": {_name(curve, inside): curve for curve in mine} for facet, mine in facets.items()}
    return _number([(_name(curve, names), curve) for curve in curves])


def _is_apart(axis: str) -> bool:
    """Whether curves are rather not compared across its values."""
    return _is_size(axis) or axis.partition(".")[0] in ("dtype", "workload", "model")


def _number(named: Sequence[tuple[str, _Curve]]) -> dict[str, dict[str, _Curve]]:
    """As many in each part as a picture holds."""
    starts = range(0, len(named), MOST_LINES)
    return {
        f" ({number} of {len(starts)})" * (len(starts) > 1): dict(named[start : start + MOST_LINES])
        for number, start in enumerate(starts, 1)
    }


def _are_few(facets: Mapping[str, Sequence[_Curve]]) -> bool:
    """Whether a picture for each can be drawn, with some curves to compare in it."""
    return 1 < len(facets) <= MOST_PICTURES and all(1 < len(mine) <= MOST_LINES for mine in facets.values())


def _name(curve: _Curve, names: Sequence[str]) -> str:
    """ "fused, block_size 16", of the factors named."""
    shown = []
    for name in names:
        if (value := curve.key[name]) is not None and value != "":
            bare = name in ("variant", "dtype", "workload") or isinstance(value, str)
            shown.append(str(value) if bare else f"{setting_name(name)} {format_value(value)}")
    return ", ".join(shown)


def _picture(
    plot: Plot, axis: str, suffix: str, ending: str, curves: Mapping[str, _Curve], left_out: int
) -> Picture:  # fmt: skip
    assert plot.curve is not None
    stem, title = plot.curve
    x_name = _AXES.get(axis, setting_name(axis))
    short = x_name.split(",")[0]
    lines = [Series(name, tuple(_over(axis, point) for point in curve.points)) for name, curve in curves.items()]
    level = f"Dashed: what has no {short}, the same everywhere. " if any(line.is_level for line in lines) else ""
    bars = "p50; bars reach up to p90. " if len(plot.points[0].values) > 1 else ""
    return Picture(
        name=f"{stem}-by-{setting_name(axis)}{suffix}".replace(".", "-").replace("/", "-"),
        title=f"{title} by {short}{ending}",
        caption=level + bars + plot.about + (f" {left_out} more lines are in results.jsonl." if left_out else ""),
        records=[
            {"series": line.name, setting_name(axis): x, "median": y, "low": low, "high": high, "unit": plot.unit}
            for line in lines
            for x, y, low, high in line.points
        ],
        draw=lambda figure: _draw(figure, lines, x_name, plot.unit),
    )


def _over(axis: str, point: Measured) -> Point:
    x = float(point.factors[axis]) if axis in point.factors else None
    return x, point.values[0], point.low, point.high


def _draw(figure: "Figure", lines: Sequence[Series], x_name: str, unit: str) -> None:
    """Doublings on a logarithmic axis, everything else from zero."""
    axes = draw_series(figure, lines, x_name, unit)
    xs = sorted({x for line in lines for x, *_ in line.points if x is not None})
    ys = [y for line in lines for _, y, *_ in line.points]
    if xs[0] > 0 and xs[-1] / xs[0] >= _LOG_FROM:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    axes.margins(x=0.06)
    shown = xs[:: math.ceil(len(xs) / 7)]
    axes.set_xticks(shown, list(map(format_tick, shown)))
    if min(ys) > 0 and max(ys) / min(ys) >= 2 * _LOG_FROM:
        axes.set_yscale("log")
        set_log_ticks(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
        axes.margins(y=0.12)
        axes.yaxis.set_major_formatter(lambda value, _: format_tick(value))
