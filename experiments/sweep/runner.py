"""One run: the tasks of its sweep, carried out by an executor, into one folder, and what follows from their rows."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from experiments.document import ExperimentError
from experiments.planning.models import check_headers
from experiments.planning.plan import Plan, Sweep
from experiments.planning.points import Point, points_of
from experiments.planning.resolved import resolved_text
from experiments.runs.environment import environment_of
from experiments.runs.folder import RunFolder, make_run, new_path, new_run_id, open_again
from experiments.runs.provenance import lockfile_entries, sha256_of, source_files
from experiments.runs.reading import read_meta
from experiments.runs.rows import Row
from experiments.stages.task import Phase, Task
from experiments.sweep import listing
from experiments.sweep.derived_rows import failed_rows, parity_rows, refused_rows, speedup_rows, unrecorded_rows
from experiments.sweep.display import Display
from experiments.sweep.local import Local
from experiments.sweep.tasks import Ended, Executor, Setup
from tkernels import ContractError, Tuning
from tkernels.clocks import read_clocks
from tkernels.device import device_facts
from tkernels.files import check_new_folder
from tkernels.mode import MODE

CACHE = "quantized"
"""The folder of quantized checkpoints, beside the run's: another run finds them there."""

Points = Sequence[Mapping[str, Sequence[Point]]]
"""Of each plan, op -> its points."""


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C came while tasks ran; what is done is in the folder `path`."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path


def run_experiment(
    sweep: Sweep,
    out: Path | None,
    overrides: Sequence[str],
    console: Console,
    tuning: Tuning | None = None,
    *,
    executor: Executor | None = None,
    resume: Path | None = None,
) -> RunFolder:
    """Runs all tasks that the folder does not have yet, and returns it with its rows. Progress goes to `console`, which
    should be stderr's.

    tuning: how tuned configs are found; None is as the experiment says, in the lockfiles of the tree. executor: None is
    this machine. resume: the folder of a run that was cut off; so is `out`, where it is one of this very experiment.

    Raises ExperimentError where the folder cannot be made, resumed or written into, or an op's contract has no point
    for the model; whatever goes wrong in one task becomes a row. FileExistsError where `out` is neither new nor empty
    and no run to go on with. RunInterrupted for Ctrl-C.
    """
    points = [_points_of(plan) for plan in sweep.plans]
    for plan in sweep.plans:
        if plan.model is not None and _serves(sweep):
            # A preset that has to be trained first shows progress of its own.
            check_headers(plan.model.directory())
    executor = executor if executor is not None else Local()
    tuning = tuning if tuning is not None else Tuning(sweep.experiment.tuning)
    folder = _open_folder(sweep, points, out, resume, overrides, executor.name)
    with _closing(folder):
        for repair in folder.repairs:
            console.print(Text(repair, "dim"), soft_wrap=True)
        if not folder.is_finished:
            with Display(console) as display:
                _Run(sweep, points, folder, executor, tuning, display).run()
            device = sweep.plans[0].device
            entries = lockfile_entries(sweep.plans, device_facts(device), folder.used, tuning.folder)
            folder.finish(tuning.mode, entries, asdict(read_clocks(device)))
    return folder


def _points_of(plan: Plan) -> dict[str, list[Point]]:
    try:
        return points_of(plan)
    except ContractError as error:
        raise ExperimentError([str(error)]) from None


def _serves(sweep: Sweep) -> bool:
    """Whether some task has a model."""
    return sweep.plans[0].model is not None and bool(sweep.experiment.workload or sweep.experiment.quantization)


def _open_folder(
    sweep: Sweep, points: Points, out: Path | None, resume: Path | None, overrides: Sequence[str], executor: str
) -> RunFolder:
    again = resume if resume is not None else out if out is not None and _is_cut_off(sweep, out) else None
    if again is not None:
        run_id = str(read_meta(again)["run_id"])
        return open_again(sweep, again, environment_of(sweep, run_id, list(overrides)), executor)
    run_id = new_run_id()
    path = new_path(sweep, out, run_id)
    check_new_folder(path, "a run")
    tasks = len(listing.expected_tasks(sweep, points))
    return make_run(sweep, path, environment_of(sweep, run_id, list(overrides)), executor, tasks)


def _is_cut_off(sweep: Sweep, out: Path) -> bool:
    """Whether `out` is the folder of this experiment's run, and has not ended."""
    if not (out / "run.json").is_file() or read_meta(out)["finished"] is not None:
        return False
    return (out / "resolved.yaml").read_text(encoding="utf-8") == resolved_text(sweep)


