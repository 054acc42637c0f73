"""Reads the SQLite file that Nsight Systems exports, into what each of our ranges took.

Tables and columns are those of the "SQLite Schema Reference" in NVIDIA's Nsight Systems User Guide
(https://docs.nvidia.com/nsight-systems/UserGuide/index.html, exporter schema; times in nanoseconds):
- NVTX_EVENTS: start, end, eventType (59 push-pop range, 75 domain creation), text or textId -> StringIds, domainId,
  globalTid;
- CUPTI_ACTIVITY_KIND_RUNTIME: the API calls, with correlationId and globalTid;
- CUPTI_ACTIVITY_KIND_KERNEL, _MEMCPY, _MEMSET: what the device did, with correlationId and globalPid of the call, and
  graphNodeId where it was a node of a CUDA graph (--cuda-graph-trace=node);
- CUDA_GRAPH_NODE_EVENTS: when and on which thread a node was created; originalGraphNodeId of a clone, which is what an
  instantiated graph runs.
A serialized globalTid holds the process in bits 24 to 47. Tables are there only where something was recorded in them.

Work is in the range that its API call was made in. That of a replayed graph is made by one call for all nodes: there a
node belongs to the ranges in which it was captured, below RECORD_GRAPH, which come below those of the replay.
"""

import sqlite3
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.document import ExperimentError
from experiments.profiling.range_table import category_of
from experiments.profiling.under_nsys import STEADY
from tkernels.ranges import DOMAIN, RECORD_GRAPH
from tkernels.spans import DEVICE_IDLE, Breakdown, RangeTotal, Span, Track, breakdown

_PUSH_POP, _DOMAIN_CREATE = 59, 75  # ENUM_NSYS_EVENT_TYPE
_ACTIVITIES = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
_RUNTIME, _NODES = "CUPTI_ACTIVITY_KIND_RUNTIME", "CUDA_GRAPH_NODE_EVENTS"


def read_export(file: Path) -> Breakdown:
    """What the steps inside STEADY took, or all steps where nothing is called that.

    Raises ExperimentError where the file is no export of Nsight Systems, or has none of our ranges.
    """
    if not file.is_file():
        raise ExperimentError([f"--nsys-export {file}: no such file"])
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as db:
            return _Export(file, db).breakdown()
    except sqlite3.DatabaseError as error:
        raise ExperimentError([f"--nsys-export {file}: is no export of Nsight Systems: {error}"]) from None


@dataclass(frozen=True, slots=True)
class _Activity:
    """What the device did for an API call; `node` where that was a node of a graph."""

    pid: int
    correlation: int
    node: int | None
    ns: int


class _Thread:
    """The ranges of one thread, each with the one around it, in the order of beginning."""

    def __init__(self, events: list[tuple[int, int, str]]) -> None:
        self.events = sorted(events, key=lambda event: (event[0], -event[1]))
        self.starts = [begin for begin, _, _ in self.events]
        self.parents: list[int] = []
        open_ranges: list[int] = []
        for index, (begin, _, _) in enumerate(self.events):
            while open_ranges and self.events[open_ranges[-1]][1] <= begin:
                open_ranges.pop()
            self.parents.append(open_ranges[-1] if open_ranges else -1)
            open_ranges.append(index)

    def at(self, moment: int) -> list[int]:
        """The ranges at a moment, the innermost first."""
        index = bisect_right(self.starts, moment) - 1
        while index >= 0 and self.events[index][1] < moment:
            index = self.parents[index]
        return list(self.around(index))

    def around(self, index: int) -> Iterator[int]:
        """A range and those around it."""
        while index >= 0:
            yield index
            index = self.parents[index]

    def name(self, index: int) -> str:
        return self.events[index][2]


