"""Which tests run which lines, and how long each takes: recorded once for each file of tests by coverage, and kept.

A test is narrow for a line where it runs it. Only tests that pass are kept.
"""

from __future__ import annotations

import ast
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import coverage
import pytest

from tests.mutants.packages import ROOT, Package

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Recording:
    """What the tests of a package were seen to run.

    seconds  of processor time that each test takes, by its name
    lines    source file -> line -> names of the tests that run it
    """

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, list[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))

    def add(self, recorded: Mapping[str, Any]) -> None:
        """Adds what `record` returned for some more tests."""
        self.seconds |= recorded["seconds"]
        for file, by_line in recorded["lines"].items():
            for line, tests in by_line.items():
                self.lines[file][int(line)] += tests

    def is_run(self, file: str, line: int, source: str) -> bool:
        """Whether a test was seen to run the statement at `line` of a `file` with that `source`."""
        return any(self.lines[file][place] for place in _lines_of_statement(source, line))

    def find_narrow(self, file: str, line: int, source: str, most_seconds: float) -> list[str]:
        """The tests that run the statement at `line` of a `file` with that `source`, the fastest first, as many as take
        `most_seconds`. What imports and other processes run is everybody's who imports the module, and then of those
        who run anything of it: that a test was seen to import it says only that it was the first.
        """
        by_line = self.lines[file]
        found = {test for place in _lines_of_statement(source, line) for test in by_line[place]}
        importers = set[str]()
        if not found or not any(isinstance(one, _FUNCTIONS) for one in _statements(source, line)):
            importers = {test for test in self.seconds if _imports(test.partition("::")[0], file)}
            found |= importers | {test for tests in by_line.values() for test in tests}
        chosen, left = [], most_seconds
        for test in sorted(found, key=lambda name: (name not in importers, self.seconds[name], name)):
            left -= self.seconds[test]
            if left < 0 and chosen:
                break
            chosen.append(test)
        return chosen


@cache
def _imports(tests: str, file: str) -> bool:
    """Whether a file of `tests` names the module of `file`."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return re.search(rf"\b{re.escape(module)}\b(?!\.)", (ROOT / tests).read_text()) is not None


class _Recorder:
    """A pytest plugin that names the running test to coverage."""

    def __init__(self, recorded: coverage.Coverage) -> None:
        self._recorded = recorded
        self.seconds: dict[str, float] = {}
        self.failed = set[str]()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> object:
        self._recorded.switch_context(item.nodeid)
        begin = time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.process_time() - begin
            self._recorded.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self.failed.add(report.nodeid)


def record(package: Package, arguments: list[str]) -> dict[str, Any]:
    """Runs pytest with `arguments`, and returns what each test ran of the package, as `Recording.add` takes it."""
    files = [str(ROOT / one) for one in package.files()]
    recorded = coverage.Coverage(data_file=None, include=files, config_file=False)
    recorded.start()
    recorder = _Recorder(recorded)
    pytest.main(arguments, plugins=[recorder])
    recorded.stop()
    data = recorded.get_data()
    passed = {name: seconds for name, seconds in recorder.seconds.items() if name not in recorder.failed}
    lines: dict[str, dict[int, list[str]]] = {}
    for file in package.files():
        by_line = data.contexts_by_lineno(str(ROOT / file))
        kept = {line: [name for name in contexts if name in passed] for line, contexts in by_line.items()}
        lines[file] = {line: names for line, names in kept.items() if names}
    return {"seconds": passed, "lines": lines}


def _statements(source: str, line: int) -> Iterator[ast.stmt]:
    """Those that `line` is in, the outermost first."""
    for node in ast.walk(ast.parse(source)):  # breadth first
        if isinstance(node, ast.stmt) and _first_line(node) <= line <= (node.end_lineno or node.lineno):
            yield node


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)])


def _lines_of_statement(source: str, line: int) -> range:
    """Of the innermost statement at `line`; of a compound one its head, of a function its body."""
    statements = list(_statements(source, line))
    if not statements:
        return range(line, line + 1)
    innermost = statements[-1]
    body = getattr(innermost, "body", None)
    if isinstance(innermost, _FUNCTIONS):
        return range(innermost.body[0].lineno, (innermost.end_lineno or line) + 1)
    if body:
        return range(_first_line(innermost), max(body[0].lineno, innermost.lineno + 1))
    return range(innermost.lineno, (innermost.end_lineno or line) + 1)


def is_in_function(source: str, line: int) -> bool:
    """Whether `line` is in a function's body, which no import runs."""
    return any(isinstance(node, _FUNCTIONS) and line >= node.body[0].lineno for node in _statements(source, line))
