"""A GPU report's folder: a run's, whose tasks are the report's steps and whose environment is the device's.

Beside the files of a run it holds the lockfile of what was tuned, `runs/` with the runs of the engine's marks,
worker.log with what the steps printed, report.md, and `home/` with all of this in a few files. Every figure of the
report is a row of results.jsonl.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.document import ExperimentError
from experiments.gpu_report import home
from experiments.gpu_report.hardware import describe_device
from experiments.gpu_report.journal import Journal
from experiments.gpu_report.steps import Step
from experiments.runs.environment import find_version
from experiments.runs.folder import RunFolder, new_run_id, write_files
from experiments.runs.reading import RecordedRun, check_version, read_run
from experiments.runs.rows import Stage
from experiments.sweep.tasks import Ended
from tkernels.lockfile import TuningError, parse_lockfile

NAME = "gpu-report"
_RESOLVED = f"name: {NAME}\ndevice: cuda\n"

_SAME_VERSIONS = ("torch", "triton")
"""What all rows of a report are measured with."""

_NOT_LOCKFILES = ("run.json", "environment.json", "columns.json", "tuned.json")


def read_report(out: Path) -> RecordedRun | None:
    """The report in a folder, its rows and its environment; None where none has begun.

    Raises:
        ExperimentError: It is another run's folder, one of a report that kept facts.jsonl, or damaged; names the file.
    """
    if (out / "facts.jsonl").exists():
        problem = f"{out}: holds the facts.jsonl of an earlier tkernels; a report's rows are in results.jsonl now"
        remedy = "remove facts.jsonl to begin anew here, with the configs that it tuned, or give another folder"
        raise ExperimentError([f"{problem}: {remedy}"])
    if not (out / "run.json").exists():
        return None
    run = read_run(out)
    if run.meta["name"] != NAME:
        raise ExperimentError([f"{out}: is a run of {run.meta['name']!r}, not a GPU report"])
    check_version(out, run.meta, "gone on with")
    _check_environment(out / "environment.json", run.environment)
    try:
        Journal.of(run.meta, run.rows)
    except ValueError as error:
        raise ExperimentError([f"{out / 'run.json'}: {error}"]) from None
    return run


_DEVICE_FACTS = ("name", "arch", "multiprocessors", "cuda")


def _check_environment(file: Path, environment: Mapping[str, Any]) -> None:
    """Raises ExperimentError where it does not have what a report says of its device."""
    lacking = [f"device.{name}" for name in _DEVICE_FACTS if name not in environment.get("device", {})]
    lacking += ["versions"] * ("versions" not in environment)
    if lacking:
        raise ExperimentError([f"{file}: lacks {', '.join(lacking)}, which a report's has: give another folder"])
    if not isinstance(name := environment["device"]["name"], str):
        raise ExperimentError([f"{file}: device.name must be text, got {name!r}: give another folder"])


def read_unopened(out: Path) -> RecordedRun | None:
    """The report that `open_report` would go on with, from its home where only that is there; writes nothing to `out`.

    Raises:
        ExperimentError: As `read_report`, or a file of its home is damaged.
    """
    if (begun := read_report(out)) is not None:
        return begun
    with home.laid_out_elsewhere(out) as folder:
        return read_report(folder)


class ReportFolder:
    """A report that is open: what it knows of the steps, and where it keeps what they find.

    repairs: a sentence for whatever was not as a report leaves it.
    """

    def __init__(self, folder: RunFolder, repairs: Sequence[str] = ()) -> None:
        self.folder, self.path, self.repairs = folder, folder.path, (*folder.repairs, *repairs)
        self.journal = Journal.of(folder.meta, folder.rows)

    def keep(self, step: Step, ended: Ended, reason: str | None) -> None:
        """Keeps and notes what a step came to. Where it was tried before and found more then, that stays."""
        self.journal.note(step, ended.seconds, reason)
        if step.kind != "precompile":
            rows = list(ended.rows)
            if reason is not None:
                rows.append(step.row(self.folder.run_id, "report", "failed", reason))
            before = self.folder.of_task(step.key)
            if reason is None or len(rows) >= len(before):
                if before:
                    self.folder.rewrite([row for row in self.folder.rows if row.task != step.key])
                self.folder.record(rows, ended.samples)
            self.folder.use("nearest", ended.used)
        self.folder.meta |= self.journal.as_meta()
        self.folder.write_meta()
        self.pack()

    def refuse(self, steps: Sequence[Step]) -> list[Step]:
        """Keeps what is known without trying, and returns the steps that have to be tried."""
        for step in (step for step in self.journal.left(steps) if step.refusal is not None):
            stage: Stage = "hardware" if step.kind == "verify" else "check"
            test = {"test": "marked shape"} if step.kind == "verify" else {}
            row = step.row(self.folder.run_id, stage, "unsupported", step.refusal, point=step.point, **test)
            self.folder.record([row])
            self.journal.done.add(step.key)
        return [step for step in steps if step.refusal is None]

    def pack(self) -> None:
        """Brings `home` to how the report stands."""
        done = {key.removeprefix("mark ") for key in self.journal.done if key.startswith("mark ")}
        home.pack(self.path, sorted(map(run_name, done)))

    def finish(self, clocks: Mapping[str, Any]) -> None:
        """Nothing is left. No lockfiles' entries: this report's own lockfile lies beside its rows."""
        self.folder.finish("nearest", {}, clocks)

    def close(self) -> None:
        self.folder.close()


def run_name(mark: str) -> str:
    """Of the folder in `runs/` of a mark's run: the same in every command, so that it goes on there."""
    return mark.replace(" ", "-").replace("=", "-")


