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
from collections.abc import Hashable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from experiments.document import ExperimentError
from experiments.profiling.range_table import category_of
from experiments.profiling.tools import STEADY
from tkernels.errors import TKernelsError
from tkernels.ranges import DOMAIN, RECORD_GRAPH
from tkernels.spans import DEVICE_IDLE, Breakdown, RangeTotal, Span, Track, breakdown

_PUSH_POP, _DOMAIN_CREATE = 59, 75  # ENUM_NSYS_EVENT_TYPE
_ACTIVITIES = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
_RUNTIME, _NODES = "CUPTI_ACTIVITY_KIND_RUNTIME", "CUDA_GRAPH_NODE_EVENTS"

Calls = list[tuple[str, Hashable]]
"""Ranges, the innermost first, each with what tells one call of it from the others."""


def read_export(file: Path) -> Breakdown:
    """What the steps inside STEADY took, or all steps where nothing is called that.

    Raises ExperimentError where the file is no export of Nsight Systems, or has none of our ranges.
    """
    if not file.is_file():
        raise ExperimentError([f"--nsys-export {file}: no such file"])
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as db:
            return _Export(db).breakdown()
    except sqlite3.DatabaseError as error:
        raise ExperimentError([f"--nsys-export {file}: is no export of Nsight Systems: {error}"]) from None
    except _ExportError as error:
        raise ExperimentError([f"--nsys-export {file}: {error}"]) from None


class _ExportError(TKernelsError, ValueError):
    """What the file lacks."""


class _Event(NamedTuple):
    """An NVTX event at a known moment of a known thread. domain: its process, and its number there."""

    start: int
    end: int
    name: str
    thread: int
    domain: tuple[int, int | None]


class _Thread:
    """The ranges of one thread, each with the one around it, in the order of beginning."""

    def __init__(self, events: list[_Event]) -> None:
        self.events = sorted(events, key=lambda event: (event.start, -event.end))
        self.starts = [event.start for event in self.events]
        self.parents: list[int] = []
        open_ranges: list[int] = []
        for index, event in enumerate(self.events):
            while open_ranges and self.events[open_ranges[-1]].end <= event.start:
                open_ranges.pop()
            self.parents.append(open_ranges[-1] if open_ranges else -1)
            open_ranges.append(index)

    def calls_at(self, moment: int) -> Calls:
        """Of the ranges at a moment."""
        index = bisect_right(self.starts, moment) - 1
        while index >= 0 and self.events[index].end < moment:
            index = self.parents[index]
        return self.calls_around(index)

    def calls_around(self, index: int) -> Calls:
        """Of a range and those around it; -1 is none."""
        calls: Calls = []
        while index >= 0:
            calls.append((self.events[index].name, (self.events[index].thread, index)))
            index = self.parents[index]
        return calls


