"""One run's folder, as it is written: by one process, a task at a time, so that a kill leaves whole tasks behind.

run.json            what the run is, and whether it has ended
experiment.yaml     the experiment as it was written: its comments say what it asks
resolved.yaml       the experiment with what it left open filled in: it resolves to itself, wherever it lies
environment.json    what figures depend on besides: versions, device, code, seeds, hashes of the files that are read
sources/            <op>/<variant>.py of every variant that is used, outside ones too; imports/, what those import
columns.json        every column of results.jsonl: its type, unit and meaning
tuned.json          the tuned configs that were used, how each was found, and at the end the lockfiles' entries for them
results.jsonl       a row per fact, all of a task in one write
samples/            <hash of a task's key>.json: raw figures that are too big for rows
table.csv           every figure of every process as one long table: place, arm, figure, value, unit, replicate
report.html         what all this says, and figures/, its pictures as SVG and CSV: made when the run has ended
"""

import contextlib
import difflib
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from experiments.document import ExperimentError
from experiments.planning.plan import Sweep
from experiments.planning.resolved import resolved_text
from experiments.runs.provenance import source_files
from experiments.runs.reading import SOURCE, check_version, read_meta, read_object, read_run
from experiments.runs.rows import SCHEMA, VERSION, Row, describe_columns
from tkernels.files import PARTIAL, naming, new_folder, replacing, write_text
from tkernels.isolation import write_whole


