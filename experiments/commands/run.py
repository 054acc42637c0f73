"""`tk run`: one experiment, from its YAML to a run folder, a table and a report. Imports torch when it has to."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from experiments.commands.requests import RunRequest
from experiments.document import ExperimentError, read_document
from experiments.exits import import_torch
from experiments.planning.layout import refuse_unsound
from experiments.signals import INTERRUPTED, Signals
from experiments.sweep.executors import make_executor
from experiments.sweep.tasks import Executor

if TYPE_CHECKING:
    from experiments.planning.plan import Sweep
    from experiments.runs.folder import RunFolder

MOST_ARMS = 64
"""More are asked about first: a list too many is soon written."""

MOST_CALLS = 1024
"""Variants at points of `shapes`: likewise."""


def reason_to_ask(sweep: "Sweep") -> str | None:
    """Why the sweep is not run without --yes: it is so much."""
    if sweep.num_arms > MOST_ARMS:
        return f"{sweep.extent}; more than {MOST_ARMS} arms are run with --yes"
    if sweep.num_shapes > MOST_CALLS:
        calls = f"{sweep.num_shapes:,} calls of variants at points of its shapes, each to be checked and timed"
        return f"{calls}; more than {MOST_CALLS:,} are run with --yes"
    return None


def resume_command(request: RunRequest, path: Path) -> str:
    """What goes on with a run that was cut off."""
    words = ["tk", "run", str(request.file), *(word for one in request.overrides for word in ("--set", one))]
    words += [] if request.full is None else ["--full" if request.full else "--no-full"]
    words += ["--yes"] if request.yes else []
    words += ["--executor", request.executor] if request.executor != "local" else []
    return shlex.join([*words, "--resume", str(path)])


def run(request: RunRequest) -> int:
    """Runs the experiment, or what is left of it; returns 1 where any of its rows is wrong or failed.

    What is refused without torch is refused before it is imported, and the executor starts meanwhile.
    """
    if request.out is not None and request.resume is not None:
        raise ExperimentError(["--out and --resume: a run is a new one or goes on: give one"])
    serves = refuse_unsound(request.file, request.overrides)
    executor = make_executor(request.executor, serves)
    try:
        # Loading torch takes longer than anyone waits in silence: after an installation ten times as long as later.
        model = ", then the model (a preset is trained on first use)" if serves else ""
        text = f"{request.file}: no fault in the file; loading torch{model}"
        Console(stderr=True).print(Text(text, "dim"), soft_wrap=True)
        import_torch()
        from experiments.planning.plan import make_sweep

        sweep = make_sweep(read_document(request.file, request.overrides), full=request.full)
        if not request.yes and (reason := reason_to_ask(sweep)):
            raise ExperimentError([f"{request.file}: {reason}"])
        return _carry_out(request, sweep, executor)
    finally:
        executor.end()


def _carry_out(request: RunRequest, sweep: "Sweep", executor: Executor) -> int:
    # Where an experiment is refused, nobody waits for these to be imported: a fifth of the time that it takes.
    from experiments.reporting.tables import print_report
    from experiments.sweep.runner import RunInterrupted, run_experiment

    progress = Console(stderr=True)
    if sweep.document.full is not None or sweep.is_full:
        sizes, other = ("full", "--no-full") if sweep.is_full else ("small", "--full")
        progress.print(Text(f"in its {sizes} sizes; {other} for the others"), soft_wrap=True)
    if sweep.experiment.serving is not None:
        progress.print(Text("serving: its limits are for tk serve; a run has no use for them"), soft_wrap=True)
    try:
        with Signals():
            folder = run_experiment(
                sweep, request.out, request.overrides, progress, executor=executor, resume=request.resume
            )
    except RunInterrupted as interrupted:
        again = resume_command(request, interrupted.path)
        progress.print(Text(f"interrupted; what is done is kept, and goes on with: {again}"), soft_wrap=True)
        return INTERRUPTED
    console = Console()
    prompts = {one.name: one.prompts for one in sweep.experiment.workload if one.kind == "prompts"}
    print_report(console, prompts, folder.rows)
    return print_ending(console, folder)


def print_ending(console: Console, folder: "RunFolder") -> int:
    """Writes the report and says where things are; 1 where any row is wrong or failed."""
    from experiments.reporting.rendering import write_report
    from experiments.reporting.report import report_of
    from experiments.runs.reading import read_run
    from experiments.sweep.runner import failures

    bad = failures(folder)
    if bad:
        console.print(Text(f"{len(bad)} of {len(folder.rows)} results are not as they should be", "bold red"))
    console.print(Text(f"{len(folder.rows)} rows in {folder.path / 'results.jsonl'}"), soft_wrap=True)
    console.print(Text(f"Report: {write_report(report_of(read_run(folder.path)), folder.path)}"), soft_wrap=True)
    return 1 if bad else 0
