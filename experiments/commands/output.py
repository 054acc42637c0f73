"""What a command shows: a bar while it works, then JSON for programs, or tables for people."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from experiments.reporting.table_style import add_row, new_table


@contextmanager
def progress_bar(what: str, total: int, *, stays: bool = False) -> Iterator["partial[None]"]:
    """A bar on stderr, where that is a terminal. It gives rich's `update` of the bar: advance, completed, doing.

    Args:
        stays: The bar is left there when it ends, with the time that it took.
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
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    right: Sequence[str] = (),
    once: int = 0,
    headed: bool = False,
    caption: str = "",
) -> Table:
    """A table for people.

    Args:
        columns: Their names.
        rows: Cells, one for each column.
        right: Columns of numbers, aligned there.
        once: So many first cells are left blank as far as they are those of the row above.
        headed: A row begins with a heading, which is shown where it changes and indents what is under it.
        caption: Explains the columns.
    """
    table = new_table(title, columns, right)
    table.caption, table.caption_justify = caption or None, "left"
    above: Sequence[str | Text] = ()
    last = None
    for row in rows:
        cells = list(row)
        if headed:
            heading = cells.pop(0)
            if heading != last:
                add_row(table, Text(str(heading), "bold"))
            last = heading
            cells[0] = f"  {cells[0]}"
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(cells[:once], above, strict=False))))
        add_row(table, *[""] * same, *cells[same:])
        above = cells
    return table
