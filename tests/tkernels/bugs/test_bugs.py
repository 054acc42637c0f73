"""Bugs that happened in public projects are found by the doors of a user, and their correct twins pass all of them."""

import re
from pathlib import Path

import pytest

from tests.tkernels.bugs.bug import FINDERS, correct_variants, first_fault
from tests.tkernels.bugs.catalogue import BUGS

LATE = ("vllm_18100", "vllm_23424")
"""Found, but only by the draw that has so many query heads for each KV head: five CPU seconds each."""

FOUND = [name for name, bug in BUGS.items() if bug.finder]
TWINS = sorted({bug.base for bug in BUGS.values()})


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LATE)) for n in FOUND])
def test_a_bug_that_happened_is_found(name: str, tmp_path: Path) -> None:
    bug = BUGS[name]
    assert first_fault(bug.variant(tmp_path), (bug.finder,)).finder == bug.finder, f"{bug.happened} {bug.link}"


def test_nearly_all_are_found_and_each_is_an_issue_of_its_own() -> None:
    links = [bug.link for bug in BUGS.values()]
    assert len(set(links)) == len(links)
    assert all(re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+/(issues|pull)/\d+", link) for link in links)
    assert len(FOUND) >= 0.95 * len(BUGS)


def test_the_pages_tell_of_every_bug_and_of_what_escapes() -> None:
    root = Path(__file__).parents[3]
    page = (root / "docs" / "how-we-know.md").read_text(encoding="utf-8")
    rows = {bug.name: f"]({bug.link}) | {bug.happened} | {bug.finder or 'not found'} |" for bug in BUGS.values()}
    assert [name for name, row in rows.items() if row not in page] == []
    races = sum(bug.is_race for bug in BUGS.values())
    assert f"Of {len(BUGS)} bugs, {races} of them races, {len(FOUND)} are found" in page
    assert f"{len(FOUND)} of {len(BUGS)} are found" in (root / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("base", sorted({bug.base for bug in BUGS.values() if bug.is_race}))
def test_programs_of_a_twin_without_the_race_do_not_race(base: str) -> None:
    op, name = base.split("/")
    assert first_fault(correct_variants()[op].variants[name], ("race",)).message == ""


@pytest.mark.slow
@pytest.mark.parametrize("finder", FINDERS)
@pytest.mark.parametrize("base", TWINS)
def test_a_twin_without_the_bug_passes_every_finder(base: str, finder: str) -> None:
    op, name = base.split("/")
    assert first_fault(correct_variants()[op].variants[name], (finder,)).message == ""
