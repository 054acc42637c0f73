"""`tk run`: one experiment, from its YAML to a run folder, a table and a report."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from experiments.document import ExperimentError, read_document
from experiments.planning.plan import Sweep, make_sweep
from experiments.sweep.local import Local
from experiments.sweep.tasks import Executor

MOST_ARMS = 64
"""More are asked about first: a list too many is soon written."""

MOST_CALLS = 1024
"""Variants at points of `shapes`: likewise."""


@dataclass(frozen=True)
class Request:
    """What is run, and where to. resume: the folder of a run that was cut off, to go on with. full: whether in its full
    sizes; None is where the device is CUDA. yes: however many arms there are. executor: what carries the tasks out.
    """

    file: Path
    overrides: Sequence[str] = ()
    out: Path | None = None
    resume: Path | None = None
    full: bool | None = None
    yes: bool = False
    executor: Executor = field(default_factory=Local)


def asked_about(sweep: Sweep) -> str | None:
    """What is asked about before it is run: that it is so much."""
    if sweep.num_arms > MOST_ARMS:
        return f"{sweep.extent}; more than {MOST_ARMS} arms are run with --yes"
    if sweep.num_shapes > MOST_CALLS:
        calls = f"{sweep.num_shapes:,} calls of variants at points of its shapes, each to be checked and timed"
        return f"{calls}; more than {MOST_CALLS:,} are run with --yes"
    return None


def resume_command(request: Request, path: Path) -> str:
    """What goes on with a run that was cut off."""
    words = ["tk", "run", str(request.file), *(word for one in request.overrides for word in ("--set", one))]
    words += [] if request.full is None else ["--full" if request.full else "--no-full"]
    words += ["--yes"] if request.yes else []
    words += ["--executor", request.executor.name] if request.executor.name != "local" else []
    return shlex.join([*words, "--resume", str(path)])


def run(request: Request) -> int:
    """Runs the experiment, or what is left of it; returns 1 where any of its rows is wrong or failed."""
    try:
        return _run(request)
    finally:
        request.executor.end()


def _run(request: Request) -> int:
    if request.out is not None and request.resume is not None:
        raise ExperimentError(["--out and --resume: a run is a new one or goes on: give one"])
    sweep = make_sweep(read_document(request.file, request.overrides), full=request.full)
    if not request.yes and (asked := asked_about(sweep)):
        raise ExperimentError([f"{request.file}: {asked}"])
    return _carry_out(request, sweep)


def _carry_out(request: Request, sweep: Sweep) -> int:
    # Where an experiment is refused, nobody waits for these to be imported: a fifth of the time that it takes.
    from experiments.reporting.rendering import write_report
    from experiments.reporting.report import report_of
    from experiments.reporting.tables import print_report
    from experiments.runner import RunInterrupted, failures, run_experiment
    from experiments.runs.reading import read_run

    progress = Console(stderr=True)
    if sweep.document.full is not None or sweep.is_full:
        sizes, other = ("full", "--no-full") if sweep.is_full else ("small", "--full")
        progress.print(Text(f"in its {sizes} sizes; {other} for the others"), soft_wrap=True)
    try:
        folder = run_experiment(
            sweep, request.out, request.overrides, progress, executor=request.executor, resume=request.resume
        )
    except RunInterrupted as interrupted:
        again = resume_command(request, interrupted.path)
        progress.print(Text(f"interrupted; what is done is kept, and goes on with: {again}"), soft_wrap=True)
        return 130
    console = Console()
    prompts = {one.name: one.prompts for one in sweep.experiment.workload if one.kind == "prompts"}
    print_report(console, prompts, folder.rows)
    bad = failures(folder)
    if bad:
        console.print(Text(f"{len(bad)} of {len(folder.rows)} results are not as they should be", "bold red"))
    console.print(Text(f"{len(folder.rows)} rows in {folder.path / 'results.jsonl'}"), soft_wrap=True)
    console.print(Text(f"Report: {write_report(report_of(read_run(folder.path)), folder.path)}"), soft_wrap=True)
    return 1 if bad else 0
