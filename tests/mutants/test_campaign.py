"""Mutants of Python modules: how they are drawn, planted and run; and some that a test must notice."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from tests.mutants import server
from tests.mutants.campaign import Fate, Kept, Workbench
from tests.mutants.faults import Module, Mutant, draw_mutants
from tests.mutants.noticed import NOTICED
from tests.mutants.packages import PACKAGES, ROOT, Package
from tests.mutants.reasons import read_reasons
from tests.mutants.recording import Recording, is_in_function
from tests.mutants.server import find_functions, plant

SOURCE = '''"""A module."""

from functools import cache

LIMIT = 4


def below(value: int, limit: int = LIMIT) -> bool:
    return value < limit


@cache
def twice(value: int) -> int:
    return value * 2


class Counter:
    step = 1

    @property
    def next(self) -> int:
        add = lambda value: value + self.step
        return add(0)
'''


@pytest.fixture
def module(tmp_path: Path) -> Iterator[ModuleType]:
    """SOURCE, imported."""
    file = tmp_path / "small_module.py"
    file.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("small_module", file)
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules["small_module"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    yield made
    del sys.modules["small_module"]


def test_mutants_are_drawn_by_their_seed_and_are_other_programs(module: ModuleType) -> None:
    file = str(module.__file__)
    drawn = list(draw_mutants([file], 10**6, seed=1))
    assert [one.source for one in drawn] == [one.source for one in draw_mutants([file], 10**6, seed=1)]
    assert [one.source for one in drawn] != [one.source for one in draw_mutants([file], 10**6, seed=2)]
    assert [one.source for one in drawn[:5]] == [one.source for one in draw_mutants([file], 5, seed=1)]
    original = ast.dump(ast.parse(SOURCE))
    assert all(ast.dump(ast.parse(one.source)) != original for one in drawn)
    edits = {(one.line, one.after.strip()) for one in drawn}
    assert {(5, "LIMIT = 5"), (9, "return value <= limit"), (14, "return value / 2"), (18, "step = 2")} <= edits
    assert all(SOURCE.splitlines()[one.line - 1] == one.before.splitlines()[0] for one in drawn)
    assert "+    return value <= limit" in next(one for one in drawn if "<=" in one.after).diff()


def test_a_change_of_a_file_leaves_the_draw_of_its_other_lines(module: ModuleType) -> None:
    file = Path(str(module.__file__))
    before = [one.change for one in draw_mutants([str(file)], 8, seed=1)]
    file.write_text("def added(number):\n    return number + 7\n\n\n" + SOURCE)
    after = [one.change for one in draw_mutants([str(file)], 8, seed=1)]
    kept = [one for one in after if "number" not in one]
    assert before[: len(kept)] == kept
    assert len(kept) >= 5


def test_a_planted_function_has_its_new_code_wherever_it_is_known(module: ModuleType) -> None:
    below, twice, counter = module.below, module.twice, module.Counter()
    functions, file = find_functions(), str(module.__file__)
    plant(functions, file, SOURCE.replace("value < limit", "value > limit"))
    assert (below(3), module.below(5)) == (False, True)
    plant(functions, file, SOURCE.replace("value * 2", "value * 3").replace("value + self.step", "value - self.step"))
    assert (below(3), twice(5), counter.next) == (True, 15, -1)
    with pytest.raises(LookupError, match="no function of other.py is imported"):
        plant(functions, "other.py", SOURCE)


def test_a_mutant_that_waits_for_ever_is_killed_and_one_that_works_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_STILL_S", 0.3)

    def work() -> dict[str, str]:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            pass
        return {"outcome": "survived"}

    def wait() -> dict[str, str]:
        threading.Event().wait()
        return {"outcome": "survived"}

    assert server.in_child(work, 100) == {"outcome": "survived"}
    assert server.in_child(wait, 100) == {"outcome": "killed", "by": "process: None"}


def test_only_lines_of_a_body_are_a_functions_own() -> None:
    assert [line for line in range(1, 24) if is_in_function(SOURCE, line)] == [9, 14, 22, 23]


def test_the_fastest_tests_of_a_statement_are_narrow() -> None:
    source = (
        "def f(\n    a,\n    b=1,\n):\n    x = (\n        a +\n        b\n    )\n    if x:\n        return 1\nONE = 1\n"
    )
    slow, fast, other = (f"tests/mutants/__init__.py::{name}" for name in ("slow", "fast", "other"))
    importer = "tests/mutants/campaign.py::importer"
    recording = Recording(seconds={slow: 2.0, fast: 0.5, other: 1.0, importer: 3.0})
    recording.lines["tests/mutants/server.py"] |= {5: [slow], 7: [fast, slow], 9: [slow], 10: [other]}
    narrow = partial(recording.find_narrow, "tests/mutants/server.py", source=source)
    assert narrow(line=6, most_seconds=9) == [fast, slow], "all lines of a statement"
    assert narrow(line=6, most_seconds=1) == [fast]
    assert narrow(line=9, most_seconds=1) == [slow], "one at least; and not those of the branch"
    assert narrow(line=3, most_seconds=9) == [fast, other, slow], "a default is the whole function's"
    assert narrow(line=11, most_seconds=9) == [importer, fast, other, slow], "what an import runs is the module's"
    recording.lines["tests/mutants/server.py"][11] = [slow]
    assert narrow(line=11, most_seconds=9) == [importer, fast, other, slow], "whoever was the first to import it"
    del recording.lines["tests/mutants/server.py"][10]
    assert narrow(line=10, most_seconds=1) == [importer], "and what another process may run"


def test_what_is_known_of_a_mutant_outlives_the_command(tmp_path: Path) -> None:
    package = Package("small", ("tests/mutants/packages.py",), ())
    kept = Kept(package, tmp_path, 3, 0)
    assert len(kept.mutants) == 3
    kept.add(kept.mutants[1], Fate("killed", "a test"))
    again = Kept(package, tmp_path, 3, 0)
    assert again.mutants == kept.mutants
    assert [again.fate(one) for one in again.mutants] == [None, Fate("killed", "a test"), None]
    assert Kept(package, tmp_path, 2, 0).mutants == kept.mutants[:2]


def test_every_package_has_hundreds_of_mutants() -> None:
    for package in PACKAGES.values():
        files = package.files()
        assert len(files) == len(set(files)) > 3
        assert all((ROOT / tests).exists() for tests in package.tests)
    assert sum(len(Module(file)) for file in PACKAGES["report"].files()) > 300


def test_reasons_are_of_what_is_there() -> None:
    for (file, change), reason in read_reasons().items():
        text = " ".join((ROOT / file).read_text().split())
        assert change.partition(" ->")[0] in text, f"{file} has it no more: {change}"
        assert reason.endswith("."), reason


@pytest.mark.slow
def test_mutants_run_against_the_tests_of_their_lines_in_a_copy_of_the_tree(tmp_path: Path) -> None:
    file, tests = "experiments/runs/drift.py", "tests/experiments/runs/test_drift.py"
    source = (ROOT / file).read_text()
    mutants = [
        Mutant(file, source[: source.index(before)].count("\n") + 1, before, after, source.replace(before, after))
        for before, after in (("share**2 * moved", "share**3 * moved"), ("_FAR = 7.0", "_FAR = None"), ("= 7.0", "= 7"))
    ]
    with Workbench(PACKAGES["report"], tmp_path) as bench:
        recording = Recording()
        recording.add(bench.ask({"record": [tests]}))
        fates = [bench.run(one, recording) for one in mutants]
    assert [one.outcome for one in fates] == ["killed", "killed", "survived"]
    assert fates[0].by.startswith(tests)
    assert (ROOT / file).read_text() == source


@pytest.mark.slow
def test_twenty_mutants_are_noticed_by_their_tests() -> None:
    assert len(NOTICED) == len({one.source() for one in NOTICED}) == 20
    told = subprocess.run([sys.executable, "-m", "tests.mutants.noticed"], cwd=ROOT, capture_output=True, text=True)
    assert (told.returncode, told.stdout) == (0, "20 of 20 mutants are noticed\n"), told.stdout + told.stderr[-2000:]
