"""What a picture is, and how it becomes an SVG that follows its page from light to dark.

Pictures are drawn in marks, colours that no picture needs, which stand for the theme's. A page puts CSS variables in
their place; a file keeps the light theme's colours, which any editor reads, and a rule for each that turns it dark.
"""

import csv
import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

NEEDS_PLOT = "not drawn: pictures need matplotlib, `pip install 'tkernels[plot]'`"

WIDTH = 4.7
"""Inches: a picture is as wide as a phone at its own size, and two stand side by side on a desk."""

INK, SOFT, RULE, PAPER = "#1c0a01", "#1c0a02", "#1c0a03", "#1c0a04"
SERIES = tuple(f"#5e0a0{index}" for index in range(7))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
"""Nine, beside seven colours: a series is told by both, and no pair comes back before the 64th."""

# Light, dark. The series differ in lightness too, for eyes that do not tell the hues apart, and have a contrast of
# at least 3 to 1 with the paper of their theme.
COLOURS: Mapping[str, tuple[str, str, str]] = {
    INK: ("--ink", "#1d1d1b", "#e9e7e2"),
    SOFT: ("--soft", "#62625d", "#a5a39c"),
    RULE: ("--rule", "#dcdad3", "#3a3935"),
    PAPER: ("--paper", "#fffffc", "#171716"),
    SERIES[0]: ("--s0", "#1460a8", "#6fb1f0"),
    SERIES[1]: ("--s1", "#c4500b", "#f29a5b"),
    SERIES[2]: ("--s2", "#0b7f62", "#4ecba5"),
    SERIES[3]: ("--s3", "#9d3f86", "#e394cf"),
    SERIES[4]: ("--s4", "#8a6a00", "#dfbd4d"),
    SERIES[5]: ("--s5", "#3f90c9", "#a6d8fa"),
    SERIES[6]: ("--s6", "#5b5b8f", "#b3b1ea"),
}

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "text.parse_math": False,  # a name with dollars in it is a name
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",  # text stays text: it can be read aloud, searched and restyled
}
_LEGEND, _MOST_ENTRIES = 44, 18  # letters of a name in a legend, and names
_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Picture:
    """One picture, not drawn yet.

    name: of its files. caption: says device, timer and spread. columns, records: its figures, as the CSV has them;
    several in one column, such as samples, are a tuple, with spaces between them there.
    draw: fills a matplotlib figure of WIDTH by 2.9 inches, which `draw_legend` makes higher.
    """

    name: str
    title: str
    caption: str
    columns: tuple[str, ...]
    records: tuple[tuple[Any, ...], ...]
    draw: Callable[["Figure"], None]

    def as_csv(self) -> str:
        """The figures, with a header."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(
            [" ".join(map(str, value)) if isinstance(value, tuple) else value for value in record]
            for record in self.records
        )
        return text.getvalue()

    def as_svg(self) -> str:
        """The picture in marks; needs matplotlib."""
        import matplotlib
        from matplotlib.figure import Figure

        buffer = io.StringIO()
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": self.name}), warnings.catch_warnings():
            # A name in a script that the measuring font lacks is measured roughly; the browser's fonts have it.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
            self.draw(figure)
            nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            figure.savefig(buffer, format="svg", metadata=nothing)
        return _cleaned(buffer.getvalue(), self.name, self.title)


def _cleaned(svg: str, name: str, title: str) -> str:
    """The svg element alone, with ids of its own among others on a page, and a name for those who do not see it."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<style type="text/css">.*?</style>', "", svg, count=1, flags=re.DOTALL)
    svg = _TAG.sub(lambda tag: _named(tag[0], name), svg)
    start = svg.index(">") + 1
    box = re.search(r'viewBox="[^"]*"', svg[:start])
    assert box is not None
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    opening = f'<svg {names} {box[0]} role="img" aria-label="{escape(title)}">'
    lines = "<style>*{stroke-linejoin:round;stroke-linecap:butt}</style>"
    return f"{opening}<title>{escape(title)}</title>{lines}{svg[start:].strip()}"


_TAG = re.compile("<[^>]*>")
"""A name in a picture is a text between tags, whatever it holds: there, < and > are escaped."""


def _named(tag: str, name: str) -> str:
    """A tag whose ids, and what refers to them, begin with the picture's name, and whose font is the page's."""
    tag = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', tag)
    tag = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", tag)
    return re.sub(r"font: ([^;\"]*?)(\d[\d.]*)px [^;\"]*", rf"font: \1\2px {_FONT}", tag)


def _coloured(svg: str, colours: Mapping[str, str]) -> str:
    """With `colours` in place of the marks, in styles of tags: a name may hold a mark's letters."""
    marks = re.compile("|".join(colours))

    def restyled(tag: re.Match[str]) -> str:
        return _STYLED.sub(lambda style: marks.sub(lambda mark: colours[mark[0]], style[0]), tag[0])

    return _TAG.sub(restyled, svg)


_STYLED = re.compile(r'(?<=\sstyle=")[^"]*')


def for_page(svg: str) -> str:
    """With CSS variables, which the page defines, in place of the marks."""
    return _coloured(svg, {mark: f"var({variable})" for mark, (variable, _, _) in COLOURS.items()})


def for_file(svg: str) -> str:
    """A document of its own: the light theme's colours, and rules that turn each dark where that is wished for."""
    rules = []
    for _, light, dark in COLOURS.values():
        rules += [f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}' for kind in ("fill", "stroke")]
    svg = _coloured(svg, {mark: light for mark, (_, light, _) in COLOURS.items()})
    paper, night = COLOURS[PAPER][1:]
    style = (
        f"svg{{color-scheme:light dark;background:{paper}}}"
        f"@media (prefers-color-scheme: dark){{svg{{background:{night}}}{''.join(rules)}}}"
    )
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + svg.replace("<style>", f"<style>{style}", 1) + "\n"


def variables(theme: int) -> str:
    """The theme's CSS variables: 1 is light, 2 dark."""
    return "".join(f"{values[0]}:{values[theme]};" for values in COLOURS.values())


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
