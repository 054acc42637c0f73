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

from experiments.document import ExperimentError
from experiments.planning.plan import Sweep
from experiments.planning.resolved import resolved_text
from experiments.runs.columns import columns
from experiments.runs.provenance import source_files
from experiments.runs.reading import SCHEMA, SOURCE, check_version, read_meta, read_object, read_run
from experiments.runs.rows import VERSION, Row
from experiments.runs.rows_file import RowsFile
from tkernels.files import PARTIAL, write_text


class RunFolder:
    """Open for the length of a run. `rows` holds what was recorded so far, in order; `repairs` says what was cut off
    when it was opened again.
    """

    def __init__(
        self,
        path: Path,
        meta: dict[str, Any],
        rows: Sequence[Row],
        repairs: Sequence[str] = (),
        file: RowsFile | None = None,
    ) -> None:
        """Opens a folder that `new_folder` made; ExperimentError where another process writes into it.

        file: its results.jsonl, where that is open already.
        """
        self.path = path
        self.meta = meta
        self.repairs = tuple(repairs)
        self.rows: list[Row] = list(rows)
        self._of_task: dict[str, list[Row]] = {}
        for row in rows:
            self._of_task.setdefault(row.task, []).append(row)
        self._used: dict[str, Any] = {}
        if (path / "tuned.json").exists():
            self._used = dict(read_object(path / "tuned.json").get("used", {}))
        self._file = file if file is not None else RowsFile(path / "results.jsonl")

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
            (self.path / "samples").mkdir(exist_ok=True)
            write_text(self.samples_file(task), json.dumps({"task": task, **samples}, separators=(",", ":")))
        whole = [row.model_copy(update={"task_rows": len(rows)}) for row in rows]
        self._file.append(whole)
        self.rows += whole
        self._of_task[task] = whole

    def samples_file(self, task: str) -> Path:
        return self.path / "samples" / f"{hashlib.sha256(task.encode()).hexdigest()[:16]}.json"

    def samples(self, task: str) -> Mapping[str, Any]:
        data: Mapping[str, Any] = json.loads(self.samples_file(task).read_text(encoding="utf-8"))
        return data

    def use(self, mode: str, used: Mapping[str, Any]) -> None:
        """Notes tuned configs that a task used."""
        if new := {key: value for key, value in used.items() if self._used.get(key) != value}:
            self._used |= new
            write_text(self.path / "tuned.json", json.dumps({"mode": mode, "used": self._used}, indent=2) + "\n")

    @property
    def used(self) -> Mapping[str, Any]:
        """As in Tuning.used, of all tasks."""
        return self._used

    def finish(self, mode: str, entries: Mapping[str, Any], clocks: Mapping[str, Any]) -> None:
        """The run has ended: every task has its rows. entries: the lockfiles' for what was `used`. clocks: the
        device's, now.
        """
        if self._used:
            about = {"mode": mode, "used": self._used, "entries": entries}
            write_text(self.path / "tuned.json", json.dumps(about, indent=2) + "\n")
        environment = json.loads((self.path / "environment.json").read_text(encoding="utf-8"))
        environment["tuning"] = {**environment.get("tuning", {}), "mode": mode, "used": self._used}
        environment["device"]["clocks_after"] = clocks
        write_text(self.path / "environment.json", json.dumps(environment, indent=2, default=str) + "\n")
        self.meta |= {"finished": _now(), "tasks": len(self._of_task)}
        write_text(self.path / "run.json", json.dumps(self.meta, indent=2) + "\n")

    def close(self) -> None:
        self._file.close()


def new_path(sweep: Sweep, out: Path | None, run_id: str) -> Path:
    """Where a new run goes: `out`, or runs/<name>-<time>-<id>/ under the current folder."""
    return out or Path("runs") / f"{sweep.experiment.name}-{time.strftime('%Y%m%d-%H%M%S')}-{run_id}"


def new_run_id() -> str:
    """No reader may take it for a number: of eight hexadecimal digits alone, one in thirty reads as one."""
    return f"r{secrets.token_hex(4)}"


