"""What a command shows beside its tables: a bar while it works, and JSON for programs."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


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
