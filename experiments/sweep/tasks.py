"""What a sweep is made of: tasks, and what one comes back with. Plain data, which goes from process to process as JSON.

Needs no torch: a machine that only hands tasks on has none to import.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from experiments.runs.rows import Row
from experiments.stages.task import Task, TaskPoint

if TYPE_CHECKING:
    from tkernels.tuning_mode import TuningMode


@dataclass(frozen=True)
class Setup:
    """What every task of a run shares. resolved: the text of its resolved.yaml, whose paths are absolute.

    mode: whether Triton interprets or compiles, as in the process that planned. cache: the folder of quantized
    checkpoints. on_cuda: whether tasks use CUDA. serves: whether some have a model. replicates: how many process images
    there will be. sources: the file of each variant that is used -> its SHA-256 when the run began.
    broken: the files of outside variants that are left out, each with its reason.
    """

    resolved: str
    run_id: str
    mode: Literal["interpret", "compile"]
    tuning_mode: "TuningMode"
    tuning_folder: str
    cache: str
    on_cuda: bool
    serves: bool
    replicates: int
    sources: Mapping[str, str] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Ended:
    """What a task's process came to. samples: raw figures that are too big for rows. used: tuned configs, as in
    Tuning.used.

    seconds: of its process, from its start to its end. death: why it did not come to its end, or would not begin;
    `doing`: what it was at. printed: the end of its output.
    """

    task: Task
    rows: list[Row] = field(default_factory=list)
    samples: Mapping[str, Any] | None = None
    used: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    death: str | None = None
    doing: str = ""
    printed: str = ""

    def hear(self, message: Mapping[str, Any]) -> None:
        """Takes in one message of its process: a "row", "samples", "doing", "death", or "used", which is its last."""
        ((kind, value),) = message.items()
        if kind == "row":
            self.rows.append(Row.model_validate(value))
        elif kind in ("samples", "used", "doing", "death"):
            setattr(self, kind, value)
        else:
            raise ValueError(f"a task sent {kind!r}")

    @property
    def points_without_row(self) -> Sequence[TaskPoint]:
        """Of the task's points, those that no row is about. The first is where the process died, once it had begun."""
        done = {row.point for row in self.rows if row.stage in ("check", "kernels")}
        return [point for point in self.task.points if point[0] not in done]

    @property
    def rest(self) -> Task | None:
        """What another process goes on with: the points after the one where this one died."""
        later = self.points_without_row[1:]
        return replace(self.task, points=later) if self.death is not None and self.doing and later else None


OnDoing = Callable[[Task, str], None]
"""Hears what a task is doing."""


class Executor(Protocol):
    """Carries tasks out. The one that started it writes the run folder; nothing else does."""

    name: str

    def start(self, setup: Setup) -> AbstractContextManager[None]:
        """Ready until the context ends, however it ends: no process is left then."""
        ...

    def end(self) -> None:
        """Ends what was begun before `start`, where that was not called."""
        ...

    def run(self, tasks: Sequence[Task], doing: OnDoing) -> Iterator[Ended]:
        """Every task, as its process ends; and its `Ended.rest`, until there is none. Those that compare speeds are
        begun in the order given.
        """
        ...
