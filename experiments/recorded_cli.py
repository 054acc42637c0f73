"""The commands of `tk` about runs that are recorded, which `experiments.cli` adds to its own."""

from pathlib import Path
from typing import Annotated

import typer

from experiments.exits import end, end_with_torch

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where the runs are.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs in a folder: when, where, of which code, and whether they ended."""
    from experiments.commands.runs import run

    end(run, folder, as_json)


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; of a single one, its arms.")],
    across: Annotated[
        list[str] | None,
        typer.Option(metavar="WHAT", help="Allow another device, dtype, model, threads or workload. Repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say of every figure whether it is better, worse or within noise: runs beside the first, or one run's arms."""
    from experiments.commands.compare import run

    end(run, folders, across or [], as_json)


def repeat(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The new run's folder, new or empty; runs/<name>-... by default.")
    ] = None,
) -> None:
    """Run a run's resolved experiment again, and say what changed: verdicts, rows, circumstances."""
    from experiments.commands.repeat import run

    end_with_torch(run, folder, out)