class RunFolder:
    """Open for the length of a run, and locked: who has it is the only one that writes there.

    meta: run.json. recorded: what was there when it was opened. rows: that and what was recorded since, in order.
    repairs: a sentence for whatever was not as a run leaves it.
    """

    def __init__(self, path: Path) -> None:
        """Opens a run's folder; ExperimentError where it is none, or where another process has it."""
        read_meta(path)  # what is no run is given no lock and no results.jsonl
        self._lock = FileLock(path / ".lock", blocking=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise ExperimentError([f"{path}: another process is running it"]) from None
        self.path = path
        self._results = path / "results.jsonl"
        self._file = self._open_results()
        try:  # to read only now: another process may just have been writing the end of it
            for left in path.rglob(f"*{PARTIAL}"):
                left.unlink()
            self.recorded = read_run(path)
            tuned = path / "tuned.json"
            self._used: dict[str, Any] = dict(read_object(tuned).get("used", {})) if tuned.exists() else {}
        except BaseException:
            self.close()
            raise
        self.meta = dict(self.recorded.meta)
        self.repairs = self.recorded.repairs
        self.rows = list(self.recorded.rows)
        self._of_task = _rows_by_task(self.rows)

    def _open_results(self) -> int:
        return os.open(self._results, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    @property
    def run_id(self) -> str:
        return str(self.meta["run_id"])

    @property
    def is_finished(self) -> bool:
        """Whether it had ended before it was opened, or has since."""
        return self.meta["finished"] is not None

    def done(self, key: str) -> bool:
        """Whether a task has all its rows here."""
        return key in self._of_task

    def of_task(self, key: str) -> Sequence[Row]:
        return self._of_task.get(key, ())

    def record(self, rows: Sequence[Row], samples: Mapping[str, Any] | None = None) -> None:
        """All rows of a task, at least one, in one write that is on disk when this returns; its samples before them.

        Raises OSError, which names the file, where it cannot be written.
        """
        task = rows[0].task
        if self.done(task):
            raise ValueError(f"task {task!r} is recorded already")  # nobody could read the folder again
        if samples is not None:
            self._samples_file(task).parent.mkdir(exist_ok=True)
            write_text(self._samples_file(task), json.dumps({"task": task, **samples}, separators=(",", ":")))
        whole = [row.model_copy(update={"task_rows": len(rows)}) for row in rows]
        with naming(self._results):
            write_whole(self._file, _lines(whole))
            os.fsync(self._file)
        self.rows += whole
        self._of_task[task] = whole

    def rewrite(self, rows: Sequence[Row]) -> None:
        """Leaves exactly these rows of whole tasks, each on a line that ends."""
        with replacing(self._results) as partial:
            partial.write_bytes(_lines(rows))
        self.rows, self._of_task = list(rows), _rows_by_task(rows)
        os.close(self._file)
        self._file = self._open_results()

    def samples(self, task: str) -> Mapping[str, Any]:
        """What was recorded beside the rows of a task, by its key."""
        return read_object(self._samples_file(task))

    def _samples_file(self, task: str) -> Path:
        return self.path / "samples" / f"{hashlib.sha256(task.encode()).hexdigest()[:16]}.json"

    def use(self, mode: str, used: Mapping[str, Any]) -> None:
        """Notes tuned configs that a task used."""
        if new := {key: value for key, value in used.items() if self._used.get(key) != value}:
            self._used |= new
            _write_json(self.path / "tuned.json", {"mode": mode, "used": self._used})

    @property
    def used(self) -> Mapping[str, Any]:
        """As in Tuning.used, of all tasks."""
        return self._used

    def finish(self, mode: str, entries: Mapping[str, Any], clocks: Mapping[str, Any]) -> None:
        """The run has ended: every task has its rows. entries: the lockfiles' for what was `used`. clocks: the
        device's, now.
        """
        if self._used:
            _write_json(self.path / "tuned.json", {"mode": mode, "used": self._used, "entries": entries})
        environment = dict(read_object(self.path / "environment.json"))
        environment["tuning"] = {**environment.get("tuning", {}), "mode": mode, "used": self._used}
        environment["device"]["clocks_after"] = clocks
        _write_json(self.path / "environment.json", environment)
        self.meta |= {"finished": _now(), "tasks": len(self._of_task)}
        self.write_meta()

    def write_meta(self) -> None:
        _write_json(self.path / "run.json", self.meta)

    def close(self) -> None:
        os.close(self._file)
        Path(self._lock.lock_file).unlink(missing_ok=True)  # while it is ours: nobody else holds what we take away
        self._lock.release()


def _rows_by_task(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.task, []).append(row)
    return found


def _lines(rows: Sequence[Row]) -> bytes:
    return "".join(row.as_json() + "\n" for row in rows).encode()


def _write_json(file: Path, value: Any) -> None:
    write_text(file, json.dumps(value, indent=2, default=str) + "\n")


def new_path(sweep: Sweep, out: Path | None, run_id: str) -> Path:
    """Where a new run goes: `out`, or runs/<name>-<time>-<id>/ under the current folder."""
    return out or Path("runs") / f"{sweep.experiment.name}-{time.strftime('%Y%m%d-%H%M%S')}-{run_id}"


def new_run_id() -> str:
    """No reader may take it for a number: of eight hexadecimal digits alone, one in thirty reads as one."""
    return f"r{secrets.token_hex(4)}"


def make_run(sweep: Sweep, path: Path, environment: Mapping[str, Any], executor: str, tasks: int) -> RunFolder:
    """Makes the folder `path`, which is new or empty. It is there whole or not at all, whenever the process is killed.

    Args:
        sweep: What the run is of.
        path: The folder.
        environment: environment.json, which has the run's id.
        executor: The name of what carries tasks out.
        tasks: How many there will be where nothing goes wrong.

    Raises:
        ExperimentError: It cannot be made.
    """
    try:
        with new_folder(path, "a run") as unfinished:
            (unfinished / SOURCE).write_text(sweep.document.text, encoding="utf-8")
            write_files(unfinished, sweep.experiment.name, resolved_text(sweep), environment, executor, tasks)
            for place, file in source_files(sweep.plans).items():
                target = unfinished / "sources" / place
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
    except OSError as error:
        raise ExperimentError([f"{path}: cannot be made: {error.strerror or error}"]) from None
    return RunFolder(path)


def write_files(
    folder: Path, name: str, resolved: str, environment: Mapping[str, Any], executor: str, tasks: int
) -> None:
    """Writes what makes a folder a run's, run.json last: without it there is none.

    environment: environment.json, which has the run's id.
    """
    meta = {
        "schema": SCHEMA, "rows_version": VERSION, "run_id": environment["run_id"], "name": name, "created": _now(),
        "finished": None, "resolved_sha256": hashlib.sha256(resolved.encode()).hexdigest(), "tasks": tasks,
        "executor": executor,
    }  # fmt: skip
    write_text(folder / "resolved.yaml", resolved)
    (folder / "results.jsonl").touch()
    for file, value in (("environment", environment), ("columns", describe_columns()), ("run", meta)):
        _write_json(folder / f"{file}.json", value)


def open_again(sweep: Sweep, path: Path, environment: Mapping[str, Any], executor: str) -> RunFolder:
    """The folder of a run that was cut off, without what a kill left half written; `repairs` says what that was. A run
    that had ended and has lost rows since is one that was cut off.

    Raises ExperimentError where `path` is no run, or one of another experiment, device, version or kernel's code: rows
    of both would stand in one file as if they were of one run.
    """
    check_version(path, read_meta(path), "resumed")
    with contextlib.ExitStack() as failed:
        folder = RunFolder(path)
        failed.callback(folder.close)
        run = folder.recorded
        its_own = ("lockfiles",) if sweep.experiment.tuning == "search" else ()
        differences = _text_differences(path, resolved_text(sweep)) + _changes(run.environment, environment, its_own)
        if differences:
            raise ExperimentError([f"{path}: cannot be resumed: {difference}" for difference in differences])
        folder.repairs += _other_code(run.environment["git"], environment["git"])
        now = {name: environment["git"].get(name) for name in ("commit", "dirty")}
        folder.meta["resumed"] = [*run.meta.get("resumed", []), {"at": _now(), "executor": executor, "git": now}]
        if run.lost_rows:
            folder.meta["finished"] = None
        if not folder.is_finished:
            # Before the rows are mended: a kill between the two must not leave a run that has ended without them.
            folder.write_meta()
        if run.repairs:
            folder.rewrite(folder.rows)
        failed.pop_all()
    return folder


def _other_code(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """That the code around the kernels, whose own is the same, is another one: no reason not to go on, but said."""
    if all(then.get(name) == now.get(name) for name in ("commit", "diff")):
        return ()
    commits = " and ".join(
        f"{str(git.get('commit'))[:12]}{' with changes' * bool(git.get('dirty'))}" for git in (then, now)
    )
    return (f"the code around the kernels has changed since the run began: its rows are of {commits}",)


def _text_differences(path: Path, now: str) -> list[str]:
    """Where the resolved experiment is another one."""
    then = (path / "resolved.yaml").read_text(encoding="utf-8")
    if then == now:
        return []
    lines = difflib.unified_diff(then.splitlines(), now.splitlines(), lineterm="", n=0)
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return [f"it is a run of another experiment: {'; '.join(changed[:8])}{' …' if len(changed) > 8 else ''}"]


_SAME: Mapping[str, tuple[str, ...] | None] = {
    "kernels": None, "sources": None, "imports": None, "lockfiles": None, "device": None, "versions": None,
    "model": None, "files": None, "host": ("torch_threads",),
}  # fmt: skip
"""Of the environment, what all rows of a run have in common: the part, and which of its names where not all."""


def _changes(then: Mapping[str, Any], now: Mapping[str, Any], its_own: Sequence[str]) -> list[str]:
    """Of _SAME, what is not; `its_own`: parts that the run changes itself."""
    found = []
    current = json.loads(json.dumps(now, default=str))
    for part, names in _SAME.items():
        if part in its_own:
            continue
        before, after = then.get(part) or {}, current.get(part) or {}
        for name in names or sorted({*before, *after}):
            if before.get(name) != after.get(name) and not name.startswith("clocks"):
                found.append(f"{part}: {name} was {before.get(name)!r} and is {after.get(name)!r}")
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
