"""A GPU report's folder: a run's, whose tasks are the report's steps and whose environment is the device's.

Beside the files of a run it holds the lockfile of what was tuned, `runs/` with the runs of the engine's marks,
worker.log with what the steps printed, and report.md. Every figure of the report is a row of results.jsonl.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments.document import ExperimentError
from experiments.gpu_report.hardware import describe_device
from experiments.gpu_report.steps import Step, finished_keys
from experiments.runs.folder import RunFolder, new_run_id, write_files
from experiments.runs.reading import RecordedRun, check_version, read_run

NAME = "gpu-report"
_RESOLVED = f"name: {NAME}\ndevice: cuda\n"


def read_report(out: Path) -> RecordedRun | None:
    """The report in a folder, its rows and its environment; None where none has begun.

    Raises:
        ExperimentError: It is another run's folder, or one of a report that kept facts.jsonl.
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
        ExperimentError: As `read_report`; another process has the folder; or it is another device's.
    """
    out.mkdir(parents=True, exist_ok=True)
    environment = {"run_id": new_run_id(), **describe_device(device)}
    if read_report(out) is None:
        write_files(out, NAME, _RESOLVED, environment, "local", len(steps))
    with contextlib.ExitStack() as failed:
        folder = RunFolder(out)
        failed.callback(folder.close)
        known, name = (about["device"]["name"] for about in (folder.recorded.environment, environment))
        if known != name:
            raise ExperimentError([f"--out {out}: holds facts of {known}, and this is {name}"])
        folder.meta |= {"finished": None, "tasks": len(steps)}
        # Before the rows are mended: a kill between the two must not leave a report that has ended without them.
        folder.write_meta()
        keys = finished_keys(folder.rows) & {step.key for step in steps}
        folder.rewrite([row for row in folder.rows if row.task in keys])
        failed.pop_all()
    return folder
