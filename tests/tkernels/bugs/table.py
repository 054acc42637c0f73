"""How many bugs that happened are found on a CPU, by what, after how many cases and CPU seconds.

    python -m tests.tkernels.bugs.table            # every bug, then a summary by project and by kind
    python -m tests.tkernels.bugs.table --json

Each bug goes the way of a user: `tk check`, its wide cases, and then every sanitizer, until one of them finds it.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.commands.output import print_json, progress_bar
from experiments.reporting.table_style import Column, PlainTable, build_table, cells, group_by, number_column
from tests.tkernels.bugs.bug import Bug, first_fault
from tests.tkernels.bugs.catalogue import BUGS

Row = dict[str, Any]


def measure(bug: Bug) -> Row:
    """What becomes of one bug. finder: "not found" where nothing has anything to say."""
    with tempfile.TemporaryDirectory() as folder:
        found = first_fault(bug.variant(Path(folder)))
    return {
        "bug": bug.name,
        "project": bug.project,
        "kind": bug.kind,
        "op": bug.op,
        "title": bug.title,
        "link": bug.link,
        "happened": bug.happened,
        "finder": found.finder or "not found",
        "cases": found.cases,
        "cpu_seconds": round(found.seconds, 2),
        "message": found.message,
    }


def summary(rows: Sequence[Row], name: str) -> PlainTable:
    """Bugs, those that are found and the median of what finding them took, by a field of the rows."""
    lines = [(value, mine) for value, mine in group_by(rows, lambda row: str(row[name])).items()]
    return PlainTable(
        f"By {name}",
        (Column(name), number_column("bugs"), number_column("found"), number_column("cases"), number_column("CPU s")),
        tuple(cells(value, *_figures(mine)) for value, mine in [*lines, ("all", list(rows))]),
        "cases, CPU s: the median of what it took until a bug was found.",
    )


def _figures(rows: Sequence[Row]) -> list[str]:
    found = [row for row in rows if row["finder"] != "not found"]
    if not found:
        return [str(len(rows)), "0", "-", "-"]
    cases, seconds = (statistics.median(row[name] for row in found) for name in ("cases", "cpu_seconds"))
    return [str(len(rows)), str(len(found)), f"{cases:g}", f"{seconds:.1f}"]


_SHOWN: dict[Column, Callable[[Row], str]] = {
    Column("bug"): lambda row: row["bug"],
    Column("op"): lambda row: row["op"],
    Column("found by"): lambda row: row["finder"],
    number_column("cases"): lambda row: str(row["cases"]),
    number_column("CPU s"): lambda row: f"{row['cpu_seconds']:.1f}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="every bug as JSON, on stdout alone")
    as_json = parser.parse_args().json
    rows = []
    with progress_bar("bugs", len(BUGS)) as update:
        for bug in BUGS.values():
            update(doing=bug.name)
            rows.append(measure(bug))
            update(advance=1)
    if as_json:
        print_json(rows)
        return
    console = Console()
    caption = "found by: the first of tk check, its wide cases and the sanitizers. cases, CPU s: of all until then."
    console.print(build_table("Bugs that happened", _SHOWN, rows, caption, lambda row: str(row["kind"])).as_rich())
    for name in ("project", "kind"):
        console.print(summary(rows, name).as_rich())


if __name__ == "__main__":
    main()
