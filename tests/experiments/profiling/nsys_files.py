"""Exports of Nsight Systems as its documentation has them, with what a test puts into them.

Tables and columns are those of the User Guide's SQLite Schema Reference (schema 3.16, Nsight Systems 2024.6), less the
columns that say nothing here.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

_SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, color INTEGER,
    text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, uint64Value INTEGER,
    int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, int32Value INTEGER, floatValue REAL, jsonTextId INTEGER,
    jsonText TEXT, binaryData TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL,
    shortName INTEGER NOT NULL, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL,
    copyKind INTEGER NOT NULL, graphNodeId INTEGER);
CREATE TABLE CUDA_GRAPH_NODE_EVENTS (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
    nameId INTEGER NOT NULL, graphNodeId INTEGER NOT NULL, originalGraphNodeId INTEGER);
"""
PID, TID = 4242, 4243
GLOBAL_PID = 0x1_0000_0000_0000 | PID << 24
GLOBAL_TID = GLOBAL_PID | TID


@dataclass
class NsysFile:
    """An export being written. Times in nanoseconds."""

    path: Path
    domain: str = "tkernels"
    strings: dict[str, int] = field(default_factory=dict)
    next_correlation: int = 100
    next_node: int = 10

    def __post_init__(self) -> None:
        self.db = sqlite3.connect(self.path)
        self.db.executescript(_SCHEMA)
        self._nvtx(0, None, 75, text=self.domain, domain=1)
        self._nvtx(0, None, 75, text="CCCL", domain=2)

    def range(self, name: str, start: int, end: int, *, domain: int = 1, tid: int = GLOBAL_TID) -> None:
        """A push-pop range of a registered string, as our names are."""
        self._nvtx(start, end, 59, text_id=self._string(name), domain=domain, tid=tid)

    def kernel(self, called: int, start: int, end: int, *, tid: int = GLOBAL_TID) -> None:
        """A kernel and the API call that launched it."""
        self._work(self.call("cudaLaunchKernel_v7000", called, tid), start, end, None)

    def copy(self, called: int, start: int, end: int) -> None:
        row = (start, end, 0, 1, 7, self.call("cudaMemcpyAsync_v3020", called), GLOBAL_PID, 64, 2, None)
        self.db.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES ({','.join('?' * 10)})", row)

    def captured(self, at: int, instantiated: int) -> int:
        """A node that was captured at a moment, and its clone in the graph that runs, whose id is returned."""
        original, clone = self.next_node, self.next_node + 1
        self.next_node += 2
        for moment, node, parent in ((at, original, None), (instantiated, clone, original)):
            row = (moment, moment, 0, GLOBAL_TID, self._string("Graph Node Creation"), node, parent)
            self.db.execute("INSERT INTO CUDA_GRAPH_NODE_EVENTS VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        return clone

    def replay(self, called: int, nodes: list[tuple[int, int, int]]) -> None:
        """A graph's launch: (node, start, end) of each kernel."""
        correlation = self.call("cudaGraphLaunch_v10000", called)
        for node, start, end in nodes:
            self._work(correlation, start, end, node)

    def call(self, name: str, at: int, tid: int = GLOBAL_TID) -> int:
        self.next_correlation += 1
        row = (at, at + 5, 0, tid, self.next_correlation, self._string(name), 0, None)
        self.db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        return self.next_correlation

    def drop(self, table: str) -> None:
        """Nsight Systems makes a table where there is something to put into it."""
        self.db.execute(f"DROP TABLE {table}")

    def close(self) -> Path:
        self.db.commit()
        self.db.close()
        return self.path

    def _work(self, correlation: int, start: int, end: int, node: int | None) -> None:
        name = self._string("some_kernel")
        row = (start, end, 0, 1, 7, correlation, GLOBAL_PID, name, name, node)
        self.db.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({','.join('?' * 10)})", row)

    def _nvtx(
        self, start: int, end: int | None, kind: int, *, domain: int, text: str | None = None,
        text_id: int | None = None, tid: int = GLOBAL_TID,
    ) -> None:  # fmt: skip
        row = (start, end, kind, text, tid, text_id, domain)
        self.db.execute(
            "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, textId, domainId) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            row,
        )

    def _string(self, value: str) -> int:
        if value not in self.strings:
            self.strings[value] = len(self.strings) + 1
            self.db.execute("INSERT INTO StringIds VALUES (?, ?)", (self.strings[value], value))
        return self.strings[value]


def two_steps(path: Path) -> Path:
    """A round that records a graph, then two steady steps: one launches its kernels, one replays the graph.

    us, in the steady steps: step 1 of 100 has 10 of paged_prefill in layer 0 and 4 of lm_head's matmul; step 2 of 50
    replays 7 of paged_decode in layer 0 and 3 in layer 1, and copies for 2 as it prepares.
    """
    us = 1000
    file = NsysFile(path)
    file.range("step", 0, 90 * us)
    file.range("forward", 10 * us, 80 * us)
    file.range("record graph", 20 * us, 70 * us)
    file.range("layer 0", 21 * us, 30 * us)
    file.range("paged_decode.one_pass", 22 * us, 25 * us)
    file.kernel(23 * us, 23 * us, 73 * us)  # a warm-up
    file.range("layer 0", 40 * us, 50 * us)
    file.range("paged_decode.one_pass", 42 * us, 45 * us)
    file.range("layer 1", 50 * us, 60 * us)
    file.range("paged_decode.one_pass", 52 * us, 55 * us)
    nodes = [file.captured(43 * us, 65 * us), file.captured(53 * us, 65 * us)]
    file.replay(75 * us, [(nodes[0], 75 * us, 79 * us), (nodes[1], 79 * us, 80 * us)])

    file.range("steady", 100 * us, 300 * us)
    file.range("step", 100 * us, 200 * us)
    file.range("schedule", 101 * us, 106 * us)
    file.range("forward", 110 * us, 190 * us)
    file.range("layer 0", 120 * us, 140 * us)
    file.range("paged_prefill.packed_gqa", 121 * us, 131 * us)
    file.kernel(122 * us, 150 * us, 160 * us)
    file.range("lm_head", 150 * us, 160 * us)
    file.range("matmul.persistent", 151 * us, 159 * us)
    file.kernel(152 * us, 170 * us, 174 * us)
    file.range("cub reduce", 153 * us, 154 * us, domain=2)
    file.range("step", 200 * us, 250 * us)
    file.range("prepare", 201 * us, 205 * us)
    file.copy(202 * us, 202 * us, 204 * us)
    file.range("forward", 210 * us, 240 * us)
    file.replay(220 * us, [(nodes[0], 221 * us, 228 * us), (nodes[1], 228 * us, 231 * us)])
    file.kernel(400 * us, 400 * us, 500 * us, tid=GLOBAL_TID + 1)  # another thread's
    return file.close()
