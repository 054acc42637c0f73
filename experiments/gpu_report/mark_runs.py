"""An engine mark's experiment, run as far as its time allows, into a folder in which it goes on another time."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console

from experiments.document import ExperimentError
from experiments.gpu_report.engine_marks import CHECKS_S, MarkRun
from experiments.planning.plan import Sweep
from experiments.runs.folder import RunFolder
from experiments.runs.rows import Row
from experiments.stages.task import Task
from experiments.sweep.local import Local
from experiments.sweep.runner import run_experiment
from experiments.sweep.tasks import Ended, Executor, OnDoing, Setup
from tkernels import Tuning
from tkernels.errors import TKernelsError

_READ = ("check", "engine", "peers")
"""The phases that a mark reads; what a run times and records besides is for `tk run`."""

_SIDE_BY_SIDE = 4
"""Checks at once: none is timed, and each mostly waits for its process to begin and its kernels to be compiled."""


class CutOff(TKernelsError):
    """A run's next task would not have ended in time; what is done is in the run's folder."""


class Within:
    """Executors of this machine that carry out what a mark reads, until a task would not end in time.

    Args:
        ends: Whether a task would; asked before it begins.
        executors: For as many checks at once; all else is the first one's.
    """

    name = "local"

    def __init__(self, ends: Callable[[Task], bool], executors: Sequence[Executor]) -> None:
        self.ends, self.executors = ends, executors

    @contextmanager
    def start(self, setup: Setup) -> Iterator[None]:
        with ExitStack() as stack:
            for executor in self.executors:
                stack.enter_context(executor.start(setup))
            yield

    def end(self) -> None:
        for executor in self.executors:
            executor.end()

    def run(self, tasks: Sequence[Task], doing: OnDoing) -> Iterator[Ended]:
        wanted = [task for task in tasks if task.phase in _READ]
        checks = [task for task in wanted if task.phase == "check"]
        yield from self._run_side_by_side(checks, doing)
        for task in wanted[len(checks) :]:
            if not self.ends(task):
                raise CutOff
            yield from self.executors[0].run([task], doing)

    def _run_side_by_side(self, tasks: Sequence[Task], doing: OnDoing) -> Iterator[Ended]:
        free: SimpleQueue[Executor] = SimpleQueue()
        for executor in self.executors:
            free.put(executor)

        def run_one(task: Task) -> list[Ended]:
            executor = free.get()
            try:
                return list(executor.run([task], doing)) if self.ends(task) else []
            finally:
                free.put(executor)

        with ThreadPoolExecutor(len(self.executors)) as threads:
            running = [threads.submit(run_one, task) for task in tasks]
            for one in as_completed(running):
                yield from one.result()
        if not all(one.result() for one in running):
            raise CutOff


def measure(run: MarkRun, sweep: Sweep, out: Path, tuning: Tuning, executor: Executor) -> list[Row]:
    """Runs it in the folder `out`, where it may have begun, with the configs of `tuning`, on `executor`.

    Returns:
        The rows that a mark or a reader of the report needs, whose workload is the run's name: a run has but one.

    Raises:
        CutOff: It is not at its end, and goes on in `out`.
    """
    begun = out if (out / "run.json").is_file() else None
    try:
        folder = _run(run, sweep, out, tuning, executor, begun)
    except ExperimentError as error:
        if begun is None or "cannot be resumed" not in str(error):
            raise
        print(f"{out}: begun anew: {error}")
        shutil.rmtree(out)
        folder = _run(run, sweep, out, tuning, executor, None)
    kept = [row for row in folder.rows if row.stage in ("engine", "parity", "peers", "speedup")]
    return [row.model_copy(update={"workload": run.name}) for row in kept]


def _run(run: MarkRun, sweep: Sweep, out: Path, tuning: Tuning, executor: Executor, resume: Path | None) -> RunFolder:
    console = Console(quiet=True)
    return run_experiment(sweep, out, run.overrides, console, tuning, executor=executor, resume=resume)


def within(run: MarkRun, deadline: float) -> Within:
    """The executor of a run that has until `deadline`, in seconds since the epoch."""

    def ends(task: Task) -> bool:
        return time.time() + (CHECKS_S / 2 if task.phase == "check" else run.engine_s) <= deadline

    return Within(ends, [Local() for _ in range(_SIDE_BY_SIDE)])
