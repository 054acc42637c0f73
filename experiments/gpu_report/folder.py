"""A GPU report's folder: a run's, whose tasks are the report's steps and whose environment is the device's.

Beside the files of a run it holds the lockfile of what was tuned, `runs/` with the runs of the engine's marks,
worker.log with what the steps printed, and report.md. Every figure of the report is a row of results.jsonl.
"""

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from experiments.document import ExperimentError
from experiments.gpu_report.hardware import describe_device
from experiments.gpu_report.steps import Step, finished_keys
from experiments.runs.columns import columns
from experiments.runs.folder import RunFolder, new_run_id
from experiments.runs.reading import SCHEMA, RecordedRun, check_version, read_run
from experiments.runs.rows import VERSION
from experiments.runs.rows_file import RowsFile
from tkernels.files import write_text

NAME = "gpu-report"
_RESOLVED = f"name: {NAME}\ndevice: cuda\n"


def read_report(out: Path) -> RecordedRun | None:
    """The report in a folder, its rows and its environment; None where none has begun.

    Raises:
        ExperimentError: it is another run's folder, or one of a report that kept facts.jsonl.
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
    return run


def open_report(out: Path, device: torch.device, steps: Sequence[Step]) -> RunFolder:
    """The folder of a report on `device`, begun where it was not. It has the rows of finished steps alone: what was cut
    off, failed, or is of code that has changed since is measured anew.

    Raises:
        ExperimentError: as `read_report`; another process has the folder; or it is another device's.
    """
    out.mkdir(parents=True, exist_ok=True)
    read_report(out)  # what is refused gets no results.jsonl
    file = RowsFile(out / "results.jsonl")
    try:
        environment = describe_device(device)
        if not (out / "run.json").exists():
            _begin(out, environment, len(steps))
        run = read_report(out)
        assert run is not None
        known, name = run.environment["device"]["name"], environment["device"]["name"]
        if known != name:
            raise ExperimentError([f"--out {out}: holds facts of {known}, and this is {name}"])
        keys = finished_keys(run.rows) & {step.key for step in steps}
        rows = [row for row in run.rows if row.task in keys]
        meta = {**run.meta, "finished": None, "tasks": len(steps)}
        # Before the rows are mended: a kill between the two must not leave a report that has ended without them.
        write_text(out / "run.json", json.dumps(meta, indent=2) + "\n")
        if run.repairs or len(rows) < len(run.rows):
            file.rewrite(rows)
        return RunFolder(out, meta, rows, run.repairs, file)
    except BaseException:
        file.close()
        raise


def _begin(out: Path, environment: dict[str, object], tasks: int) -> None:
    """Writes what makes a folder a run's, run.json last: without it there is none."""
    run_id = new_run_id()
    meta = {
        "schema": SCHEMA, "rows_version": VERSION, "run_id": run_id, "name": NAME,
        "created": datetime.now(UTC).isoformat(timespec="seconds"), "finished": None,
        "resolved_sha256": hashlib.sha256(_RESOLVED.encode()).hexdigest(), "tasks": tasks, "executor": "local",
    }  # fmt: skip
    write_text(out / "resolved.yaml", _RESOLVED)
    for file, content in (
        ("environment.json", {"run_id": run_id, **environment}), ("columns.json", columns()), ("run.json", meta)
    ):  # fmt: skip
        write_text(out / file, json.dumps(content, indent=2, default=str) + "\n")