class _Export:
    def __init__(self, file: Path, db: sqlite3.Connection) -> None:
        self.file, self.db = file, db
        self.tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        for table in ("NVTX_EVENTS", "StringIds"):
            if table not in self.tables:
                what = "has no NVTX ranges" if table == "NVTX_EVENTS" else "is no export of Nsight Systems"
                raise ExperimentError([f"--nsys-export {file}: {what}: there is no table {table}"])
        self.threads = self._ranges()
        self.steady = any(name == STEADY for thread in self.threads.values() for _, _, name in thread.events)

    def _ranges(self) -> dict[int, _Thread]:
        """globalTid -> our ranges there."""
        query = (
            "SELECT e.start, e.end, e.eventType, COALESCE(e.text, s.value), e.globalTid, e.domainId, "
            "e.textId IS NOT NULL FROM NVTX_EVENTS e LEFT JOIN StringIds s ON s.id = e.textId"
        )
        # Of a thread that is unknown nothing can be told, nor of a range that was given no name.
        known = [row for row in self.db.execute(query) if _are_ints(row[0], row[4])]
        unnamed = sum(not isinstance(text, str) and bool(given) for _, _, _, text, _, _, given in known)
        if unnamed:
            problem = f"the names of {unnamed} of {len(known)} ranges are missing in its table StringIds"
            raise ExperimentError([f"--nsys-export {self.file}: {problem}"])
        rows = [row[:-1] for row in known if row[3] is not None]
        domains = {(_pid(tid), domain): text for _, _, kind, text, tid, domain in rows if kind == _DOMAIN_CREATE}
        ranges = [row for row in rows if row[2] == _PUSH_POP and _are_ints(row[1])]
        names: dict[tuple[int, Any], set[str]] = defaultdict(set)
        for _, _, _, text, tid, domain in ranges:
            names[_pid(tid), domain].add(str(text))
        # One that was made before the collection began has no name: it is ours where it has what a step has.
        ours = {key for key, inside in names.items() if key not in domains and {"step", "forward"} <= inside}
        ours |= {key for key, name in domains.items() if name == DOMAIN}
        events: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        for start, end, _, text, tid, domain in ranges:
            if (_pid(tid), domain) in ours:
                events[tid].append((start, end, str(text)))
        if not events:
            there_is = ", ".join(sorted(set(map(str, domains.values())))) or "none"
            there_is += ", of which no range has its thread and its times" if DOMAIN in domains.values() else ""
            raise ExperimentError(
                [f"--nsys-export {self.file}: has no ranges in the domain {DOMAIN!r}; its domains: {there_is}"]
            )
        return {tid: _Thread(mine) for tid, mine in events.items()}

    def breakdown(self) -> Breakdown:
        host = breakdown(self._host_spans())
        device = self._device_totals(host.steps, host.step_ns)
        return Breakdown(host.steps, host.step_ns, (*host.totals, *device))

    def _wanted(self, thread: _Thread, around: list[int]) -> bool:
        """Whether ranges, the innermost first, belong to the steps that are asked about."""
        return not self.steady or any(thread.name(index) == STEADY for index in around[1:])

    def _host_spans(self) -> list[Span]:
        spans: list[Span] = []
        for tid, thread in self.threads.items():
            track, at = Track("host", tid & 0xFFFFFF, ""), {}
            for index, (begin, end, name) in enumerate(thread.events):
                if self._wanted(thread, list(thread.around(index))):
                    at[index] = len(spans)
                    parent = at.get(thread.parents[index], -1)
                    spans.append(Span(name, category_of(name), track, begin, end, parent))
        return spans

    def _device_totals(self, steps: int, step_ns: int) -> list[RangeTotal]:
        calls: dict[str, set[Any]] = defaultdict(set)
        totals: dict[str, int] = defaultdict(int)
        own: dict[str, int] = defaultdict(int)
        launches, captured, busy_ns = self._launches(), self._captured(), 0
        for activity in self._activities():
            launch = launches.get((activity.pid, activity.correlation))
            thread = None if launch is None else self.threads.get(launch[1])
            if launch is None or thread is None:
                continue
            around = thread.at(launch[0])
            if not self._wanted(thread, [-1, *around]) or any(thread.name(i) == RECORD_GRAPH for i in around):
                continue
            path: list[tuple[str, Any]] = []  # the innermost first; what tells one call of a range from the others
            if activity.node is not None:
                created = captured.get((activity.pid, activity.node), ())
                path += [(name, (activity.correlation, place)) for place, name in created]
            path += [(thread.name(index), (launch[1], index)) for index in around if thread.name(index) != STEADY]
            if not path:
                continue
            busy_ns += activity.ns
            own[path[0][0]] += activity.ns
            for name in dict.fromkeys(name for name, _ in path):
                totals[name] += activity.ns
            for name, call in path:
                calls[name].add(call)
        found = [
            RangeTotal(name, category_of(name), "device", len(calls[name]), ns, own[name])
            for name, ns in totals.items()
            if name != "step"
        ]
        if busy_ns:
            idle = max(0, step_ns - busy_ns)
            found.append(RangeTotal(DEVICE_IDLE, "gap", "device", steps, idle, idle))
        return found

    def _launches(self) -> Mapping[tuple[int, int], tuple[int, int]]:
        """(process, correlation id) -> when and on which thread the API was called."""
        if _RUNTIME not in self.tables:
            return {}
        rows = self.db.execute(f"SELECT start, globalTid, correlationId FROM {_RUNTIME}")
        return {(_pid(tid), correlation): (start, tid) for start, tid, correlation in rows if _are_ints(start, tid)}

    def _activities(self) -> Iterator[_Activity]:
        for table in _ACTIVITIES:
            if table in self.tables:
                columns = {row[1] for row in self.db.execute(f"PRAGMA table_info({table})")}
                node = "graphNodeId" if "graphNodeId" in columns else "NULL"  # of --cuda-graph-trace=node alone
                rows = self.db.execute(f"SELECT start, end, globalPid, correlationId, {node} FROM {table}")
                for start, end, pid, correlation, graph_node in rows:
                    if not _are_ints(start, end, pid, correlation):  # it had not ended when the collection did
                        continue
                    yield _Activity(_pid(pid), correlation, graph_node or None, end - start)

    def _captured(self) -> dict[tuple[int, int], list[tuple[Any, str]]]:
        """(process, node) -> the ranges that it was captured in, the innermost first, each with what it is told by."""
        if _NODES not in self.tables:
            return {}
        originals: dict[tuple[int, int], tuple[int, int]] = {}
        made: dict[tuple[int, int], tuple[int, int]] = {}
        rows = self.db.execute(
            f"SELECT start, globalTid, graphNodeId, originalGraphNodeId FROM {_NODES} ORDER BY start"
        )
        for start, tid, node, original in rows:
            if not _are_ints(start, tid, node):
                continue
            key = (_pid(tid), node)
            if original and original != node:
                originals.setdefault(key, (key[0], original))
            else:
                made.setdefault(key, (start, tid))
        found = {}
        for node in {*originals, *made}:
            first, seen = node, {node}
            while first in originals and originals[first] not in seen:
                first = originals[first]
                seen.add(first)
            if first in made and made[first][1] in self.threads:
                found[node] = self._capture_path(*made[first])
        return found

    def _capture_path(self, start: int, tid: int) -> list[tuple[Any, str]]:
        """The ranges below RECORD_GRAPH; none where the node was not captured there."""
        thread = self.threads[tid]
        path: list[tuple[Any, str]] = []
        for index in thread.at(start):
            if thread.name(index) == RECORD_GRAPH:
                return path
            path.append(((tid, index), thread.name(index)))
        return []


def _are_ints(*values: object) -> bool:
    """SQLite's columns hold whatever is put there, and the exporter NULL where it does not know."""
    return all(isinstance(value, int) for value in values)


def _pid(serialized: int) -> int:
    """The process of a serialized globalTid or globalPid."""
    return serialized >> 24 & 0xFFFFFF
