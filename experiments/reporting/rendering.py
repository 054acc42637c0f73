"""A report as HTML, Markdown and JSON, and a run's folder with the first of them and the pictures in it."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from experiments.reporting.pictures import NEEDS_PLOT, Picture, css_variables, for_file, for_page
from experiments.reporting.report import Report
from experiments.reporting.table_style import Cell, Column, PlainTable
from experiments.runs.rows import in_words, is_odd
from experiments.runs.table import as_csv
from tkernels.files import write_text

REPORT = "report.html"
FIGURES = "figures"
TABLE = "table.csv"
MOST_LINES = 400
"""Of a table on the page: nobody reads more, and a browser takes seconds to lay them out. All are in results.jsonl."""

_SHORT = 24  # letters of a cell that is not worth breaking: a table may scroll
_TEMPLATES = FileSystemLoader(Path(__file__).parent / "templates")


def write_report(report: Report, folder: Path) -> Path:
    """Writes report.html, table.csv with every figure that was measured, and figures/ with an SVG and a CSV of each
    picture, each whole or not at all; other files there are left alone.

    Without matplotlib (the extra `plot`) there are no SVGs, and the report says what it lacks.
    """
    svgs = draw_pictures(report)
    files = {REPORT: as_html(report, svgs), TABLE: as_csv(report.table)}
    for picture in report.pictures:
        files[f"{FIGURES}/{picture.name}.csv"] = picture.as_csv()
        if picture.name in svgs:
            files[f"{FIGURES}/{picture.name}.svg"] = for_file(svgs[picture.name])
    (folder / FIGURES).mkdir(exist_ok=True)
    for name, text in files.items():
        write_text(folder / name, text.encode("utf-8", "replace").decode())
    return folder / REPORT


def draw_pictures(report: Report) -> dict[str, str]:
    """name -> SVG of every picture; empty without matplotlib."""
    return {picture.name: picture.as_svg() for picture in report.pictures} if _can_draw() else {}


def _can_draw() -> bool:
    return find_spec("matplotlib") is not None


def as_html(report: Report, svgs: Mapping[str, str]) -> str:
    """One file that needs nothing else: no network, no script.

    Args:
        svgs: Name -> the picture in marks, as `drawn` gives them.
    """
    environment = _environment(code=_code, breakable=_breakable)
    # Markup: what this module made itself, of the theme and of matplotlib's output, whose texts are escaped there.
    colours = {"light": Markup(css_variables(1)), "dark": Markup(css_variables(2))}
    return environment.get_template("report.html").render(
        report=_shorten(report),
        css=Markup(environment.get_template("report.css").render(colours)),
        svgs={name: Markup(for_page(svg)) for name, svg in svgs.items()},
        drawn=bool(svgs),
        needs_plot=NEEDS_PLOT,
        classes=_classes,
    )


def as_markdown(report: Report) -> str:
    """For a README, an issue or a pull request; pictures are linked as they lie in the run's folder."""
    template = _environment(_escape_markdown, fence=_fence).get_template("report.md")
    return template.render(report=_shorten(report), drawn=_can_draw(), needs_plot=NEEDS_PLOT)


def _environment(finalize: Callable[[object], Markup] | None = None, **filters: Any) -> Environment:
    environment = Environment(
        loader=_TEMPLATES, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, finalize=finalize,
    )  # fmt: skip
    environment.filters |= filters
    return environment


def _shorten(report: Report) -> Report:
    sections = (replace(section, tables=[shorten_table(one) for one in section.tables]) for section in report.sections)
    return replace(report, sections=tuple(sections))


def _code(text: str) -> Markup:
    """A text with what stands between backticks as code; everything in it is escaped."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one backtick is open: they are no marks
        return Markup(escape(text))
    marked = (f"<code>{escape(part)}</code>" if number % 2 else escape(part) for number, part in enumerate(parts))
    return Markup("".join(marked))


def _breakable(text: str) -> Markup:
    """A name that a narrow column may break after a dot or an underscore."""
    return Markup(re.sub(r"([._])(?=\w)", r"\1<wbr>", escape(text)))


def _classes(column: Column, cell: Cell) -> str:
    """Of a table's cell."""
    whole = column.whole or len(cell.text) <= _SHORT
    names = ["right"] * column.right + ["whole" if whole else "long"] + ([cell.tone] if cell.tone else [])
    return " ".join(names)


def shorten_table(table: PlainTable, most: int = MOST_LINES) -> PlainTable:
    """The table's first lines; its caption says how many there are."""
    if len(table.lines) <= most:
        return table
    left_out = len(table.lines) - most
    caption = f"{table.caption} {left_out:,} more of {len(table.lines):,} lines are in results.jsonl."
    return replace(table, lines=table.lines[:most], caption=caption.strip())


_MARKS = re.compile(
    r"[\\`*~|\[\]]"
    r"|(?<![^\W_])_|_(?![^\W_])"  # between two letters it marks nothing
    r"|(?<=https):(?=//)|(?<=http):(?=//)|(?<=ftp):(?=//)|(?<=www)\.|@",  # what is a link without any mark
    re.IGNORECASE,
)


def _escape_markdown(text: object) -> Markup:
    """A text as Markdown shows it, in one line: no tag, no link, no emphasis of its own."""
    if isinstance(text, Markup):
        return text
    return Markup(_MARKS.sub(r"\\\g<0>", escape(" ".join(str(text).split()), quote=False)))


def _fence(command: str) -> Markup:
    """A command as a block of code, however many backticks it holds."""
    longest = max((len(run) for run in re.findall(r"`+", command)), default=0)
    ticks = "`" * max(3, longest + 1)
    return Markup(f"{ticks}\n{command}\n{ticks}")


def as_json(report: Report) -> str:
    """Every word and figure of the report, its pictures as their figures; null is one that is infinite or no number."""
    sections = [
        vars(section) | {"pictures": [*map(_picture, section.pictures)], "tables": [*map(_table, section.tables)]}
        for section in report.sections
    ]
    data = vars(report) | {
        "sections": sections,
        "texts": [{"prompt": prompt, "text": text} for prompt, text in report.texts],
        "commands": [{"what": what, "command": command} for what, command in report.commands.items()],
        "table": [_in_json(vars(one)) for one in report.table],
    }
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False, default=vars)


def _picture(picture: Picture) -> dict[str, Any]:
    rows = [_in_json(record) for record in picture.records]
    return {"name": picture.name, "title": picture.title, "caption": picture.caption, "rows": rows}


def _in_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """As a row of results.jsonl has it: what is no finite number is null, and `not_finite` tells it in words."""
    odd = {name: value for name, value in row.items() if is_odd(value)}
    told = {"not_finite": "; ".join(f"{name} is {in_words(value)}" for name, value in odd.items())} if odd else {}
    return {name: _finite(value) for name, value in row.items()} | told


def _finite(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_finite(one) for one in value]
    return None if is_odd(value) else value


def _table(table: PlainTable) -> dict[str, Any]:
    """Lines by the names of their columns; `over` is the heading that a line stands under."""
    names = ["over", *(column.name for column in table.columns)]
    # Of two columns of one name, none may swallow the other.
    keys = [name if place == names.index(name) else f"{name} ({place})" for place, name in enumerate(names)][1:]
    rows: list[dict[str, str]] = []
    heading: dict[str, str] = {}
    for line in table.lines:
        if isinstance(line, str):
            heading = {"over": line}
        else:
            rows.append({**heading, **{key: cell.text for key, cell in zip(keys, line, strict=True)}})
    return {"title": table.title, "caption": table.caption, "rows": rows}
