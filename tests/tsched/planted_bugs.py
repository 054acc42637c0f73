"""Faults of the kind that schedulers really have, each one small change to the source of one function.

    python -m tests.tsched.planted_bugs     # which schedule catches which, and how

A fault whose text is no longer there raises: it must be planted anew where the code moved to.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.tsched.random_schedules import draw_schedule
from tests.tsched.schedules import serve, server_factory
from tsched.block_pool import BlockPool
from tsched.planner import Planner
from tsched.scheduler import Scheduler


@dataclass(frozen=True)
class PlantedBug:
    name: str
    owner: type
    function: str
    right: str
    wrong: str


BUGS = (
    PlantedBug("one block too few", BlockPool, "blocks_for", "-(-num_tokens // self.block_size)",
               "-(-(num_tokens - 1) // self.block_size)"),
    PlantedBug("the oldest gives way", Planner, "_advance_running", "self._preempt(int(rows[-1]))",
               "self._preempt(int(rows[0]))"),
    PlantedBug("a stale epoch is not noticed", Scheduler, "commit",
               "live = table.epoch[rows] == plan.sampled_epochs", "live = table.epoch[rows] >= 0"),
    PlantedBug("an abort leaks the blocks", Scheduler, "_finish_row",
               "self._cache.release(sequence, blocks, num_committed)",
               "reason == 'abort' or self._cache.release(sequence, blocks, num_committed)"),
)  # fmt: skip


@contextmanager
def planted(bug: PlantedBug) -> Iterator[None]:
    """The program with the fault, for as long as the context lasts."""
    original: Any = inspect.getattr_static(bug.owner, bug.function)
    source = textwrap.dedent(inspect.getsource(original))
    if source.count(bug.right) != 1:
        raise LookupError(f"{bug.name}: {bug.owner.__name__}.{bug.function} has {bug.right!r} not exactly once")
    faulty: dict[str, Any] = {}
    module = sys.modules[bug.owner.__module__]
    exec(compile(source.replace(bug.right, bug.wrong), f"<{bug.name}>", "exec"), vars(module), faulty)
    setattr(bug.owner, bug.function, faulty[bug.function])
    try:
        yield
    finally:
        setattr(bug.owner, bug.function, original)


def first_failure(num_schedules: int) -> tuple[int, BaseException] | None:
    """The first seed whose schedule notices that something is wrong, and how; None where none of them does."""
    make_server = server_factory("hash")
    for seed in range(num_schedules):
        try:
            serve(draw_schedule(seed), make_server)
        except (AssertionError, RuntimeError) as error:
            return seed, error
    return None


def main() -> None:
    for bug in BUGS:
        with planted(bug):
            found = first_failure(200)
        verdict = "survives" if found is None else f"seed {found[0]}: {_where(found[1])}"
        print(f"{bug.name:40} {verdict}", flush=True)


def _where(error: BaseException) -> str:
    """The error's first line, or the check that failed where it has none."""
    said = str(error).splitlines() or [str(traceback.extract_tb(error.__traceback__)[-1].line)]
    return said[0][:90]


if __name__ == "__main__":
    main()
