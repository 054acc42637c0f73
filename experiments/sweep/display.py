"""How far a run is: one bar over all its tasks, with the time that is left."""

import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from experiments.progress import ProgressLines, format_clock
from experiments.stages.task import Task


class Display(AbstractContextManager["Display"]):
    """Shown on `console`, which should be stderr's."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<8}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            TextColumn("{task.fields[doing]}", style="dim", markup=False),
            console=console,
        )
        self._bar = self._progress.add_task("", total=None, left="", doing="")
        self._lines = ProgressLines(self._progress, self._bar, console)
        self._seconds: dict[str, list[float]] = {}

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.update(self._bar, doing="", left="")
        self._progress.stop()

    def plan(self, done: int, left: Sequence[Task]) -> None:
        """So many tasks are over, and these, as far as can be known, are left."""
        seconds = time_left(self._seconds, left)
        text = "" if seconds is None or not left else f"{format_clock(seconds)} left"
        self._progress.update(self._bar, completed=done, total=done + len(left), left=text)

    def doing(self, task: Task, text: str) -> None:
        self._progress.update(self._bar, description=task.phase, doing=f"{task.key} {text}".strip())
        self._lines.tell()

    def ended(self, task: Task, seconds: float) -> None:
        for group in _groups(task):
            self._seconds.setdefault(group, []).append(seconds)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._progress.console.print(Text(text, "dim"), soft_wrap=True)


def _groups(task: Task) -> tuple[str, ...]:
    """What its time may tell of others' times: of its own replicates first, then of its phase, then of any."""
    return task.key.rpartition("#")[0] or task.key, f"phase {task.phase}", "all"


def time_left(seconds: dict[str, list[float]], left: Sequence[Task]) -> float | None:
    """What the tasks that are left will take, one after the other, by the times of those that are done; None where none
    is.

    seconds: the times by a task's own replicates, by phase, and of all.
    """
    if "all" not in seconds:
        return None
    return sum(statistics.fmean(next(seconds[group] for group in _groups(task) if group in seconds)) for task in left)
