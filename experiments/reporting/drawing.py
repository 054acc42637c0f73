"""What pictures are drawn of: series with their colours and markers, numbers on axes, and legends."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.reporting.pictures import PAPER, SERIES, WIDTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
"""Nine, beside seven colours: a series is told by both, and no pair comes back before the 64th."""

_LEGEND, _MOST_ENTRIES = 44, 18  # letters of a name in a legend, and names


Point = tuple[float | None, float, float, float]
"""x, y, and the low and high end of y's spread."""


def point_without_spread(x: float | None, y: float) -> Point:
    return x, y, y, y


@dataclass(frozen=True)
class Series:
    """One series.

    points: a single one whose x is None is a level, the same everywhere. labels: texts beside the points. joined: False
    of marks alone.
    """

    name: str
    points: tuple[Point, ...]
    labels: tuple[str, ...] = ()
    joined: bool = True

    @property
    def is_level(self) -> bool:
        return self.points[0][0] is None


def draw_series(figure: "Figure", lines: Sequence[Series], x_name: str, title: str) -> "Axes":
    """Draws the lines and their legend; scales, limits and ticks are the caller's."""
    axes = figure.subplots()
    entries = []
    for index, line in enumerate(lines):
        linestyle = "--" if line.is_level else "-" if line.joined else "none"
        style = {**series_style(index), "linestyle": linestyle}
        edge: dict[str, Any] = {"markeredgecolor": PAPER, "markeredgewidth": 0.5}
        xs, ys, lows, highs = zip(*line.points, strict=True)
        if line.is_level:
            axes.axhspan(lows[0], highs[0], color=style["color"], linewidth=0, alpha=0.2)
            axes.axhline(ys[0], **edge, **style)
        else:
            if lows != highs:
                axes.vlines(xs, lows, highs, color=style["color"], linewidth=3.2, alpha=0.35)
            axes.plot(xs, ys, **edge, **style)
        for text, x, y in zip(line.labels, xs, ys, strict=False):
            axes.annotate(text, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
        entries.append((line.name, style))
    axes.set_xlabel(x_name)
    axes.set_title(title)
    if any(line.name for line in lines):
        draw_legend(figure, entries)
    return axes


def series_style(index: int) -> dict[str, Any]:
    """The colour and marker of a series."""
    return {"color": SERIES[index % len(SERIES)], "marker": MARKERS[index % len(MARKERS)]}


def printable(text: str, most: int = 40) -> str:
    """A name as a picture can hold it: no control characters, which no SVG may have, and not too long."""
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    text = text if len(text) <= most else f"{text[: most - most // 3]}…{text[1 - most // 3 :]}"
    return f" {text}" if text.startswith("_") else text  # matplotlib takes a leading underscore for "hide this"


def format_tick(value: float) -> str:
    """A tick's number: 4096 -> "4,096", 16777216 -> "16.8M", 0.25 -> "0.25"."""
    for power, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= power:
            return f"{value / power:.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def set_log_ticks(axis: "Axis") -> None:
    """Labels on a logarithmic axis: powers of ten over a wide range, finer steps over a narrow one."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    steps = (1.0,) if decades > 2.5 else (1.0, 2.0, 5.0) if decades > 0.9 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    axis.set_major_locator(LogLocator(10, steps, numticks=20))
    axis.set_major_formatter(lambda value, _: format_tick(value))
    axis.set_minor_locator(NullLocator())  # unseen ticks: 3.4 s instead of 2.8 for twenty pictures


def draw_legend(figure: "Figure", entries: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Above the plot, as many columns as fit, by whose height the figure grows; what does not fit is counted."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **dict(style)) for _, style in entries[:_MOST_ENTRIES]]
    names = [printable(name, _LEGEND) for name, _ in entries[:_MOST_ENTRIES]]
    if len(entries) > _MOST_ENTRIES:
        handles.append(Line2D([], [], linestyle="none"))
        names.append(f"and {len(entries) - _MOST_ENTRIES} more")
    columns = max(1, min(4, 54 // (max(map(len, names)) + 6)))
    figure.set_size_inches(WIDTH, figure.get_figheight() + 0.17 * math.ceil(len(names) / columns))
    figure.legend(
        handles, names, loc="outside upper left", ncols=columns, borderpad=0, handlelength=1.6, columnspacing=1.4
    )
