"""All rebuilt bugs, and what the pages tell of them: one sentence and one table each, made of the bugs' records."""

from collections import Counter
from collections.abc import Mapping

from tests.tkernels.bugs import attention, codes, races, rows, sums
from tests.tkernels.bugs.bug import Bug

BUGS: Mapping[str, Bug] = {bug.name: bug for room in (attention, rows, codes, sums, races) for bug in room.BUGS}
"""By name."""

_FEW = 2
"""Projects with no more bugs than these are "others" in the README."""


def found_sentence() -> str:
    """What `docs/how-we-know.md` says before its table."""
    races = sum(bug.is_race for bug in BUGS.values())
    return f"Of {len(BUGS)} bugs, {races} of them races, {_found()} are found, by what the last column names first:"


def _found() -> int:
    return sum(bool(bug.finder) for bug in BUGS.values())


def list_of_bugs() -> list[str]:
    """The table of `docs/how-we-know.md`, a line for each bug: races first, then by kind, project and number."""
    ordered = sorted(BUGS.values(), key=lambda bug: (not bug.is_race, bug.kind, bug.project.casefold(), bug.number))
    return [
        "| kind | issue | what happened | found by |",
        "|---|---|---|---|",
        *(f"| {b.kind} | [{b.project} {b.number}]({b.link}) | {b.happened} | {b.found_by} |" for b in ordered),
    ]


def count_sentence() -> str:
    """What the README says before its table."""
    return f"Of the bugs rebuilt from public issues, {_found()} of {len(BUGS)} are found on a CPU"


def counts_of_bugs() -> list[str]:
    """The README's table: how many there are of each project, and how many of them are found."""
    every = Counter(bug.project for bug in BUGS.values())
    named = sorted((name for name in every if every[name] > _FEW), key=lambda name: (-every[name], name.casefold()))
    columns = {name: [bug for bug in BUGS.values() if bug.project == name] for name in named}
    columns["others"] = [bug for bug in BUGS.values() if bug.project not in named]
    columns["races among them"] = [bug for bug in BUGS.values() if bug.is_race]
    bugs = [len(column) for column in columns.values()]
    found = [sum(bool(bug.finder) for bug in column) for column in columns.values()]
    return [_line("", *columns), "|" + "---|" * (len(columns) + 1), _line("bugs", *bugs), _line("found", *found)]


def _line(name: str, *cells: object) -> str:
    return "| " + " | ".join([name, *map(str, cells)]).strip() + " |"
