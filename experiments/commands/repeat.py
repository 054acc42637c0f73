"""`tk repeat`: a run's resolved experiment again, and what changed."""

import shlex
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from experiments.commands.requests import RepeatRequest, RunRequest
from experiments.commands.run import print_ending, reason_to_ask, resume_command
from experiments.document import ExperimentError, read_document
from experiments.planning.plan import Sweep, make_sweep
from experiments.reporting.comparison_tables import print_comparison, print_lines
from experiments.runs.differences import changed_facts, circumstances
from experiments.runs.reading import SOURCE, RecordedRun, check_version, read_run
from experiments.runs.verdicts import compare_runs
from experiments.signals import INTERRUPTED
from experiments.sweep.runner import RunInterrupted, run_experiment


def run(request: RepeatRequest) -> int:
    """Runs it and returns 1 where any of the new rows is wrong or failed.

    Raises:
        ExperimentError: The folder is no run, or its experiment no longer resolves here; it says what is kept.
    """
    folder = request.folder
    before = read_run(folder)
    check_version(folder, before.meta, "repeated")
    console, progress = Console(), Console(stderr=True)
    for repair in before.repairs:
        console.print(Text(repair, "yellow"), soft_wrap=True)
    try:
        sweep = _as_asked(folder, make_sweep(read_document(folder / "resolved.yaml")))
    except ExperimentError as error:
        kept = f"the sources that it was run with are in {folder / 'sources'}"
        raise ExperimentError([*error.problems, kept] if (folder / "sources").is_dir() else error.problems) from None
    try:
        again = run_experiment(sweep, request.out, before.environment.get("overrides") or [], progress)
    except RunInterrupted as interrupted:
        asked = RunRequest(interrupted.path / "resolved.yaml", yes=reason_to_ask(sweep) is not None)
        resume = resume_command(asked, interrupted.path)
        compare = shlex.join(["tk", "compare", str(folder), str(interrupted.path)])
        progress.print(
            Text(f"interrupted; what is done is kept, and goes on with: {resume}\nthen what changed: {compare}"),
            soft_wrap=True,
        )
        return INTERRUPTED
    print_changes(console, before, read_run(again.path))
    return print_ending(console, again)


def _as_asked(folder: Path, sweep: Sweep) -> Sweep:
    """The sweep with the experiment as it was first written: its comments say what it asks."""
    source = folder / SOURCE
    if not source.exists():
        return sweep
    return replace(sweep, document=replace(sweep.document, text=source.read_text(encoding="utf-8", errors="replace")))


def print_changes(console: Console, before: RecordedRun, after: RecordedRun) -> None:
    """Verdicts, rows and circumstances; where speeds cannot be compared, why, and the rest all the same."""
    try:
        print_comparison(console, compare_runs(before, after))
    except ExperimentError as error:
        print_lines(console, "Speeds are not compared", error.problems)
        print_lines(console, "What else differs", circumstances(before, after))
        print_lines(console, "Rows that changed", changed_facts(before, after))
    else:
        if not changed_facts(before, after):
            console.print(Text("Every row has the status, the tokens and the counts that it had.", "green"))