def new_folder(
    sweep: Sweep, path: Path, run_id: str, environment: Mapping[str, Any], executor: str, tasks: int
) -> RunFolder:
    """Makes the folder `path`, which is new or empty. It is there whole or not at all, whenever the process is killed.

    tasks: how many there will be where nothing goes wrong.
    """
    check_new(path)
    text = resolved_text(sweep)
    meta = {
        "schema": SCHEMA, "rows_version": VERSION, "run_id": run_id, "name": sweep.experiment.name, "created": _now(),
        "finished": None, "resolved_sha256": hashlib.sha256(text.encode()).hexdigest(), "tasks": tasks,
        "executor": executor,
    }  # fmt: skip
    begun = path.parent / f".{path.name}.{run_id}.begun"  # another process may be making the same folder
    try:
        begun.mkdir(parents=True)
        (begun / SOURCE).write_text(sweep.document.text, encoding="utf-8")
        (begun / "resolved.yaml").write_text(text, encoding="utf-8")
        (begun / "environment.json").write_text(json.dumps(environment, indent=2, default=str) + "\n", "utf-8")
        (begun / "columns.json").write_text(json.dumps(columns(), indent=2) + "\n", encoding="utf-8")
        (begun / "run.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        (begun / "results.jsonl").touch()
        for name, file in source_files(sweep.plans).items():
            target = begun / "sources" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        os.rename(begun, path)  # over an empty folder too
    except OSError as error:
        shutil.rmtree(begun, ignore_errors=True)
        raise ExperimentError([f"{path}: cannot be made: {error.strerror}"]) from None
    return RunFolder(path, meta, ())


def check_new(path: Path) -> None:
    """Raises ExperimentError where there is something at `path` that is not an empty folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ExperimentError([f"--out {path}: exists and is not an empty folder"])


def open_again(sweep: Sweep, path: Path, environment: Mapping[str, Any], executor: str) -> RunFolder:
    """The folder of a run that was cut off, without what a kill left half written; `repairs` says what that was. A run
    that had ended and has lost rows since is one that was cut off.

    Raises ExperimentError where `path` is no run, or one of another experiment, device, version or kernel's code: rows
    of both would stand in one file as if they were of one run.
    """
    check_version(path, read_meta(path), "resumed")  # what is no run is given no results.jsonl
    with contextlib.ExitStack() as failed:
        # Before anything is read: another process may just be writing the end of it.
        file = RowsFile(path / "results.jsonl")
        failed.callback(file.close)
        for left in path.rglob(f"*{PARTIAL}"):
            left.unlink()
        run = read_run(path)
        its_own = ("lockfiles",) if sweep.experiment.tuning == "search" else ()
        differences = _text_differences(path, resolved_text(sweep)) + _changes(run.environment, environment, its_own)
        if differences:
            raise ExperimentError([f"{path}: cannot be resumed: {difference}" for difference in differences])
        now = {name: environment["git"].get(name) for name in ("commit", "dirty")}
        resumed = [*run.meta.get("resumed", []), {"at": _now(), "executor": executor, "git": now}]
        meta = {**run.meta, "finished": None if run.lost_rows else run.meta["finished"], "resumed": resumed}
        notes = [*run.repairs, *_other_code(run.environment["git"], environment["git"])]
        if meta["finished"] is None:
            # Before the rows are mended: a kill between the two must not leave a run that has ended without them.
            write_text(path / "run.json", json.dumps(meta, indent=2) + "\n")
        if run.repairs:
            file.rewrite(run.rows)
        folder = RunFolder(path, meta, run.rows, notes, file)
        failed.pop_all()
    return folder


def _other_code(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """That the code around the kernels, whose own is the same, is another one: no reason not to go on, but said."""
    if all(then.get(name) == now.get(name) for name in ("commit", "diff")):
        return []
    commits = " and ".join(
        f"{str(git.get('commit'))[:12]}{' with changes' * bool(git.get('dirty'))}" for git in (then, now)
    )
    return [f"the code around the kernels has changed since the run began: its rows are of {commits}"]


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
