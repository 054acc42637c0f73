"""`tk run`: one experiment, from its YAML to a run folder and a table."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from experiments.document import read_document
from experiments.plan import make_sweep
from experiments.runner import failures, run_experiment
from experiments.tables import print_report


def run(file: Path, overrides: Sequence[str], out: Path | None) -> int:
    """Runs the experiment and returns 1 where any of its rows is wrong or failed."""
    sweep = make_sweep(read_document(file, overrides))
    folder = run_experiment(sweep, out, overrides, Console(stderr=True))
    console = Console()
    prompts = {one.name: one.prompts for one in sweep.experiment.workload if one.kind == "prompts"}
    print_report(console, prompts, folder.rows)
    bad = failures(folder)
    if bad:
        console.print(Text(f"{len(bad)} of {len(folder.rows)} results are not as they should be", "bold red"))
    console.print(Text(f"{len(folder.rows)} rows in {folder.path / 'results.jsonl'}"), soft_wrap=True)
    return 1 if bad else 0
