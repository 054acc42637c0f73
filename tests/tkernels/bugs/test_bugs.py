"""Bugs that happened in public projects are found by the doors of a user, and their correct twins pass.

That nothing finds a bug before what its record names, the command says: `python -m tests.tkernels.bugs.table`.
"""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tkernels.bugs import table
from tests.tkernels.bugs.bug import NOT_FOUND, correct_variants, first_fault
from tests.tkernels.bugs.catalogue import BUGS, count_sentence, counts_of_bugs, found_sentence, list_of_bugs

LATE = ("vllm_18100", "vllm_23424")
"""Found, but only by the draw that has so many query heads for each KV head: five CPU seconds each."""

FOUND = [name for name, bug in BUGS.items() if bug.finder]
TWINS = sorted({(bug.base, bug.finder) for bug in BUGS.values() if bug.finder})
"""What is told from a bug, and by whom."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LATE)) for n in FOUND])
def test_a_bug_that_happened_is_found(name: str, tmp_path: Path) -> None:
    bug = BUGS[name]
    assert first_fault(bug.variant(tmp_path), (bug.finder,)).finder == bug.finder, f"{bug.happened} {bug.link}"


def test_nearly_all_are_found_and_each_is_an_issue_of_its_own() -> None:
    links = [bug.link for bug in BUGS.values()]
    assert len(set(links)) == len(links)
    assert all(re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+/(issues|pull)/\d+", link) for link in links)
    assert len(FOUND) >= 0.95 * len(BUGS)


@pytest.mark.parametrize(
    ("page", "sentence", "table"),
    [
        ("docs/how-we-know.md", found_sentence(), list_of_bugs()),
        ("README.md", count_sentence(), counts_of_bugs()),
    ],
    ids=["how-we-know", "README"],
)
def test_the_pages_tables_are_what_the_records_say(page: str, sentence: str, table: list[str]) -> None:
    text = (Path(__file__).parents[3] / page).read_text(encoding="utf-8")
    assert text.count(sentence) == 1, sentence
    after = text.split(sentence)[1].splitlines()
    begin = next(number for number, line in enumerate(after) if line.startswith("|"))
    end = next(number for number, line in enumerate(after) if number > begin and not line.startswith("|"))
    assert after[begin:end] == table


@pytest.mark.parametrize("recorded", ["check", "wide", ""])
def test_the_command_says_where_another_finder_is_measured_than_recorded(
    recorded: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bug = BUGS["vllm_42684"]
    monkeypatch.setattr(table, "BUGS", {bug.name: replace(bug, finder=recorded)})
    monkeypatch.setattr(sys, "argv", ["table"])
    status = table.main()
    printed = capsys.readouterr()
    assert re.search(r"^vllm_42684 +strides +swiglu +check +\d", printed.out, flags=re.MULTILINE)
    said = f"vllm_42684: found by check, and its record says {recorded or NOT_FOUND}\n"
    assert (status, printed.err) == ((0, "") if recorded == "check" else (1, said))


@pytest.mark.parametrize("base", sorted({bug.base for bug in BUGS.values() if bug.is_race}))
def test_programs_of_a_twin_without_the_race_do_not_race(base: str) -> None:
    op, name = base.split("/")
    assert first_fault(correct_variants()[op].variants[name], ("race",)).message == ""


@pytest.mark.slow
@pytest.mark.parametrize(("base", "finder"), TWINS)
def test_a_twin_without_the_bug_passes_its_finder(base: str, finder: str) -> None:
    op, name = base.split("/")
    assert first_fault(correct_variants()[op].variants[name], (finder,)).message == ""