def open_report(out: Path, device: torch.device, steps: Sequence[Step]) -> ReportFolder:
    """The folder of a report on `device`, begun where it was not, laid out where only its home is there. Rows of code
    that has changed since are left out: it is measured anew.

    Raises:
        ExperimentError: As `read_report`; another process has the folder; or it is another device's, or was begun with
            another torch or Triton.
    """
    out.mkdir(parents=True, exist_ok=True)
    home.unpack(out)
    environment = {"run_id": new_run_id(), **describe_device(device)}
    if read_report(out) is None:
        write_files(out, NAME, _RESOLVED, environment, "local", len(steps))
    with contextlib.ExitStack() as failed:
        folder = RunFolder(out)
        failed.callback(folder.close)
        then, now = folder.recorded.environment, environment
        if (reason := why_refused(then, now["device"]["name"], now["versions"])) is not None:
            raise ExperimentError([f"--out {out}: {reason}"])
        folder.meta |= {"finished": None, "tasks": len(steps)}
        # Before the rows are mended: a kill between the two must not leave a report that has ended without them.
        folder.write_meta()
        unreadable = _set_aside_lockfiles(out)
        keys = {step.key for step in steps if not (unreadable and step.kind == "tune")}
        folder.rewrite([row for row in folder.rows if row.task in keys])
        failed.pop_all()
    return ReportFolder(folder, unreadable)


def why_refused(then: Mapping[str, Any], device: str, versions: Mapping[str, Any]) -> str | None:
    """Why a report whose environment is `then` does not go on with this device and these versions: rows of two devices
    or of two compilers would stand in one table as if they were of one. None where it does.
    """
    known, remedy = then["device"]["name"], "give another folder"
    if known != device:
        return f"holds facts of {known}, and this is {device}: {remedy}"
    for package in _SAME_VERSIONS:
        before, after = then["versions"].get(package), versions.get(package)
        if before != after:
            problem = f"was begun with {package} {before}, and this is {package} {after}"
            return f"{problem}: {remedy}, or go on with {package} {before}"
    return None


def installed() -> dict[str, str | None]:
    """The versions here of what all rows of a report are measured with."""
    return {package: find_version(package) for package in _SAME_VERSIONS}


def _set_aside_lockfiles(out: Path) -> list[str]:
    """Renames the lockfiles that cannot be read to their last entry, and says which: what they held is tuned anew."""
    said = []
    for file in sorted(out.glob("*.json")):
        if file.name in _NOT_LOCKFILES:
            continue
        try:
            damage = [why for _, why in parse_lockfile(file).unreadable]
            problem = f"{file}: {'; '.join(damage)}" if damage else None
        except TuningError as error:
            problem = str(error)
        if problem is not None:
            aside = file.with_suffix(".unreadable")
            file.rename(aside)
            said.append(f"{problem}; it is now {aside.name}, and what it held is tuned anew")
    return said
