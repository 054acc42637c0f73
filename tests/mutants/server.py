"""Runs tests in children of a pytest session that has collected them: a mutant costs little more than its tests.

    python -m tests.mutants.server tsched

runs in a copy of the tree and reads one task a line, a mapping of JSON, and answers each with one:

    record             tests whose lines are recorded
    tests, seconds     tests to run, and the processor time that they may take; and either
        file, source   of a mutant: the code of its functions is put in the place of the imported modules' own
        floor          of a mutant that is in the copy's files: what may have imported it is imported anew
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import IO, Any

import pytest

from tests.mutants.packages import PACKAGES, ROOT, Package
from tests.mutants.recording import record

FLOORS = ("tkernels", "tmodel", "tsched", "experiments", "tests")
"""From the lowest up: what is below a mutant's cannot have imported it."""
QUIET = ["-n", "0", "-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
_PER_SECOND = 8.0  # of processor time that a test may take, so long may pass
_STILL_S = 60.0
_LEAST_SHARE = 0.15
"""A mutant that waits for ever takes no more of a processor than this, for so many seconds: a client that asks again
and again whether a server is ready takes 0.07."""

Answer = dict[str, Any]


class _FirstFailure:
    """A pytest plugin that says which test was the first to fail."""

    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid


def run_tests(tests: list[str]) -> Answer:
    """Whether a test of `tests` fails, which is the first, and what pytest returned."""
    first = _FirstFailure()
    status = int(pytest.main([*QUIET, *tests], plugins=[first]))
    return {"outcome": "survived" if status == 0 else "killed", "by": first.name or f"pytest: status {status}"}


def in_child(work: Callable[[], Answer], seconds: float, least_share: float = _LEAST_SHARE) -> Answer:
    """What `work` answers in a fork, which has so many `seconds` of processor time, and ends where it takes less of a
    processor than its least share for a while.
    """
    with tempfile.TemporaryFile("w+") as answer:
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                os.setsid()
                resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
                silent = os.open(os.devnull, os.O_RDWR)
                for stream in (0, 1, 2):
                    os.dup2(silent, stream)
                json.dump(work(), answer)
                answer.flush()
                status = 0
            os._exit(status)
        status = _wait(child, time.monotonic() + _PER_SECOND * seconds, least_share)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if status is None:
            os.waitpid(child, 0)
        answer.seek(0)
        said = answer.read()
        return json.loads(said) if status == 0 and said else {"outcome": "killed", "by": f"process: {status}"}


def _wait(child: int, deadline: float, least_share: float) -> int | None:
    """How `child` ended; None where it did not before `deadline`, or waits for what never comes."""
    looked, taken = time.monotonic(), 0.0
    while (now := time.monotonic()) < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if now - looked > _STILL_S:
            before, taken = taken, _processor_seconds(child)
            if taken - before < least_share * (now - looked):
                return None
            looked = now
        time.sleep(0.02)
    return None


def _processor_seconds(root: int) -> float:
    """What a process has taken, and those below it that still run."""
    ticks, above = dict[int, int](), dict[int, int]()
    for one in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = one.read_text().rpartition(")")[2].split()
            pid = int(one.parent.name)
            above[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    mine = {root}
    while new := {pid for pid, parent in above.items() if parent in mine} - mine:
        mine |= new
    return sum(ticks.get(pid, 0) for pid in mine) / os.sysconf("SC_CLK_TCK")


def forget_from(floor: str) -> None:
    """The project's modules on `floor` and above it are imported anew."""
    kept = FLOORS[: FLOORS.index(floor)]
    for name in list(sys.modules):
        top = name.partition(".")[0]
        if top in FLOORS and top not in kept and not name.startswith("tests.mutants") and name != "tests":
            del sys.modules[name]


Functions = dict[str, list[FunctionType]]
"""By the path of their source, the functions that there are."""


def find_functions() -> Functions:
    """All functions of this process."""
    found: Functions = {}
    for one in gc.get_objects():
        if type(one) is FunctionType:  # isinstance would ask objects that have something to say about it
            found.setdefault(one.__code__.co_filename, []).append(one)
    return found


def plant(functions: Functions, file: str, source: str) -> None:
    """Gives those `functions` that are of `file` the code that they have in `source`.

    Raises:
        LookupError: There are none.
        ValueError: One refers to other variables around it than before.
    """
    path = str(ROOT / file)
    found = dict[str, list[CodeType]]()
    _collect_code(compile(source, path, "exec", dont_inherit=True), found)
    if path not in functions:
        raise LookupError(f"no function of {file} is imported")
    for function in functions[path]:
        same = found.get(function.__qualname__)
        if same is not None:
            line = function.__code__.co_firstlineno
            function.__code__ = min(same, key=lambda code: abs(code.co_firstlineno - line))


def _collect_code(code: CodeType, into: dict[str, list[CodeType]]) -> None:
    """By qualified name, the functions in `code`, those within others too: some were made at an import."""
    for one in code.co_consts:
        if isinstance(one, CodeType):
            if one.co_flags & inspect.CO_OPTIMIZED:
                into.setdefault(one.co_qualname, []).append(one)
            _collect_code(one, into)


class _Session:
    """A pytest plugin that has tests collected, and then does what it is asked to."""

    def __init__(self, package: Package, tasks: IO[str], answers: IO[str]) -> None:
        self._package = package
        self._tasks = tasks
        self._answers = answers
        self._first = _FirstFailure()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._first.pytest_runtest_logreport(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        functions = find_functions()
        gc.freeze()  # else every fork would copy all objects at its first collection
        for line in self._tasks:
            task = json.loads(line)
            if "record" in task:
                answer = in_child(partial(_record, self._package, task["record"]), 3600, least_share=0.0)
            elif "floor" in task:
                answer = in_child(partial(_run_anew, task["floor"], task["tests"]), task["seconds"])
            else:
                answer = in_child(partial(self._run, task, items, functions), task["seconds"])
            print(json.dumps(answer), file=self._answers, flush=True)
        return True

    def _run(self, task: Answer, items: dict[str, pytest.Item], functions: Functions) -> Answer:
        if "source" in task:
            plant(functions, task["file"], task["source"])
        chosen = [items[name] for name in task["tests"]]
        for item, following in zip(chosen, [*chosen[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._first.name:
                return {"outcome": "killed", "by": self._first.name}
        return {"outcome": "survived", "by": ""}


def main() -> None:
    package = PACKAGES[sys.argv[1]]
    os.chdir(ROOT)
    tasks, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing but answers is said there
    options = ["-n", "0", "-q", "-s", "-p", "no:cacheprovider"]
    pytest.main([*options, *package.tests], plugins=[_Session(package, tasks, answers)])


def _record(package: Package, tests: list[str]) -> Answer:
    forget_from(package.floor)
    return record(package, ["-n", "0", "-q", "-p", "no:cacheprovider", *tests])


def _run_anew(floor: str, tests: list[str]) -> Answer:
    forget_from(floor)
    return run_tests(tests)


if __name__ == "__main__":
    main()
