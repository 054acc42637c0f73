"""A GPU of one stream whose clock a test turns: work is queued, runs when somebody waits, and can be captured.

Events behave as CUDA's: asking one for a time before the device has come to it is an error, so is one that was captured
as a dependency and not as a node of the graph, and a replay records the graph's events again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(eq=False)
class Event:
    gpu: SimulatedGpu
    in_graph: bool
    ms: float | None = None

    def elapsed_time(self, end_event: Event) -> float:
        if self.ms is None or end_event.ms is None:
            raise RuntimeError("the device has not come to it, or it is a dependency in a graph")
        return end_event.ms - self.ms

    def synchronize(self) -> None:
        self.gpu.synchronize()


@dataclass(eq=False)
class SimulatedGpu:
    """`ms` is the device's own clock. stream: the number of its stream."""

    ms: float = 0.0
    stream: int = 7
    graph: list[Callable[[], None]] | None = None  # what is being captured
    queue: list[Callable[[], None]] = field(default_factory=list)

    def launch(self, ms: float) -> None:
        def run() -> None:
            self.ms += ms

        self._push(run)

    def mark(self, *, in_graph: bool) -> Event:
        event = Event(self, in_graph)
        if self.graph is not None and not in_graph:
            return event  # an edge of the graph: it never gets a time

        def record() -> None:
            event.ms = self.ms

        self._push(record)
        return event

    def synchronize(self) -> None:
        if self.graph is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        for run in self.queue:
            run()
        self.queue.clear()

    @contextmanager
    def capturing(self) -> Iterator[list[Callable[[], None]]]:
        self.graph = nodes = []
        try:
            yield nodes
        finally:
            self.graph = None

    def replay(self, nodes: list[Callable[[], None]]) -> None:
        self.queue += nodes

    def _push(self, run: Callable[[], None]) -> None:
        (self.queue if self.graph is None else self.graph).append(run)
