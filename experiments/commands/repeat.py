"""`tk repeat`: a run's resolved experiment again, and what changed."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from experiments.document import ExperimentError, read_document
from experiments.planning.plan import make_sweep
from experiments.runner import failures, run_experiment
from experiments.runs.differences import changed_facts, circumstances
from experiments.runs.reading import RecordedRun, read_run
from experiments.runs.verdict_tables import print_comparison, print_lines
from experiments.runs.verdicts import compare_runs


def run(folder: Path, out: Path | None) -> int:
    """Runs it and returns 1 where any of the new rows is wrong or failed.

    Raises:
        ExperimentError: `folder` is no run, or its experiment no longer resolves here: says what the folder still has.
    """
    before = read_run(folder)
    console = Console()
    for repair in before.repairs:
        console.print(Text(repair, "yellow"), soft_wrap=True)
    try:
        sweep = make_sweep(read_document(folder / "resolved.yaml"))
    except ExperimentError as error:
        kept = f"the sources that it was run with are in {folder / 'sources'}"
        raise ExperimentError([*error.problems, kept] if (folder / "sources").is_dir() else error.problems) from None
    again = run_experiment(sweep, out, [], Console(stderr=True))
    print_changes(console, before, read_run(again.path))
    bad = failures(again)
    if bad:
        console.print(Text(f"{len(bad)} of {len(again.rows)} results are not as they should be", "bold red"))
    console.print(Text(f"{len(again.rows)} rows in {again.path / 'results.jsonl'}"), soft_wrap=True)
    return 1 if bad else 0


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
