"""What a picture is, and how it becomes an SVG that follows its page from light to dark.

Pictures are drawn in marks, colours that no picture needs, which stand for the theme's. A page puts CSS variables in
their place; a file keeps the light theme's colours, which any editor reads, and a rule for each that turns it dark.
"""

import csv
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEEDS_PLOT = "not drawn: pictures need matplotlib, `pip install 'tkernels[plot]'`"

WIDTH = 4.7
"""Inches: a picture is as wide as a phone at its own size, and two stand side by side on a desk."""

INK, SOFT, RULE, PAPER = "#1c0a01", "#1c0a02", "#1c0a03", "#1c0a04"
SERIES = tuple(f"#5e0a0{index}" for index in range(7))
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
_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Picture:
    """One picture, not drawn yet.

    name: of its files. caption: says device, timer and spread. records: its figures, column by column; several in one
    column, such as samples, are a tuple.
    draw: fills a matplotlib figure of WIDTH by 2.9 inches, which `draw_legend` makes higher.
    """

    name: str
    title: str
    caption: str
    records: Sequence[Mapping[str, Any]]
    draw: Callable[["Figure"], None]

    def as_csv(self) -> str:
        """The figures, with a header; those of a tuple with spaces between them."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.records[0])
        for record in self.records:
            writer.writerow(" ".join(map(str, one)) if isinstance(one, tuple) else one for one in record.values())
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


def css_variables(theme: int) -> str:
    """The theme's CSS variables: 1 is light, 2 dark."""
    return "".join(f"{values[0]}:{values[theme]};" for values in COLOURS.values())
