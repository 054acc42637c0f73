"""`tk runs`: the runs in a folder, the newest last."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from experiments.commands.output import print_json
from experiments.commands.requests import RunsRequest
from experiments.document import ExperimentError
from experiments.reporting.table_style import make_table
from experiments.runs.reading import read_run

_OF_A_RUN = ("run.json", "results.jsonl")
"""What has neither is no run at all: quantized checkpoints are kept beside runs too."""


def run(request: RunsRequest) -> int:
    """Lists them; what cannot be read is listed with its reason.

    Raises:
        ExperimentError: There is no such folder, or it is a run itself.
    """
    folder = request.folder
    if not folder.is_dir():
        raise ExperimentError([f"{folder}: no such folder; `tk run` makes runs/ where it is called"])
    if any((folder / name).exists() for name in _OF_A_RUN):
        raise ExperimentError([f"{folder}: is a run itself; `tk runs {folder / '..'}` lists it, `tk report` tells it"])
    names = sorted({file.parent for name in _OF_A_RUN for file in folder.glob(f"[!.]*/{name}")})
    listed = sorted(map(_describe, names), key=lambda one: str(one.get("when") or ""))
    if request.as_json:
        print_json({"runs": listed})
    elif listed:
        _print(Console(), folder, listed)
    else:
        Console().print(Text(f"no runs in {folder}"))
    return 0


def _print(console: Console, folder: Path, listed: Sequence[Mapping[str, Any]]) -> None:
    columns = ("name", "when, where, code", "rows", "state")
    table = make_table(f"Runs in {folder}", columns, map(_cells, listed), right=["rows"])
    table.columns[0].no_wrap = True  # it is what other commands are given
    console.print(table)
    for one in listed:
        if "reason" in one:
            console.print(Text(f"{one['name']}: {one['reason']}", "yellow"), soft_wrap=True)
        for repair in one.get("repairs", ()):
            console.print(Text(repair, "dim"), soft_wrap=True)


def _cells(one: Mapping[str, Any]) -> Sequence[str | Text]:
    if "reason" in one:
        return one["name"], "-", "-", Text("no run of schema 1", "yellow")
    when = str(one["when"])[:16].replace("T", " ")
    state = Text(one["state"], "" if one["finished"] else "yellow")
    if one["failures"]:
        state.append(f", {one['failures']} failed", "red")
    return one["name"], f"{when}\n{one['device']}, {one['git']}", str(one["rows"]), state


def _describe(path: Path) -> dict[str, Any]:
    """A run's entry of --json; its name and the reason where it cannot be read."""
    try:
        run = read_run(path)
    except ExperimentError as error:
        return {"name": path.name, "reason": "; ".join(error.problems)}
    device = run.environment.get("device", {})
    return {
        "name": run.name,
        "run_id": run.meta["run_id"],
        "experiment": run.meta["name"],
        "when": run.meta["created"],
        "device": device.get("name"),
        "git": _format_git(run.environment.get("git", {})),
        "rows": len(run.rows),
        "failures": sum(row.status in ("wrong", "failed") for row in run.rows),
        "finished": run.finished,
        "state": "finished" if run.finished else f"resumable, {run.progress}",
        "repairs": list(run.repairs),
    }


def _format_git(state: Mapping[str, Any]) -> str:
    if state.get("commit") is None:
        return "-"
    return f"{state['commit'][:8]}{' + diff' if state.get('dirty') else ''}"
