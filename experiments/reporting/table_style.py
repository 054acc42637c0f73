"""How tables for people look: what a table is, whoever shows it, and how a console does."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

_STYLES = {
    "ok": "green", "wrong": "bold red", "failed": "red", "unsupported": "yellow", "finding": "bold red",
    "yes": "green", "partly": "yellow", "better": "green", "worse": "bold red", "cannot tell": "yellow",
}  # fmt: skip

_CONSOLE = 80  # columns that a table is made for

_HEADING = 16  # columns that a heading may take, however short what is below it


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

    def as_rich(self) -> Text:
        return Text(self.text, _STYLES.get(self.tone, ""))


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
        width of what is below it: a console's table has no cell over several columns. Where figures leave no room for a
        name, a number stands for it, which the caption explains.
        """
        shown = [index for index, column in enumerate(self.columns) if not column.wide]
        columns = [self.columns[index] for index in shown]
        table = new_table(self.title, [one.name for one in columns], [one.name for one in columns if one.right])
        for one, column in zip(columns, table.columns, strict=True):
            column.no_wrap = column.no_wrap or one.whole
        headed = False
        names, legend = self._names(shown)
        room = max([_HEADING, *(2 + len(name) for name in names.values())])
        for line in self.lines:
            if isinstance(line, str):
                headed = True
                add_row(table, Text("\n".join(textwrap.wrap(line, room)), "bold"))
                continue
            cells = [line[index].as_rich() for index in shown]
            cells[0].plain = names[line[0].text]
            add_row(table, Text("  ") + cells[0] if headed else cells[0], *cells[1:])
        table.title = escape(self.title) or None
        table.caption = escape(" ".join(filter(None, [legend, self.caption])))
        table.caption_justify = "left"
        return table

    def _names(self, shown: Sequence[int]) -> tuple[dict[str, str], str]:
        """First cell -> what a console shows for it, and what that means where they are numbers."""
        lines = [line for line in self.lines if not isinstance(line, str)]
        names = list(dict.fromkeys(line[0].text for line in lines))
        figures = [index for index in shown if index]
        widths = [max(len(self.columns[at].name), *(len(line[at].text) for line in lines), 0) for at in figures]
        indented = 2 * any(isinstance(line, str) for line in self.lines)
        room = _CONSOLE - sum(width + 2 for width in widths) - indented
        longest = max((len(word) for name in names for word in name.split()), default=0)
        if longest <= max(room, 0) or not all(self.columns[at].right for at in figures):
            return {name: name for name in names}, ""
        numbers = {name: f"({number})" for number, name in enumerate(names, 1)}
        return numbers, f"{', '.join(f'{number} {name}' for name, number in numbers.items())}."


def cells(*values: str | Cell) -> tuple[Cell, ...]:
    """A line; plain texts have no tone."""
    return tuple(value if isinstance(value, Cell) else Cell(value) for value in values)


def told(value: object) -> str:
    """A setting's value as the YAML has it: true, not True."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def plain(name: str) -> str:
    """A setting's name for people: that a field is the workload's goes without saying."""
    return name.removeprefix("workload.")


def status_cell(status: str) -> Cell:
    return Cell(status, status)


def status_text(status: str) -> Text:
    return Text(status, style=_STYLES.get(status, ""))


def new_table(title: str, columns: Sequence[str], right: Sequence[str] = ()) -> Table:
    """A table without vertical rules; columns named in `right` are aligned there and never broken."""
    table = Table(
        title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    for column in columns:
        numeric = column in right
        # Text breaks between words; only a word longer than its column is cut up.
        table.add_column(column, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    return table


def add_row(table: Table, *cells: str | Text) -> None:
    """A row whose cells are shown as they are: rich would take "split_kv[num_splits=4]" for its own markup."""
    table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))
