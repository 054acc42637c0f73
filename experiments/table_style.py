"""How tables for people look."""

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

_STYLES = {"ok": "green", "wrong": "bold red", "failed": "red", "unsupported": "yellow", "finding": "bold red"}


def status_text(status: str) -> Text:
    return Text(status, style=_STYLES.get(status, ""))


def new_table(title: str, columns: Sequence[str], right: Sequence[str] = ()) -> Table:
    """A table without vertical rules; columns named in `right` are aligned there and never broken."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for column in columns:
        numeric = column in right
        # Text breaks between words; only a word longer than its column is cut up.
        table.add_column(column, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    return table


def add_row(table: Table, *cells: str | Text) -> None:
    """A row whose cells are shown as they are: rich would take "split_kv[num_splits=4]" for its own markup."""
    table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))
