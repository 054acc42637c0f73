"""How far a command is, on stderr: a bar where that is a terminal, else a line now and then, so that a log lives."""

import sys
import time

from rich.console import Console
from rich.progress import Progress, TaskID

EVERY_S = 10.0


class ProgressLines:
    """Says how far a rich bar's task is, where no terminal shows the bar: first after EVERY_S, then as often."""

    def __init__(self, progress: Progress, bar: TaskID, console: Console) -> None:
        self._progress, self._bar = progress, bar
        self._is_shown = console.is_terminal
        self._began = self._last = time.monotonic()

    def tell(self) -> None:
        """Called at every step."""
        now = time.monotonic()
        if self._is_shown or now - self._last < EVERY_S:
            return
        self._last = now
        task = self._progress.tasks[self._bar]
        count = f"{task.completed:.0f}" if task.total is None else f"{task.completed:.0f} of {task.total:.0f}"
        doing = task.fields.get("doing", "")
        words = (task.description, count, f"in {format_clock(now - self._began)}", f"now {doing}" if doing else "")
        sys.stdout.flush()  # what has been found stands before it in a log of both
        print(" ".join(filter(None, words)), file=sys.stderr, flush=True)


def format_clock(seconds: float) -> str:
    """ "0:07", "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