@contextmanager
def _closing(folder: RunFolder) -> Iterator[None]:
    """Closes the folder in the end; where the run is cut short, says what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        raise RunInterrupted(folder.path) from None
    except BrokenPipeError:
        raise  # of whoever reads the display
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        kept = f"{folder.path}: what is done is kept, and goes on with --resume {folder.path}"
        raise ExperimentError([what, kept]) from error
    finally:
        folder.close()


@dataclass
class _Run:
    """A run under way. expected: the tasks that there will be, as far as is known."""

    sweep: Sweep
    points: Points
    folder: RunFolder
    executor: Executor
    tuning: Tuning
    display: Display
    expected: list[Task] = field(default_factory=list)

    def run(self) -> None:
        """Every phase, less what is done already."""
        sweep, folder = self.sweep, self.folder
        self.expected = listing.expected_tasks(sweep, self.points)
        with self.executor.start(self._setup()):
            checks = listing.check_tasks(sweep, self.points)
            self._do(checks)
            kernels = listing.kernel_tasks(checks, folder.of_task)
            self._do(kernels)
            self._repeat(kernels, "kernels")
            engines = listing.engine_tasks(sweep)
            self._derive(refused_rows(sweep, folder, engines, checks))
            self._do(engines)
            peers = listing.peer_tasks(sweep, engines, folder.of_task)
            self._do(peers)
            servers = listing.http_tasks(sweep)
            self._do(servers)
            self._repeat([*engines, *peers, *servers], "engine", "peers", "http")
            steps = listing.step_tasks(engines, folder.of_task)
            self._settle(steps, "step")
            self._do(steps)
            self._derive(parity_rows(sweep, folder, engines))
            self._derive(speedup_rows(sweep, folder, engines, peers))
            self._derive(unrecorded_rows(sweep, folder, engines))
            self._do(listing.quantization_tasks(sweep))

    def _setup(self) -> Setup:
        plan = self.sweep.plans[0]
        # Of what the folder keeps: rows are of that code, or there are none.
        kept = {str(file): self.folder.path / "sources" / name for name, file in source_files(self.sweep.plans).items()}
        return Setup(
            resolved=resolved_text(self.sweep),
            run_id=self.folder.run_id,
            mode=MODE,
            tuning_mode=self.tuning.mode,
            tuning_folder=str(self.tuning.folder.resolve()),
            cache=str((self.folder.path.parent / CACHE).resolve()),
            on_cuda=plan.device.type == "cuda",
            serves=_serves(self.sweep),
            replicates=self.sweep.experiment.replicates,
            sources={file: sha256_of(copy) for file, copy in kept.items() if copy.is_file()},
            broken={str(file): reason for file, reason in plan.ops.broken.items()},
        )

    def _do(self, tasks: Sequence[Task]) -> None:
        """The tasks that the folder does not have, each recorded as it ends."""
        todo = [task for task in tasks if not self.folder.done(task.key)]
        self._show()
        if todo:
            processes: dict[str, list[Ended]] = {}
            for ended in self.executor.run(todo, self.display.doing):
                processes.setdefault(ended.task.key, []).append(ended)
                if ended.printed:
                    self.display.say(f"{ended.task.key}: {ended.printed}")
                if ended.rest is None:
                    self._record(processes.pop(ended.task.key))
                    self._show()

    def _repeat(self, tasks: Sequence[Task], *phases: Phase) -> None:
        """The later replicates of these phases' tasks."""
        again = listing.later_replicates(tasks, self.sweep.experiment.replicates, self.folder.of_task)
        self._settle([*tasks, *again], *phases)
        self._do(again)

    def _settle(self, tasks: Sequence[Task], *phases: Phase) -> None:
        """It is known now which tasks of these phases there are."""
        keys = {task.key for task in tasks}
        self.expected = [task for task in self.expected if task.phase not in phases or task.key in keys]

    def _show(self) -> None:
        left = [task for task in self.expected if not self.folder.done(task.key)]
        self.display.plan(len(self.expected) - len(left), left)

    def _record(self, processes: Sequence[Ended]) -> None:
        """A task's rows in one write: a kill between its processes leaves none of them, and all is done again."""
        rows: list[Row] = []
        for ended in processes:
            rows += ended.rows
            if ended.death is not None or not ended.rows:
                rows += failed_rows(self.sweep, self.folder.run_id, ended)
            self.folder.use(self.tuning.mode, ended.used)
        self.folder.record(rows, processes[-1].samples)
        self.display.ended(processes[0].task, sum(ended.seconds for ended in processes))

    def _derive(self, rows: Iterator[Row]) -> None:
        """Records the rows that the folder does not have, each of which is all of its task's."""
        for row in rows:
            if not self.folder.done(row.task):
                self.folder.record([row])


def failures(folder: RunFolder) -> list[str]:
    """What makes a run's exit status non-zero: every row that is wrong or failed, or some of whose requests failed; or
    that no engine ran at all.
    """
    bad = []
    for row in folder.rows:
        if row.status in ("wrong", "failed"):
            bad.append(f"{row.stage} {row.status}: {row.reason}")
        elif row.unserved is not None:
            bad.append(f"{row.stage}: {row.unserved}")
    if not bad and {row.status for row in folder.rows if row.stage == "engine"} == {"unsupported"}:
        bad.append("no arm is supported here")
    return bad
