"""A report as HTML, Markdown and JSON, and a run's folder with the first of them and the pictures in it."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from experiments.reporting.pictures import NEEDS_PLOT, Picture, for_file, for_page, variables
from experiments.reporting.report import Report
from experiments.reporting.table_style import Cell, Column, PlainTable
from experiments.runs.rows import in_words, is_odd
from experiments.runs.table import as_csv

REPORT = "report.html"
FIGURES = "figures"
TABLE = "table.csv"
MOST_LINES = 400
"""Of a table on the page: nobody reads more, and a browser takes seconds to lay them out. All are in results.jsonl."""

_SHORT = 24  # letters of a cell that is not worth breaking: a table may scroll
_TEMPLATES = Path(__file__).parent / "templates"


def write_report(report: Report, folder: Path) -> Path:
    """Writes report.html, table.csv with every figure that was measured, and figures/ with an SVG and a CSV of each
    picture; other files there are left alone.

    Without matplotlib (the extra `plot`) there are no SVGs, and the report says what it lacks.
    """
    figures = folder / FIGURES
    figures.mkdir(exist_ok=True)
    svgs = drawn(report)
    for picture in report.pictures:
        _write(figures / f"{picture.name}.csv", picture.as_csv())
        if picture.name in svgs:
            _write(figures / f"{picture.name}.svg", for_file(svgs[picture.name]))
    _write(folder / TABLE, as_csv(report.table))
    _write(folder / REPORT, as_html(report, svgs))
    return folder / REPORT


def drawn(report: Report) -> dict[str, str]:
    """name -> SVG of every picture; empty without matplotlib."""
    found: dict[str, str] = {}
    for picture in report.pictures:
        svg = picture.as_svg()
        if svg is None:
            return {}
        found[picture.name] = svg
    return found


def _write(file: Path, text: str) -> None:
    """Whole or not at all: whoever has the report open never sees half of one."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_bytes(text.encode("utf-8", "replace"))
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def as_html(report: Report, svgs: Mapping[str, str]) -> str:
    """One file that needs nothing else: no network, no script.

    Args:
        svgs: name -> the picture in marks, as `drawn` gives them.
    """
    templates = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    templates.filters["code"] = _code
    templates.filters["breakable"] = _breakable
    # Markup: what this module made itself, of the theme and of matplotlib's output, whose texts are escaped there.
    css = templates.get_template("report.css").render(light=Markup(variables(1)), dark=Markup(variables(2)))
    sections = tuple(
        replace(section, tables=tuple(shortened(one) for one in section.tables)) for section in report.sections
    )
    return templates.get_template("report.html").render(
        report=replace(report, sections=sections),
        css=Markup(css),
        svgs={name: Markup(for_page(svg)) for name, svg in svgs.items()},
        drawn=bool(svgs),
        needs_plot=NEEDS_PLOT,
        classes=_classes,
    )


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


def shortened(table: PlainTable, most: int = MOST_LINES) -> PlainTable:
    """The table's first lines; its caption says how many there are."""
    if len(table.lines) <= most:
        return table
    left_out = len(table.lines) - most
    caption = f"{table.caption} {left_out:,} more of {len(table.lines):,} lines are in results.jsonl."
    return replace(table, lines=table.lines[:most], caption=caption.strip())


def as_markdown(report: Report) -> str:
    """For a README, an issue or a pull request; pictures are linked as they lie in the run's folder."""
    parts = [f"# {_md(report.question.heading)}", *map(_md, report.question.text)]
    parts += [f"**{_md(report.verdict.sentence)}**", *map(_md, report.verdict.notes)]
    parts += ["\n".join(f"- {_md(name)}: {_md(value)}" for name, value in report.facts)]
    parts += [f"Run {_md(report.run_id)} of {_md(report.name)}, {_md(report.when)}", *map(_md, report.repairs)]
    parts.append("## Failures")
    for one in report.failures:
        parts.append(f"- {one.status} {_md(one.about)}: {_md(one.reason)}" + (_fence(one.replay) if one.replay else ""))
    if not report.failures:
        parts.append("None.")
    can_draw = _can_draw()
    for section in report.sections:
        parts += [f"## {section.title}", *map(_md, section.notes)]
        for picture in section.pictures:
            link = (
                f"![{_md(picture.title)}]({FIGURES}/{picture.name}.svg)"
                if can_draw
                else _md(f"{picture.title}: {NEEDS_PLOT}")
            )
            parts += [link, f"*{_md(picture.title)}.* {_md(picture.caption)}"]
        parts += [_md_table(shortened(one)) for one in section.tables]
    parts.append("## How to repeat it")
    parts += [f"{_md(what)}:{_fence(command)}" for what, command in report.commands]
    return "\n\n".join(parts) + "\n"


def _can_draw() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


_MARKS = re.compile(
    r"[\\`*~|\[\]]"
    r"|(?<![^\W_])_|_(?![^\W_])"  # between two letters it marks nothing
    r"|(?<=https):(?=//)|(?<=http):(?=//)|(?<=ftp):(?=//)|(?<=www)\.|@",  # what is a link without any mark
    re.IGNORECASE,
)


def _md(text: str) -> str:
    """A text as Markdown shows it, in one line: no tag, no link, no emphasis of its own."""
    return _MARKS.sub(r"\\\g<0>", escape(" ".join(text.split()), quote=False))


def _fence(command: str) -> str:
    """A command as a block of code, however many backticks it holds."""
    longest = max((len(run) for run in re.findall(r"`+", command)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"\n\n{ticks}\n{command}\n{ticks}"


def _md_table(table: PlainTable) -> str:
    lines = [
        "| " + " | ".join(_md(column.name) for column in table.columns) + " |",
        "|" + "|".join(" ---: " if column.right else " --- " for column in table.columns) + "|",
    ]
    for line in table.lines:
        texts = (
            [f"**{_md(line)}**", *[""] * (len(table.columns) - 1)]
            if isinstance(line, str)
            else [_md(c.text) for c in line]
        )
        lines.append("| " + " | ".join(texts) + " |")
    caption = f"\n\n{_md(table.caption)}" if table.caption else ""
    return f"### {_md(table.title)}\n\n" + "\n".join(lines) + caption


def as_json(report: Report) -> str:
    """Every word and figure of the report, its pictures as their figures; null is one that is infinite or no number."""
    data: dict[str, Any] = {
        "name": report.name,
        "run_id": report.run_id,
        "when": report.when,
        "question": {"heading": report.question.heading, "text": list(report.question.text)},
        "verdict": {
            "sentence": report.verdict.sentence, "good": report.verdict.good, "notes": list(report.verdict.notes),
        },
        "facts": dict(report.facts),
        "failures": [vars(one) for one in report.failures],
        "sections": [
            {
                "name": section.name,
                "title": section.title,
                "notes": list(section.notes),
                "pictures": [_picture(one) for one in section.pictures],
                "tables": [_table(one) for one in section.tables],
            }
            for section in report.sections
        ],
        "texts": [{"prompt": prompt, "text": text} for prompt, text in report.texts],
        "commands": [{"what": what, "command": command} for what, command in report.commands],
        "environment": dict(report.environment),
        "table": [_in_json(vars(one)) for one in report.table],
        "source": report.source,
        "repairs": list(report.repairs),
    }  # fmt: skip
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)


def _picture(picture: Picture) -> dict[str, Any]:
    rows = [_in_json(dict(zip(picture.columns, record, strict=True))) for record in picture.records]
    return {"name": picture.name, "title": picture.title, "caption": picture.caption, "rows": rows}


def _in_json(row: dict[str, Any]) -> dict[str, Any]:
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
