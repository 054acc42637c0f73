"""What a command shows beside its tables: a bar while it works, JSON for programs, and why it ends with 1."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.json_alone import write_value
from experiments.progress import ProgressLines
from experiments.signals import INTERRUPTED


@contextmanager
def progress_bar(what: str, total: int, *, stays: bool = False) -> Iterator[Callable[..., None]]:
    """A bar on stderr, where that is a terminal; elsewhere a line now and then.

    It gives rich's `update` of the bar: advance, completed, total, doing.

    Args:
        stays: The bar is left there when it ends, with the time that it took.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn(),
        TimeElapsedColumn(),
    )  # fmt: skip
    doing = TextColumn("{task.fields[doing]}", style="dim", markup=False)
    with Progress(*columns, doing, console=console, transient=not stays, disable=not console.is_terminal) as progress:
        bar = progress.add_task(what, total=total, doing="")
        lines = ProgressLines(progress, bar, console)

        def update(**changes: Any) -> None:
            progress.update(bar, **changes)
            lines.tell()

        yield update


def print_json(value: Any) -> None:
    """The value alone is on stdout."""
    write_value(json.dumps(value, indent=1))


def name_some(names: Sequence[str], most: int = 8) -> str:
    """The first of them, and how many there are more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")


def end_with(status: int, why: str) -> int:
    """Says on stderr, as a command's last line, why it ends with a status that is not 0, and returns the status."""
    sys.stdout.flush()
    print(f"exit status {status}: {why}", file=sys.stderr, flush=True)
    return status


def end_interrupted(total: int, what: str, left: Sequence[str]) -> int:
    """The same where a signal cut the command off: how many of `what` are done, and which are left."""
    names = f"; not reached, or not whole: {name_some(left)}" if left else ""
    return end_with(INTERRUPTED, f"interrupted: {total - len(left)} of {total} {what} done{names}")
