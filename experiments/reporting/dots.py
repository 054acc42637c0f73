"""Arms and variants side by side, where no curve has them all: a dot each, with its spread."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from experiments.reporting.curves import curves_of
from experiments.reporting.drawing import draw_legend, format_tick, printable, set_log_ticks
from experiments.reporting.measured import Measured, Plot
from experiments.reporting.pictures import INK, PAPER, SERIES, SOFT, WIDTH, Picture
from experiments.reporting.table_style import group_by

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 40
"""Dots of a picture: of each group the best, and the first, which the others are beside. All are in the CSV."""

_MOST_MARKS = 50
_LINE = 0.24  # inches of height for each line of a picture
_PERCENTILES = ("p50", "p90", "p99")


def pictures_of(plots: Sequence[Plot]) -> list[Picture]:
    """The curves of each plot, and before them its dots, where some point is on no curve."""
    found: list[Picture] = []
    for plot in plots:
        curves, left_out = curves_of(plot)
        dots = dots_of(plot) if left_out else None
        found += [*([dots] if dots is not None else []), *curves]
    return found


def dots_of(plot: Plot) -> Picture | None:
    """Every point, those of a group together; None of fewer than two."""
    if plot.dots is None or len(plot.points) < 2:
        return None
    dots = [point for mine in group_by(plot.points, lambda point: point.group).values() for point in mine]
    records = [{"group": dot.group, "name": dot.name, **_figures(dot), "unit": plot.unit} for dot in dots]
    if any(dot.samples for dot in dots):
        records = [record | {"samples": dot.samples} for record, dot in zip(records, dots, strict=True)]
    shown = _best(dots, -1 if plot.unit == "tokens/s" else 1)
    return Picture(*plot.dots, _caption(plot, dots), records, lambda figure: _draw(figure, shown, plot.unit))


def _caption(plot: Plot, dots: Sequence[Measured]) -> str:
    caption = plot.about
    if len(dots[0].values) == 1:
        marks = "; small marks: what they are of" if any(map(_has_marks, dots)) else ""
        caption = f"Bars: quartiles{marks}. {caption}"
    if len(dots) > MOST:
        caption += f" {MOST} of {len(dots)}: the best and the first of each group; all are in the CSV."
    return caption.strip()


def _figures(dot: Measured) -> dict[str, Any]:
    if len(dot.values) > 1:
        return dict(zip(_PERCENTILES, dot.values, strict=True))
    return {"median": dot.values[0], "low": dot.low, "high": dot.high}


def _has_marks(dot: Measured) -> bool:
    """Whether its samples are few enough to be drawn."""
    return 1 < len(dot.samples) <= _MOST_MARKS


def _best(dots: Sequence[Measured], sign: int) -> list[Measured]:
    """As many as a picture holds, in their order: of each group in turn the best, the first, the second best and so
    on. sign: 1 where less is better.
    """
    ranked: list[tuple[int, int]] = []
    for mine in group_by(range(len(dots)), lambda place: dots[place].group).values():
        best, *others = sorted(mine, key=lambda place: sign * dots[place].values[0])
        ranked += [(rank, place) for rank, place in enumerate(dict.fromkeys([best, mine[0], *others]))]
    return [dots[place] for place in sorted(place for _, place in sorted(ranked)[:MOST])]


def _draw(figure: "Figure", dots: Sequence[Measured], unit: str) -> None:
    names = ["\n".join(textwrap.wrap(printable(dot.name, 56), 28)) or "-" for dot in dots]
    places, heads, height = _place(dots, names)
    figure.set_size_inches(WIDTH, 1.0 + _LINE * height)
    axes = figure.subplots()
    axes.set_ylim(height - 0.4, -0.7)
    for dot, place in zip(dots, places, strict=True):
        _draw_dot(axes, dot, place)
    axes.set_yticks(places, names)
    axes.tick_params(axis="y", labelcolor=INK)
    for text, place in heads.items():
        where: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "weight": "bold"}
        axes.text(0.0, place, f" {printable(text)}", color=SOFT, fontsize=8.5, **where)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    _scale(axes, dots)
    axes.set_xlabel(unit)
    if len(dots[0].values) > 1:
        draw_legend(figure, [(name, _style(index)) for index, name in enumerate(_PERCENTILES)])


def _scale(axes: "Axes", dots: Sequence[Measured]) -> None:
    """From zero, or logarithmic over a wide range."""
    largest = max(max(*dot.values, dot.high, *dot.samples) for dot in dots)
    smallest = min(min(dot.values) for dot in dots)
    if smallest > 0 and largest / smallest > 30:
        axes.set_xscale("log")
        set_log_ticks(axes.xaxis)
    else:
        axes.set_xlim(0, largest * 1.08)
        axes.xaxis.set_major_formatter(lambda value, _: format_tick(value))


def _place(dots: Sequence[Measured], names: Sequence[str]) -> tuple[list[float], dict[str, float], float]:
    """In lines from the top, where each dot stands, and the heading of each of several groups; and all there are."""
    places: list[float] = []
    heads: dict[str, float] = {}
    several = len({dot.group for dot in dots}) > 1
    at = 0.0
    for dot, name in zip(dots, names, strict=True):
        if several and dot.group not in heads:
            heads[dot.group] = at + 0.35 * bool(heads)
            at = heads[dot.group] + 1.0
        extra = 0.55 * name.count("\n")
        places.append(at + extra / 2)
        at += 1.0 + extra
    return places, heads, at


def _style(index: int) -> Mapping[str, Any]:
    """Of p50, p90 and p99: one colour, told apart by shape and filling."""
    return {
        "marker": ("o", "D", "|")[index],
        "color": SERIES[0],
        "linestyle": "none",
        "markerfacecolor": (SERIES[0], PAPER, SERIES[0])[index],
        "markersize": (6.5, 5, 9)[index],
    }


def _draw_dot(axes: "Axes", dot: Measured, place: float) -> None:
    if len(dot.values) > 1:
        axes.hlines(place, dot.values[0], dot.values[-1], color=SERIES[0], linewidth=1.2)
        for index, value in enumerate(dot.values):
            axes.plot([value], [place], zorder=3, **_style(index))
        return
    if _has_marks(dot):
        axes.plot(dot.samples, [place + 0.28] * len(dot.samples), "|", color=SOFT, markersize=3.5)
    axes.hlines(place, dot.low, dot.high, color=SERIES[0], linewidth=6, alpha=0.35)
    axes.plot([dot.values[0]], [place], "o", color=SERIES[0], markersize=6.5, markeredgecolor=PAPER, zorder=3)
