"""What a simulated device runs, and when: streams, events, graphs, memory that is given back, and paces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from tests.tkernels.simulated_cuda import SimulatedCuda

Work = Callable[[], object]


class CudaError(RuntimeError):
    """What CUDA would refuse, or leave undefined."""


@dataclass(eq=False)
class Mark:
    """A moment of a stream."""

    stream: Stream
    is_reached: bool = False
    then: Work | None = None


@dataclass(eq=False)
class Wait:
    mark: Mark


@dataclass(eq=False)
class Stream:
    cuda: SimulatedCuda
    cuda_stream: int
    queue: deque[Work | Mark | Wait] = field(default_factory=deque)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event(self.cuda) if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:
            self.cuda.push(Wait(event.mark), self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


@dataclass(eq=False)
class Event:
    cuda: SimulatedCuda
    mark: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = self.cuda.current if stream is None else stream
        self.mark = Mark(stream)
        self.cuda.push(self.mark, stream)

    def synchronize(self) -> None:
        self.cuda.note_wait("an event")
        if self.mark is not None:
            self.cuda.run_to(self.mark)


class Memory:
    """An allocation, given back when the last tensor in it is gone."""

    def __init__(self, cuda: SimulatedCuda, data: torch.Tensor) -> None:
        self.cuda, self.data = cuda, data
        self.stream = cuda.current
        self.users: set[Stream] = set()  # other streams that were said to use it
        self.graph = cuda.capturing
        fill_with_poison(data)
        if self.graph is not None:
            self.graph.memory.append(data)

    def __del__(self) -> None:
        self.cuda.give_back(self)


class GraphPool:
    """The memory that graphs share. torch asserts that a pool that it knows has graphs when another is captured into
    it; it forgets one without graphs when its cache is emptied (create_or_incref_pool of c10's allocator).
    """

    def __init__(self) -> None:
        self.is_known = False
        self.num_graphs = 0


class Graph:
    """torch.cuda.CUDAGraph: launches, with the memory that they were captured with."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        self.cuda = cuda
        self.work: list[Work] = []
        self.memory: list[torch.Tensor] = []
        self._last: Mark | None = None
        self._pool: GraphPool | None = None

    def capture_begin(self, *, pool: GraphPool, capture_error_mode: str) -> None:
        if self.cuda.capturing is not None:
            raise CudaError("a capture begins inside another")
        if pool.is_known and not pool.num_graphs:
            raise CudaError("INTERNAL ASSERT FAILED: use_count > 0 of a pool whose graphs are all gone")
        pool.is_known, self._pool = True, pool
        pool.num_graphs += 1
        self.cuda.capturing = self

    def capture_end(self) -> None:
        self.cuda.capturing = None

    def replay(self) -> None:
        for work in self.work:
            self.cuda.push(work)
        self._last = self.cuda.current.record_event().mark

    def __del__(self) -> None:
        if self._pool is not None:
            self._pool.num_graphs -= 1
        if self._last is not None and not self._last.is_reached:
            self.cuda.faults.append("a graph was dropped while a replay of it was queued")
        with torch.inference_mode():
            for data in self.memory:
                fill_with_poison(data)


Pace = Callable[["SimulatedCuda"], None]
"""Runs some of what may run now. It is asked after each launch."""


def late(cuda: SimulatedCuda) -> None:
    """Nothing runs before somebody waits for it."""


def early(cuda: SimulatedCuda) -> None:
    """All runs at once, as on a CPU."""
    for stream in cuda.streams:
        cuda.run_ready(stream)


def work_first(cuda: SimulatedCuda) -> None:
    """The first stream, the model's, runs ahead of all others, which read as late as they may."""
    cuda.run_ready(cuda.streams[0])


def copies_first(cuda: SimulatedCuda) -> None:
    """All streams but the first run as soon as they may."""
    for stream in cuda.streams[1:]:
        cuda.run_ready(stream)


def at_random(seed: int) -> Pace:
    rng = np.random.default_rng(seed)

    def run_some(cuda: SimulatedCuda) -> None:
        if rng.random() < 0.3:
            cuda.run_ready(cuda.streams[int(rng.integers(len(cuda.streams)))], int(rng.integers(1, 30)))

    return run_some


def fill_with_poison(data: torch.Tensor) -> None:
    """NaN, or a number that is no index of anything; True where there is no other."""
    if data.dtype.is_floating_point:
        data.fill_(torch.nan)
    elif data.dtype is torch.bool:
        data.fill_(True)
    else:
        data.fill_(torch.iinfo(data.dtype).max // 3)
