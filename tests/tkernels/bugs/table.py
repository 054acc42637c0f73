"""How many bugs that happened are found on a CPU, by what, after how many cases and CPU seconds.

    python -m tests.tkernels.bugs.table            # every bug, then a summary by project and by kind
    python -m tests.tkernels.bugs.table --json     # every bug as JSON on stdout

Each bug goes the way of a user: `tk check`, its wide cases, and then every sanitizer, until one of them finds it.
One that another finds than its record, and so the pages, say is named at the end, and the status is 1.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.tkernels.bugs.bug import NOT_FOUND, Bug, first_fault
from tests.tkernels.bugs.catalogue import BUGS

Row = dict[str, Any]

_BUG = "{:<18}{:<18}{:<18}{:<10}{:>6}{:>8}"
_GROUP = "{:<24}{:>6}{:>7}{:>7}{:>8}"


def measure(bug: Bug) -> Row:
    """What becomes of one bug."""
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
        "found_by": found.found_by,
        "recorded": bug.found_by,
        "cases": found.cases,
        "cpu_seconds": round(found.seconds, 2),
        "message": found.message,
    }


def summary(rows: Sequence[Row], name: str) -> Iterator[str]:
    """Bugs, those that are found and the median of what finding them took, by a field of the rows."""
    yield _GROUP.format(name, "bugs", "found", "cases", "CPU s")
    for value in sorted({str(row[name]) for row in rows}, key=str.casefold):
        yield _GROUP.format(value, *_figures([row for row in rows if row[name] == value]))
    yield _GROUP.format("all", *_figures(rows))


def _figures(rows: Sequence[Row]) -> list[str]:
    found = [row for row in rows if row["found_by"] != NOT_FOUND]
    if not found:
        return [str(len(rows)), "0", "-", "-"]
    cases, seconds = (statistics.median(row[name] for row in found) for name in ("cases", "cpu_seconds"))
    return [str(len(rows)), str(len(found)), f"{cases:g}", f"{seconds:.1f}"]


def _show(as_json: bool) -> list[Row]:
    """Measures and prints; a bug's line comes when it is done."""
    rows = []
    if not as_json:
        print(_BUG.format("bug", "kind", "op", "found by", "cases", "CPU s"))
    for bug in BUGS.values():
        rows.append(row := measure(bug))
        if not as_json:
            line = (row[name] for name in ("bug", "kind", "op", "found_by", "cases"))
            print(_BUG.format(*line, f"{row['cpu_seconds']:.1f}"), flush=True)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        print("", *summary(rows, "project"), "", *summary(rows, "kind"), sep="\n")
        print("\ncases, CPU s: of all finders until one found it; in a summary their median over what is found.")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="every bug as JSON, on stdout alone")
    others = [row for row in _show(parser.parse_args().json) if row["found_by"] != row["recorded"]]
    for row in others:
        print(f"{row['bug']}: found by {row['found_by']}, and its record says {row['recorded']}", file=sys.stderr)
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
