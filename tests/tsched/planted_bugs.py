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
from types import ModuleType
from typing import Any

from tests.tsched.random_schedules import Schedule, draw_schedule, stream_of_urgent_requests
from tests.tsched.schedules import serve, server_factory
from tkernels.ops.cascade_decode import composed
from tsched.execution.batch_builder import BatchBuilder
from tsched.scheduling import shared_prefixes
from tsched.scheduling.admission import Admission
from tsched.scheduling.block_pool import BlockPool
from tsched.scheduling.departures import Departures
from tsched.scheduling.kv_memory import KVMemory
from tsched.scheduling.planner import Planner
from tsched.scheduling.policies.hash_prefix_cache import HashPrefixCache
from tsched.scheduling.policies.priority import Priority
from tsched.scheduling.policies.run_cache import RunCache
from tsched.scheduling.policies.run_queue import RunQueue
from tsched.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class PlantedBug:
    name: str
    owner: type | ModuleType
    function: str
    right: str
    wrong: str


BUGS = (
    PlantedBug("one block too few", BlockPool, "blocks_for",
               "-(-num_tokens // self.block_size)", "-(-(num_tokens - 1) // self.block_size)"),
    PlantedBug("the first in the order gives way", Planner, "_make_room",
               "self._preempt(int(rows[-1]))", "self._preempt(int(rows[0]))"),
    PlantedBug("a stale epoch is not noticed", Scheduler, "commit",
               "live = table.epoch[rows] == plan.sampled_epochs", "live = table.epoch[rows] >= 0"),
    PlantedBug("an abort of a running sequence leaks its blocks", Departures, "end_rows",
               "self._memory.release_each(rows, left)",
               "'abort' in reasons.values() or self._memory.release_each(rows, left)"),
    PlantedBug("an abort of a waiting sequence leaks its blocks", Departures, "end",
               "self._memory.drop(sequence)", "pass"),
    PlantedBug("prompt blocks are matchable before they are computed", Admission, "_place",
               "begin += missing",
               "begin += missing; self._memory.cache.insert(sequence, np.concatenate((held, blocks)), "
               "sequence.tokens.size)"),
    PlantedBug("a fork writes to a block that others read", KVMemory, "enter",
               "copies = num_computed % self.pool.block_size != 0 and", "copies = 0 and"),
    PlantedBug("a hit covers the last token too", RunCache, "match",
               "count = (sequence.tokens.size - 1) //", "count = sequence.tokens.size //"),
    PlantedBug("host blocks that were read back are never free", Scheduler, "commit",
               "self._memory.free_restored(under_way.copies)", "pass"),
    PlantedBug("swapped sequences miss their last block", KVMemory, "swap_out",
               "swap_outs.append(np.stack((blocks[:count], sequence.host_blocks)))",
               "swap_outs.append(np.stack((blocks[: count - 1], sequence.host_blocks[:-1])))"),
    PlantedBug("equal content: the wrong one of two blocks is released", RunCache, "insert",
               "pool.release(blocks[start : start + known.size])", "pool.release(known)"),
    PlantedBug("blocks change in the table, and the plan does not say so", Planner, "note_inserted",
               "self._rewritten += rewritten", "pass"),
    PlantedBug("a hit takes no reference", RunCache, "match",
               "self._pool.share(blocks)", "self._pool._refs[blocks] = 1"),
    PlantedBug("a block in use is evicted", RunQueue, "_evict",
               "end = end[: is_used.argmax()]", "pass"),
    PlantedBug("all tenants share one cache", HashPrefixCache, "_root", "blake2b(salt,", "blake2b(b'',"),
    PlantedBug("ageing is ignored", Priority, "key", "sequence.priority * AGEING", "sequence.priority * 2**31"),
)  # fmt: skip

SHARING_BUGS = (
    PlantedBug("the prefix is read from the wrong pages", composed, "composed",
               "block_tables.index_select(0, firsts)", "block_tables.index_select(0, firsts).roll(1, 1)"),
    PlantedBug("what a row has alone is forgotten", composed, "composed",
               "lse_prefix, out, lse, sinks",
               "lse_prefix, out, lse.masked_fill((cached > 0).unsqueeze(1), -torch.inf), sinks"),
    PlantedBug("parts are merged without their weights", composed, "composed",
               "merged = merge_states(out_prefix, lse_prefix,",
               "lse = lse.where((cached == 0).unsqueeze(1), lse_prefix)\n    merged = merge_states("
               "out_prefix, lse_prefix.clone(),"),
    PlantedBug("groups stay as they were when a row leaves", BatchBuilder, "_order_rows",
               "if self._find_groups is not None:", "if self._find_groups is not None and before.size <= num:"),
    PlantedBug("a group shares a block that differs", shared_prefixes, "_sort_rows",
               "differ.argmax(axis=1)", "differ.argmax(axis=1) + 1"),
)  # fmt: skip
"""Of decodes that read what they share together: model "shared"."""


@contextmanager
def planted(bug: PlantedBug) -> Iterator[None]:
    """The program with the fault, for as long as the context lasts."""
    original: Any = inspect.getattr_static(bug.owner, bug.function)
    source = textwrap.dedent(inspect.getsource(original))
    if source.count(bug.right) != 1:
        raise LookupError(f"{bug.name}: {bug.owner.__name__}.{bug.function} has {bug.right!r} not exactly once")
    faulty: dict[str, Any] = {}
    if isinstance(bug.owner, ModuleType):  # whoever imported the function by its name has the fault too
        exec(compile(source.replace(bug.right, bug.wrong), f"<{bug.name}>", "exec"), vars(bug.owner), faulty)
        right, original.__code__ = original.__code__, faulty[bug.function].__code__
        try:
            yield
        finally:
            original.__code__ = right
        return
    module = sys.modules[bug.owner.__module__]
    exec(compile(source.replace(bug.right, bug.wrong), f"<{bug.name}>", "exec"), vars(module), faulty)
    setattr(bug.owner, bug.function, faulty[bug.function])
    try:
        yield
    finally:
        setattr(bug.owner, bug.function, original)


def small_size(num_schedules: int) -> Iterator[Schedule]:
    yield from map(draw_schedule, range(20))
    yield stream_of_urgent_requests()
    yield from map(draw_schedule, range(20, num_schedules))


def first_failure(num_schedules: int, model: str = "hash") -> tuple[int, BaseException] | None:
    """The first seed whose schedule notices that something is wrong, and how; None where none of them does."""
    make_server = server_factory(model)
    for schedule in small_size(num_schedules):
        try:
            serve(schedule, make_server)
        except (AssertionError, LookupError, RuntimeError, ValueError) as error:
            return schedule.seed, error
    return None


def main() -> None:
    for bug, model in (*((bug, "hash") for bug in BUGS), *((bug, "shared") for bug in SHARING_BUGS)):
        with planted(bug):
            found = first_failure(200, model)
        verdict = "survives" if found is None else f"seed {found[0]}: {_where(found[1])}"
        print(f"{bug.name:60} {verdict}", flush=True)


def _where(error: BaseException) -> str:
    """The error's first line, or the check that failed where it has none."""
    said = str(error).splitlines() or [str(traceback.extract_tb(error.__traceback__)[-1].line)]
    return said[0][:90]


if __name__ == "__main__":
    main()
