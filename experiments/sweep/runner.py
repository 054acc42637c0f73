"""One run: the tasks of its sweep, carried out by an executor, into one folder, and what follows from their rows."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from experiments.document import ExperimentError
from experiments.planning.models import check_headers
from experiments.planning.plan import Plan, Sweep
from experiments.planning.points import Point, points_of
from experiments.planning.resolved import resolved_text
from experiments.runs.environment import environment_of
from experiments.runs.folder import RunFolder, check_new, new_folder, new_path, new_run_id, open_again
from experiments.runs.provenance import lockfile_entries, sha256_of, source_files
from experiments.runs.reading import read_meta
from experiments.runs.rows import COLUMNS, Row
from experiments.stages import parity, speedups
from experiments.stages.context import common_fields, served_fields
from experiments.stages.parity import Answer
from experiments.stages.quantization import CACHE
from experiments.stages.task import Phase, Task
from experiments.sweep import listing
from experiments.sweep.display import Display
from experiments.sweep.failing import failed_rows
from experiments.sweep.listing import Verdicts
from experiments.sweep.local import Local
from experiments.sweep.tasks import Ended, Executor, Setup
from tkernels import ContractError, Tuning
from tkernels.clocks import read_clocks
from tkernels.device import device_facts
from tkernels.mode import MODE

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
    for the model; whatever goes wrong in one task becomes a row. RunInterrupted for Ctrl-C.
    """
    points = [_points_of(plan) for plan in sweep.plans]
    for plan in sweep.plans:
        if plan.model is not None and (plan.experiment.workload or plan.experiment.quantization):
            # A preset that has to be trained first shows progress of its own.
            check_headers(plan.model.directory())
    executor = executor if executor is not None else Local()
    tuning = tuning if tuning is not None else Tuning(sweep.experiment.tuning)
    folder = _folder(sweep, points, out, resume, overrides, executor.name)
    try:
        for repair in folder.repairs:
            console.print(Text(repair, "dim"), soft_wrap=True)
        if folder.is_finished:
            return folder
        with Display(console) as display:
            _Run(sweep, points, folder, executor, tuning, display).run()
        device = sweep.plans[0].device
        entries = lockfile_entries(sweep.plans, device_facts(device), folder.used, tuning.folder)
        folder.finish(tuning.mode, entries, asdict(read_clocks(device)))
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
    return folder


def _points_of(plan: Plan) -> dict[str, list[Point]]:
    try:
        return points_of(plan)
    except ContractError as error:
        raise ExperimentError([str(error)]) from None


def _is_cut_off(sweep: Sweep, out: Path) -> bool:
    """Whether `out` is the folder of this experiment's run, and has not ended."""
    if not (out / "run.json").is_file() or read_meta(out)["finished"] is not None:
        return False
    return (out / "resolved.yaml").read_text(encoding="utf-8") == resolved_text(sweep)


