"""What every stage is given."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.progress import Progress, TaskID

from experiments.plan import Plan
from experiments.points import Point
from experiments.rows import Status
from experiments.run_folder import RunFolder
from tkernels import Tuning


@dataclass
class Step:
    """One bar of the progress display."""

    progress: Progress
    task: TaskID

    def advance(self, doing: str, units: int = 1) -> None:
        """So many units are done; `doing` names the next, or is empty."""
        self.progress.update(self.task, advance=units, doing=doing)

    def say(self, doing: str) -> None:
        self.progress.update(self.task, doing=doing)


@dataclass(frozen=True)
class Context:
    """A run under way. `verdicts`: (op, variant label) -> its first check that was wrong or failed, with the reason."""

    plan: Plan
    folder: RunFolder
    points: dict[str, list[Point]]
    tuning: Tuning
    progress: Progress
    verdicts: dict[tuple[str, str], tuple[Status, str]] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str, total: int) -> Iterator[Step]:
        """A bar of `total` units, shown where there are any."""
        task = self.progress.add_task(name, total=total, doing="", visible=total > 0)
        try:
            yield Step(self.progress, task)
        finally:
            self.progress.update(task, doing="")

    def common(self, **more: Any) -> dict[str, Any]:
        """The fields that every row of this run shares."""
        return {
            "run_id": self.folder.run_id,
            "dtype": str((more.get("axes") or {}).get("activation", self.plan.dtype_name)),
            "device": self.plan.device.type,
            **more,
        }


def one_line(error: BaseException) -> str:
    """An exception as a row's reason."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
