"""A campaign: mutants of a package, each run against the tests that run its line, in a copy of the tree.

All that is found is kept in a folder, so a campaign that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

from tests.mutants.faults import Mutant, draw_mutants
from tests.mutants.packages import ROOT, Package
from tests.mutants.recording import Recording, is_in_function

MOST_SECONDS = 12.0
"""Of processor time that the tests of a mutant take where it changes nothing."""


@dataclass(frozen=True)
class Fate:
    """What became of a mutant.

    outcome  "killed", "survived" or "not run", where no test runs its line
    by       the test that failed, or how its process ended
    """

    outcome: str
    by: str = ""


class Workbench:
    """A copy of the tree in `folder`, and a server in it that runs tests."""

    def __init__(self, package: Package, folder: Path) -> None:
        self._package = package
        self._tree = folder / "tree"
        self._server: subprocess.Popen[str] | None = None
        self._trusted = set[str]()  # tests that were seen to pass in modules that the server had imported

    def __enter__(self) -> Self:
        shutil.rmtree(self._tree, ignore_errors=True)
        tracked = subprocess.run(
            ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for name in filter(None, tracked.split("\0")):
            if (ROOT / name).is_file():
                (self._tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self._tree / name)
        self._server = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(self._tree)!r}); import runpy; sys.argv[1:] = "
             f"[{self._package.name!r}]; runpy.run_module('tests.mutants.server', run_name='__main__')"],
            cwd=self._tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(self._tree),
        )  # fmt: skip
        return self

    def __exit__(self, *error: object) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        shutil.rmtree(self._tree, ignore_errors=True)

    def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        """The server's answer to `task`."""
        if self._server is None or self._server.stdin is None or self._server.stdout is None:
            raise RuntimeError("the workbench is not entered")
        print(json.dumps(task), file=self._server.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer

    def record(self, into: Path) -> Recording:
        """What the package's tests run, each file of tests once; what `into` has of it is not run again, unless that
        file or the package is another one now.
        """
        into.mkdir(parents=True, exist_ok=True)
        recording, sources = Recording(), self._package.read()
        for file in self._test_files():
            kept = into / f"{file.replace('/', '.')}-{_digest(sources, (ROOT / file).read_text())}.json"
            if not kept.exists():
                answer = self.ask({"record": [file]})
                if "seconds" not in answer:
                    raise RuntimeError(f"{file} could not be recorded: {answer}")
                kept.write_text(json.dumps(answer))
            recording.add(json.loads(kept.read_text()))
        return recording

    def _test_files(self) -> Iterator[str]:
        for tests in self._package.tests:
            path = ROOT / tests
            for file in [path] if path.is_file() else sorted(path.rglob("test_*.py")):
                yield file.relative_to(ROOT).as_posix()

    def run(self, mutant: Mutant, recording: Recording) -> Fate:
        """Runs the tests of a mutant's line. A function gets its new code in the modules that the server has imported;
        for what an import or another process runs the copy's file is another, and everything is imported anew.
        """
        original = (ROOT / mutant.file).read_text()
        tests = recording.find_narrow(mutant.file, mutant.line, original, MOST_SECONDS)
        if not tests:
            return Fate("not run")
        task = {"tests": tests, "seconds": 3 * sum(recording.seconds[test] for test in tests) + 30}
        if is_in_function(original, mutant.line) and recording.is_run(mutant.file, mutant.line, original):
            answer = self.ask(task | {"file": mutant.file, "source": mutant.source})
            if answer["outcome"] == "survived" or self._passes_else(answer["by"], tests):
                return Fate(answer["outcome"], answer["by"])
        try:
            self._write(mutant.file, mutant.source)
            answer = self.ask(task | {"floor": mutant.file.partition("/")[0]})
        finally:
            self._write(mutant.file, original)
        return Fate(answer["outcome"], answer["by"])

    def _passes_else(self, killer: str, tests: list[str]) -> bool:
        """Whether `killer`, the first of `tests` to fail, passes without a mutant in imported modules."""
        if killer not in tests:
            return False
        self._trusted.update(tests[: tests.index(killer)])
        if killer not in self._trusted and self.ask({"tests": [killer], "seconds": 300})["outcome"] == "survived":
            self._trusted.add(killer)
        return killer in self._trusted

    def _write(self, name: str, source: str) -> None:
        """The module's source, and no byte code of another that has its size and second."""
        file = self._tree / name
        file.write_text(source)
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
            compiled.unlink()


def _environment(tree: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


class Kept:
    """The mutants of a package and their fates, in one file for each, as lines of JSON."""

    def __init__(self, package: Package, folder: Path, count: int, seed: int) -> None:
        drawn = _digest(str(count), str(seed), package.read())
        self._drawn = folder / f"{package.name}-{drawn}.mutants"
        self._fates = folder / f"{package.name}.fates"
        folder.mkdir(parents=True, exist_ok=True)
        if not self._drawn.exists():
            lines = [json.dumps(asdict(one)) for one in draw_mutants(package.files(), count, seed)]
            self._drawn.write_text("\n".join(lines))
        self.mutants = [Mutant(**json.loads(line)) for line in self._drawn.read_text().splitlines()]
        self.fates: dict[str, Fate] = {}
        if self._fates.exists():
            for line in self._fates.read_text().splitlines():
                told = json.loads(line)
                key = told.pop("key")
                self.fates[key] = Fate(**told)

    def fate(self, mutant: Mutant) -> Fate | None:
        return self.fates.get(self._key(mutant))

    def add(self, mutant: Mutant, fate: Fate) -> None:
        self.fates[self._key(mutant)] = fate
        with self._fates.open("a") as file:
            _append(file, {"key": self._key(mutant)} | asdict(fate))

    @staticmethod
    def _key(mutant: Mutant) -> str:
        return _digest(mutant.file, mutant.source)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _append(file: IO[str], line: dict[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()