def _folder(
    sweep: Sweep, points: Points, out: Path | None, resume: Path | None, overrides: Sequence[str], executor: str
) -> RunFolder:
    again = resume if resume is not None else out if out is not None and _is_cut_off(sweep, out) else None
    if again is not None:
        run_id = str(read_meta(again)["run_id"])
        return open_again(sweep, again, environment_of(sweep, run_id, list(overrides)), executor)
    run_id = new_run_id()
    path = new_path(sweep, out, run_id)
    check_new(path)
    tasks = len(listing.expected_tasks(sweep, points))
    return new_folder(sweep, path, run_id, environment_of(sweep, run_id, list(overrides)), executor, tasks)


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
        self.expected = listing.expected_tasks(self.sweep, self.points)
        rows_of, replicates = self.folder.of_task, self.sweep.experiment.replicates
        with self.executor.start(self._setup()):
            checks = listing.check_tasks(self.sweep, self.points)
            self._do(checks)
            kernels = listing.kernel_tasks(checks, rows_of)
            self._do(kernels)
            again = listing.later_replicates(kernels, replicates, rows_of)
            self._settle("kernels", [*kernels, *again])
            self._do(again)
            self._serve(listing.verdicts(checks, rows_of))
            self._do(listing.quantization_tasks(self.sweep))

    def _serve(self, verdicts: Verdicts) -> None:
        """Arms and peers, and what follows from both."""
        engines, rows_of = listing.engine_tasks(self.sweep), self.folder.of_task
        for task in engines:
            refused = listing.refusal(self.sweep.plans[task.plan], task, verdicts)
            if refused is not None and not self.folder.done(task.key):
                self.folder.record([self._refused_row(task, *refused)])
        self._do(engines)
        peers = listing.peer_tasks(self.sweep, engines, rows_of)
        self._do(peers)
        again = listing.later_replicates([*engines, *peers], self.sweep.experiment.replicates, rows_of)
        self._settle("engine", [*engines, *again])
        self._settle("peers", [*peers, *again])
        self._do(again)
        recorded = listing.step_tasks(engines, rows_of)
        self._settle("step", recorded)
        self._do(recorded)
        derived: list[Row] = [
            *self._parity_rows(engines), *self._speedup_rows(engines, peers), *self._unrecorded_rows(engines)
        ]  # fmt: skip
        for row in derived:
            if not self.folder.done(row.task):
                self.folder.record([row])

    def _setup(self) -> Setup:
        plan, experiment = self.sweep.plans[0], self.sweep.experiment
        serves = plan.model is not None and bool(experiment.workload or experiment.quantization)
        return Setup(
            resolved=resolved_text(self.sweep),
            run_id=self.folder.run_id,
            mode=MODE,
            tuning_mode=self.tuning.mode,
            tuning_folder=str(self.tuning.folder.resolve()),
            cache=str((self.folder.path.parent / CACHE).resolve()),
            on_cuda=plan.device.type == "cuda",
            serves=serves,
            replicates=experiment.replicates,
            # Of what the folder keeps: rows are of that code, or there are none.
            sources={
                str(file): sha256_of(kept)
                for name, file in source_files(self.sweep.plans).items()
                if (kept := self.folder.path / "sources" / name).is_file()
            },
            broken={str(file): reason for file, reason in plan.ops.broken.items()},
        )

    def _do(self, tasks: Sequence[Task]) -> None:
        """The tasks that the folder does not have, each recorded as it ends."""
        todo = [task for task in tasks if not self.folder.done(task.key)]
        self._show()
        if todo:
            processes: dict[str, list[Ended]] = {}
            for ended in self.executor.run(todo, self.display.doing, self._printed):
                processes.setdefault(ended.task.key, []).append(ended)
                if ended.rest is None:
                    self._record(processes.pop(ended.task.key))
                    self._show()

    def _settle(self, phase: Phase, tasks: Sequence[Task]) -> None:
        """It is known now which tasks of a phase there are."""
        keys = {task.key for task in tasks}
        self.expected = [task for task in self.expected if task.phase != phase or task.key in keys]

    def _show(self) -> None:
        left = [task for task in self.expected if not self.folder.done(task.key)]
        self.display.plan(len(self.expected) - len(left), left)

    def _printed(self, task: Task, text: str) -> None:
        self.display.say(f"{task.key}: {text}")

    def _record(self, processes: Sequence[Ended]) -> None:
        """A task's rows in one write: a kill between its processes leaves none of them, and all is done again."""
        rows: list[Row] = []
        for ended in processes:
            rows += ended.rows
            if ended.death is not None or not ended.rows:
                rows += failed_rows(self.sweep.plans[ended.task.plan], self.folder.run_id, ended)
            self.folder.use(self.tuning.mode, ended.used)
        self.folder.record(rows, processes[-1].samples)
        self.display.ended(replace(processes[-1], seconds=sum(ended.seconds for ended in processes)))

    def _refused_row(self, task: Task, status: Any, reason: str) -> Row:
        plan = self.sweep.plans[task.plan]
        about = served_fields(plan, plan.arms[task.arm], plan.workloads[task.workload])
        return Row(
            stage="engine", **common_fields(plan, task, self.folder.run_id, **about), status=status, reason=reason
        )

    def _derived(self, stage: str, task: Task, **fields: Any) -> dict[str, Any]:
        """The fields that a row which follows from a task's shares with every row."""
        key = f"{stage}/{task.key.removesuffix('#0').partition('/')[2]}"
        plan = self.sweep.plans[task.plan]
        return common_fields(plan, Task(key, task.phase, task.plan), self.folder.run_id, **fields)

    def _parity_rows(self, engines: Sequence[Task]) -> list[Row]:
        """Of each model and workload, every arm after the first that answered, beside it: of another dtype too."""
        firsts: list[tuple[Any, Answer]] = []
        rows = []
        for task in engines:
            row = self.folder.of_task(task.key)[0]
            if row.status != "ok":
                continue
            plan = self.sweep.plans[task.plan]
            asked = (plan.arms[task.arm].model, plan.workloads[task.workload])
            answer = Answer.of(row.arm, row.settings, self.folder.samples(task.key))
            first = next((one for place, one in firsts if place == asked), None)
            if first is None:
                firsts.append((asked, answer))
            else:
                common = self._derived("parity", task, workload=asked[1].name)
                rows.append(parity.compare(first, answer, common))
        return rows

    def _speedup_rows(self, engines: Sequence[Task], peers: Sequence[Task]) -> list[Row]:
        """Of each peer that was timed, the first arm that was."""
        rows = []
        for peer in peers:
            mine = listing.first_timed(engines, peer, self.folder.of_task)
            if mine is None or listing.timed_row(self.folder.of_task(peer.key)) is None:
                continue
            plan = self.sweep.plans[peer.plan]
            about = served_fields(plan, plan.arms[mine.arm], plan.workloads[peer.workload])
            answer = Answer.of(about["arm"], about["settings"], self.folder.samples(mine.key))
            theirs = self.folder.samples(peer.key)["tokens"]
            common = self._derived("speedup", peer, **about, peer=peer.peer)
            rows.append(speedups.compare(self._pairs(mine, peer), answer.tokens, theirs, common))
        return rows

    def _unrecorded_rows(self, engines: Sequence[Task]) -> list[Row]:
        """Of arms that serve and were not timed, why their steps were not recorded either."""
        rows = []
        for task in engines:
            row = self.folder.of_task(task.key)[0]
            if row.stage == "engine" and row.status == "ok" and row.tokens_per_s is None:
                about = {"arm": row.arm, "settings": row.settings, "workload": row.workload}
                nothing: dict[str, Any] = dict.fromkeys(set(COLUMNS["step"]["ok"]) - {"workload", "speed_reason"})
                nothing |= {"range": "step", "category": "step", "clock": "host"}
                common = self._derived("step", task, **about)
                rows.append(Row(stage="step", **common, status="ok", **nothing, speed_reason=row.speed_reason))
        return rows

    def _pairs(self, mine: Task, peer: Task) -> list[tuple[Row, Row]]:
        pairs = []
        for number in range(self.sweep.experiment.replicates):
            keys = [listing.replicate_key(task, number) for task in (mine, peer)]
            of_arm, of_peer = (listing.timed_row(self.folder.of_task(key)) for key in keys)
            if of_arm is not None and of_peer is not None:
                pairs.append((of_arm, of_peer))
        return pairs


def failures(folder: RunFolder) -> list[str]:
    """What makes a run's exit status non-zero: every row that is wrong or failed, or some of whose requests failed; or
    that no engine ran at all.
    """
    bad = [f"{row.stage} {row.status}: {row.reason}" for row in folder.rows if row.status in ("wrong", "failed")]
    served = [row for row in folder.rows if row.stage in ("engine", "peers")]
    bad += [f"{row.stage}: {row.unserved}" for row in served if row.unserved is not None]
    engines = [row for row in folder.rows if row.stage == "engine"]
    if engines and not bad and all(row.status == "unsupported" for row in engines):
        bad.append("no arm is supported here")
    return bad
