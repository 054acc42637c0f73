"""Lines, marks and levels over a number: how every picture with two axes is drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.reporting.pictures import PAPER, draw_legend, series_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Line:
    """One series.

    points: x, y, and the low and high end of y's spread; a single one whose x is None is a level, the same everywhere.
    labels: texts beside the points. joined: False of marks alone.
    """

    name: str
    points: tuple[tuple[float | None, float, float, float], ...]
    labels: tuple[str, ...] = ()
    joined: bool = True

    @property
    def is_level(self) -> bool:
        return self.points[0][0] is None


def draw_lines(figure: "Figure", lines: Sequence[Line], x_name: str, title: str) -> "Axes":
    """Draws the lines and their legend; scales, limits and ticks are the caller's."""
    axes = figure.subplots()
    entries = []
    for index, line in enumerate(lines):
        style = series_style(index) | {"linestyle": "--" if line.is_level else "-" if line.joined else "none"}
        edge = {"markeredgecolor": PAPER, "markeredgewidth": 0.5}
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
