"""How tables for people look: what a table is, whoever shows it, and how a console does."""

import re
import textwrap
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, takewhile
from typing import TypeVar

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

_STYLES = {
    "ok": "green", "wrong": "bold red", "failed": "red", "unsupported": "yellow", "finding": "bold red",
    "yes": "green", "partly": "yellow", "better": "green", "worse": "bold red", "cannot tell": "yellow",
    "interrupted": "yellow", "not run": "yellow",
}  # fmt: skip

_CONSOLE = 80  # columns that a table is made for

_HEADING = 16  # columns that a heading may take, however short what is below it
_NARROWEST = 8  # columns that names are left, however many figures there are


@dataclass(frozen=True)
class Column:
    """right: figures, aligned there and never broken. whole: texts that are never broken. wide: only where there is
    room, which a console has not.
    """

    name: str
    right: bool = False
    whole: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Cell:
    """tone: a row's status, a comparison's outcome, "yes" or "partly"; what shows the table gives it its colour."""

    text: str
    tone: str = ""

    def as_rich(self, width: int) -> Text:
        """For a console's column of so many characters."""
        text = self.text if len(self.text) <= width else break_name(self.text, width)
        return Text(text, _STYLES.get(self.tone, ""))


Item = TypeVar("Item")
"""What a line of a table is about."""

Key = TypeVar("Key", bound=Hashable)

Line = tuple[Cell, ...] | str
"""A cell for each column, or a heading over the lines below it."""


@dataclass(frozen=True)
class PlainTable:
    """A table before anybody shows it. The caption explains every column."""

    title: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    caption: str = ""

    def as_rich(self) -> Table:
        """For a console: without the wide columns; under a heading, lines are indented. A heading is broken to the
        width of what is below it, for a console's table has no cell over several columns; so are names that figures
        leave no room for.
        """
        room = [not column.wide for column in self.columns]
        columns = list(compress(self.columns, room))
        lines = [line if isinstance(line, str) else list(compress(line, room)) for line in self.lines]
        headed = any(isinstance(line, str) for line in lines)
        wanted = _wanted_widths(columns, lines)
        widths = _widths(wanted, [one.right or one.whole for one in columns], _CONSOLE - 2 * headed)
        rows: list[Sequence[str | Text]] = []
        heading = ""
        for line in lines:
            if isinstance(line, str):
                heading = textwrap.fill(line, max(_HEADING, 2 + widths[0]))
            else:
                texts = [cell.as_rich(width) for cell, width in zip(line, widths, strict=True)]
                rows.append([heading, *texts] if headed else texts)
        right = [one.name for one in columns if one.right]
        table = make_table(
            self.title, [one.name for one in columns], rows, right=right, headed=headed, caption=self.caption
        )
        for one, column in zip(columns, table.columns, strict=True):
            column.no_wrap = one.right or one.whole
        return table


def _wanted_widths(columns: Sequence[Column], lines: Sequence[Sequence[Cell] | str]) -> list[int]:
    texts = [[column.name for column in columns]]
    texts += [[cell.text for cell in line] for line in lines if not isinstance(line, str)]
    return [max(map(len, column)) for column in zip(*texts, strict=True)]


def _widths(wanted: Sequence[int], fixed: Sequence[bool], room: int) -> list[int]:
    """Of a table's columns, with two characters between them: what they want where there is room, and else of the
    columns that are not fixed the widest are made narrower, alike.
    """
    widths = list(wanted)
    free = room - sum(width + 2 for width in compress(wanted, fixed))
    flexible = sorted((width, index) for index, width in enumerate(wanted) if not fixed[index])
    for place, (width, index) in enumerate(flexible):
        share = free // (len(flexible) - place) - 2
        widths[index] = max(min(width, share), min(width, _NARROWEST))
        free -= widths[index] + 2
    return widths


def plain_place(place: str) -> str:
    """A place with each setting named for people."""
    return ", ".join(map(setting_name, place.split(", ")))


def list_names(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def name_runs(indices: Sequence[int], names: Sequence[str]) -> list[str]:
    """ "T=1 to T=4", "T=64": neighbours are named by the first and the last."""
    runs = group_by(indices, lambda index: index - indices.index(index)).values()
    return [names[run[0]] + (f" to {names[run[-1]]}" if len(run) > 1 else "") for run in runs]


def break_name(text: str, width: int) -> str:
    """The text in lines of at most `width` characters, broken after a space, a dot or an underscore; a part that has
    none and is longer stays whole.
    """
    lines = [""]
    for part in re.findall(r"[^\s._]*[\s._]|[^\s._]+", text):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def cells(*values: str | Cell) -> tuple[Cell, ...]:
    """A line; plain texts have no tone."""
    return tuple(value if isinstance(value, Cell) else Cell(value) for value in values)


def group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """key -> its items; both in the order in which they first come."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def build_table(
    title: str,
    show: Mapping[Column, Callable[[Item], str | Cell]],
    items: Iterable[Item],
    caption: str = "",
    heading: Callable[[Item], str] = lambda _: "",
) -> PlainTable:
    """A line for each item, whose cells `show` makes; those of one `heading` stand under it, where it is not empty."""
    lines: list[Line] = []
    for text, mine in group_by(items, heading).items():
        lines += [text] if text else []
        lines += [cells(*(cell(one) for cell in show.values())) for one in mine]
    return PlainTable(title, tuple(show), tuple(lines), caption)


def number_column(name: str, wide: bool = False) -> Column:
    return Column(name, right=True, wide=wide)


def format_number(value: float | None, spec: str, otherwise: str = "-") -> str:
    """The number as its format says; `otherwise` where there is none."""
    return otherwise if value is None else format(value, spec)


def format_value(value: object) -> str:
    """A setting's value as the YAML has it: true, not True."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_microseconds(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def setting_name(name: str) -> str:
    """A setting's name for people: that a field is the workload's goes without saying."""
    return name.removeprefix("workload.")


def status_cell(status: str) -> Cell:
    return Cell(status, status)


def status_text(status: str) -> Text:
    return Text(status, style=_STYLES.get(status, ""))


def make_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    right: Sequence[str] = (),
    once: int = 0,
    headed: bool = False,
    caption: str = "",
) -> Table:
    """A table for a console. Texts are shown as they are: "split_kv[num_splits=4]" is no markup.

    Args:
        title: Above it.
        columns: Their names.
        rows: Cells, one for each column.
        right: Columns of numbers, aligned there and never broken.
        once: So many first cells are left blank as far as they are those of the row above.
        headed: A row begins with a heading, which is shown where it changes and indents what is under it.
        caption: Explains the columns.
    """
    table = _start_table(title, columns, right, caption)
    above: Sequence[str | Text] = ()
    last: str | Text = ""
    for row in rows:
        cells = list(row)
        if headed:
            heading = cells.pop(0)
            if heading != last and heading:
                table.add_row(Text(str(heading), "bold"))
            last = heading
            cells[0] = _indent(cells[0])
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(cells[:once], above, strict=False))))
        shown = ["" if place < same else cell for place, cell in enumerate(cells)]
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in shown))
        above = cells
    return table


def _start_table(title: str, columns: Sequence[str], right: Sequence[str], caption: str) -> Table:
    table = Table(
        title=escape(title), title_justify="left", title_style="bold", caption=escape(caption) or None,
        caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for column in columns:
        numeric = column in right
        # Text breaks between words; only a word longer than its column is cut up.
        table.add_column(column, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    return table


def _indent(cell: str | Text) -> Text:
    text = cell.copy() if isinstance(cell, Text) else Text(cell)
    text.plain = textwrap.indent(text.plain, "  ")
    return text
