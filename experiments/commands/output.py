"""What a command shows: a bar while it works, then JSON for programs, or tables for people."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from experiments.reporting.table_style import add_row, new_table

Row = TypeVar("Row")


@contextmanager
def progress_bar(what: str, total: int, *, stays: bool = False) -> Iterator["partial[None]"]:
    """A bar on stderr, where that is a terminal. It gives rich's `update` of the bar: advance, completed, doing.

    Args:
        stays: the bar is left there when it ends, with the time that it took.
    """
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    doing = TextColumn("{task.fields[doing]}", style="dim", markup=False)
    with Progress(*columns, doing, console=console, transient=not stays, disable=not console.is_terminal) as progress:
        yield partial(progress.update, progress.add_task("", total=total, doing=""))


def print_json(value: Any) -> None:
    """The value alone is on stdout."""
    print(json.dumps(value, indent=1))


def make_table(
    title: str,
    columns: Mapping[str, Callable[[Row], str | Text]],
    rows: Iterable[Row],
    *,
    right: Sequence[str] = (),
    once: Sequence[str] = (),
    under: Callable[[Row], str] | None = None,
    caption: str = "",
) -> Table:
    """A table with a line for each row.

    Args:
        columns: a column's name -> its cell of a row.
        right: columns of numbers, aligned there.
        once: columns, the outer one first, that are left blank where they and those outside them are as in the line
            above.
        under: the heading that a row stands under, indented; it is shown where it changes.
        caption: explains the columns.
    """
    table = new_table(title, list(columns), right)
    table.caption, table.caption_justify = caption or None, "left"
    above: list[str | Text] = []
    heading = None
    for row in rows:
        if under is not None and under(row) != heading:
            heading = under(row)
            add_row(table, Text(heading, "bold"))
        cells = {name: cell(row) for name, cell in columns.items()}
        outer = [cells[name] for name in once]
        repeated = [name for depth, name in enumerate(once, start=1) if outer[:depth] == above[:depth]]
        shown = ["" if name in repeated else cell for name, cell in cells.items()]
        if under is not None:
            shown[0] = f"  {shown[0]}"
        add_row(table, *shown)
        above = outer
    return table