class _Export:
    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db
        self.tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        for table, lack in (("NVTX_EVENTS", "has no NVTX ranges"), ("StringIds", "is no export of Nsight Systems")):
            if table not in self.tables:
                raise _ExportError(f"{lack}: there is no table {table}")
        self.threads = self._threads()
        self.has_steady = any(event.name == STEADY for thread in self.threads.values() for event in thread.events)

    def _events(self, kind: int, *known: str) -> list[_Event]:
        """All events of a type that have a name, and integers in the columns `known`."""
        rows = self.db.execute(
            f"SELECT e.textId, e.start, e.end, COALESCE(e.text, s.value), e.globalTid, {_process_of('e.globalTid')}, "
            "e.domainId FROM NVTX_EVENTS e LEFT JOIN StringIds s ON s.id = e.textId "
            f"WHERE e.eventType = {kind} AND {_are_integers('e.globalTid', *known)}"
        ).fetchall()
        unnamed = sum(not isinstance(name, str) for registered, _, _, name, *_ in rows if registered is not None)
        if unnamed:
            raise _ExportError(f"the names of {unnamed} of {len(rows)} ranges are missing in its table StringIds")
        return [
            _Event(start, end, name, tid, (process, number))
            for _, start, end, name, tid, process, number in rows
            if isinstance(name, str)
        ]

    def _threads(self) -> dict[int, _Thread]:
        """globalTid -> our ranges there."""
        domains = {event.domain: event.name for event in self._events(_DOMAIN_CREATE)}
        inside: dict[tuple[int, int | None], set[str]] = defaultdict(set)
        by_thread: dict[int, list[_Event]] = defaultdict(list)
        ranges = self._events(_PUSH_POP, "e.start", "e.end")
        for event in ranges:
            inside[event.domain].add(event.name)
        for event in ranges:
            # One that was made before the collection began has no name: it is ours where it has what a step has.
            default = DOMAIN if {"step", "forward"} <= inside[event.domain] else ""
            if domains.get(event.domain, default) == DOMAIN:
                by_thread[event.thread].append(event)
        if not by_thread:
            there_is = ", ".join(sorted(set(domains.values()))) or "none"
            there_is += ", of which no range has its thread and its times" if DOMAIN in domains.values() else ""
            raise _ExportError(f"has no ranges in the domain {DOMAIN!r}; its domains: {there_is}")
        return {tid: _Thread(events) for tid, events in by_thread.items()}

    def breakdown(self) -> Breakdown:
        host = breakdown(self._host_spans())
        device = self._device_totals(host.steps, host.step_ns)
        return Breakdown(host.steps, host.step_ns, (*host.totals, *device))

    def _is_asked_about(self, outer: Calls) -> bool:
        """Whether what lies in these ranges belongs to the steps that a profile is about."""
        return not self.has_steady or any(name == STEADY for name, _ in outer)

    def _host_spans(self) -> list[Span]:
        spans: list[Span] = []
        for tid, thread in self.threads.items():
            track, at = Track("host", tid & 0xFFFFFF, ""), {-1: -1}
            for index, event in enumerate(thread.events):
                parent = thread.parents[index]
                if self._is_asked_about(thread.calls_around(parent)):
                    at[index] = len(spans)
                    category = category_of(event.name)
                    spans.append(Span(event.name, category, track, event.start, event.end, at.get(parent, -1)))
        return spans

    def _device_totals(self, steps: int, step_ns: int) -> list[RangeTotal]:
        calls: dict[str, set[Hashable]] = defaultdict(set)
        totals: dict[str, int] = defaultdict(int)
        own: dict[str, int] = defaultdict(int)
        for ns, path in self._work():
            own[path[0][0]] += ns
            for name in {name for name, _ in path}:
                totals[name] += ns
            for name, call in path:
                calls[name].add(call)
        found = [
            RangeTotal(name, category_of(name), "device", len(calls[name]), totals[name], own[name])
            for name in calls
            if name != "step"
        ]
        if busy_ns := sum(own.values()):
            idle = max(0, step_ns - busy_ns)
            found.append(RangeTotal(DEVICE_IDLE, "gap", "device", steps, idle, idle))
        return found

    def _work(self) -> Iterator[tuple[int, Calls]]:
        """What the device did in the steps that are asked about: nanoseconds, and the ranges that it is in."""
        captured = self._captured()
        for ns, called, tid, correlation, *node in self._activities():
            if tid not in self.threads:
                continue
            outer = self.threads[tid].calls_at(called)
            if not self._is_asked_about(outer) or any(name == RECORD_GRAPH for name, _ in outer):
                continue
            path: Calls = [(name, (correlation, call)) for name, call in captured.get(tuple(node), [])]
            path += [(name, call) for name, call in outer if name != STEADY]
            if path:
                yield ns, path

    def _activities(self) -> Iterator[tuple[int, ...]]:
        """Nanoseconds on the device; when, on which thread and as which call the API was called for it; its process and
        the node that it was of a graph there, if any. One that had not ended when the collection did is left out.
        """
        for table in _ACTIVITIES if _RUNTIME in self.tables else ():
            if table in self.tables:
                columns = {row[1] for row in self.db.execute(f"PRAGMA table_info({table})")}
                node = "a.graphNodeId" if "graphNodeId" in columns else "NULL"  # of --cuda-graph-trace=node alone
                process = _process_of("r.globalTid")
                yield from self.db.execute(
                    f"SELECT a.end - a.start, r.start, r.globalTid, r.correlationId, {process}, {node} FROM {table} a "
                    f"JOIN {_RUNTIME} r "
                    f"ON r.correlationId = a.correlationId AND {process} = {_process_of('a.globalPid')} "
                    f"WHERE {_are_integers('a.start', 'a.end', 'a.globalPid', 'r.start', 'r.globalTid')}"
                )

    def _captured(self) -> dict[tuple[int, ...], Calls]:
        """(process, node) -> the ranges that it was captured in, below RECORD_GRAPH."""
        if _NODES not in self.tables:
            return {}
        rows = self.db.execute(
            f"SELECT {_process_of('globalTid')}, graphNodeId, originalGraphNodeId, start, globalTid FROM {_NODES} "
            f"WHERE {_are_integers('start', 'globalTid', 'graphNodeId')} ORDER BY start DESC"
        )
        made = {(process, node): rest for process, node, *rest in rows}
        found: dict[tuple[int, ...], Calls] = {}
        for key in made:
            first, seen = key, {key}
            while first in made and (original := (key[0], made[first][0])) not in seen and original[1]:
                seen.add(original)
                first = original
            _, start, tid = made.get(first, [None, 0, None])
            outer = self.threads[tid].calls_at(start) if tid in self.threads else []
            names = [name for name, _ in outer]
            found[key] = outer[: names.index(RECORD_GRAPH)] if RECORD_GRAPH in names else []
        return found


def _process_of(column: str) -> str:
    """The process of a serialized globalTid or globalPid."""
    return f"({column} >> 24 & {0xFFFFFF})"


def _are_integers(*columns: str) -> str:
    """SQLite's columns hold whatever is put there, and the exporter NULL where it does not know."""
    return " AND ".join(f"typeof({column}) = 'integer'" for column in columns)
