"""Ranges that are kept: what was entered, when, inside what; on a GPU also how long the device took.

The host's times are those of its monotonic clock. The device's are CUDA events, recorded on the current stream where a
range that launches work is entered and left: its time there is from the moment the stream gets to the one to the moment
it gets to the other, which includes waiting for launches wherever the host is the slower of the two.

In a captured CUDA graph these are external events (`torch.cuda.Event(enable_timing=True, external=True)`): captured as
event record nodes of the graph, which every replay records again; others would be the graph's own dependencies, of
which no time can be asked. (torch.cuda.Event's documentation; cudaEventRecordExternal in the CUDA runtime's; PyTorch
pull request 155372, which added them for this.) A replay overwrites the times of the one before, so these are read
first, which waits for the device: record rounds without overlap, and apart from those that are timed. Each event is a
node of the graph, so that kernels which would follow each other closely do not: shares are of steps that are recorded.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tkernels.ranges import Category
from tkernels.spans import READ_EVENTS, Span, Track


class DeviceEvent(Protocol):
    """A moment of a stream, as torch.cuda.Event."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to a later one, both of which the device has come to."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has come to it."""
        ...


class DeviceClock(Protocol):
    """Marks moments on the current stream of a device."""

    def mark(self, *, in_graph: bool) -> DeviceEvent:
        """An event that is recorded here. in_graph: in a capture, for each replay to record again."""
        ...

    @property
    def stream(self) -> int:
        """The current stream's number."""
        ...

    def synchronize(self) -> None:
        """Wait for the device."""
        ...


class CudaClock:
    """CUDA events of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self, *, in_graph: bool) -> DeviceEvent:
        event = torch.cuda.Event(enable_timing=True, external=in_graph)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @property
    def stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


@dataclass(eq=False, slots=True)
class _Entry:
    """A range that was entered. Events: where it launches work and there is a device; `graph`: which they belong to,
    None for those that are recorded at once. within: the replay in pieces between two of which it was entered.
    """

    range: "RecordedRange"
    parent: "_Entry | None"
    track: Track
    begin_ns: int
    request_ids: tuple[int, ...]
    end_ns: int = -1
    stream: int = 0
    graph: "CapturedRecording | None" = None
    first: DeviceEvent | None = None
    last: DeviceEvent | None = None
    within: "_Replay | None" = None

    @property
    def is_timed(self) -> bool:
        """Whether the device has times of this entry itself."""
        return self.first is not None and self.last is not None and self.graph is None


@dataclass(eq=False, slots=True)
class _Replay:
    """A launch of a graph inside the entry `parent`; `root` is the event that its times count from."""

    parent: _Entry | None
    root: DeviceEvent
    stream: int
    times: list[tuple[_Entry, int, int]]  # an entry of the capture, begin and end in ns from the root


@dataclass(eq=False, slots=True)
class _Placed:
    """A span of the device on its way to its place."""

    entry: _Entry
    stream: int
    begin_ns: int
    end_ns: int
    parent: "_Placed | None"


class RecordedRange:
    """A name in a recording."""

    __slots__ = ("_recording", "category", "launches", "name")

    def __init__(self, recording: "Recording", name: str, category: Category, *, launches: bool) -> None:
        self._recording, self.name, self.category, self.launches = recording, name, category, launches

    def __enter__(self) -> None:
        self._recording.enter(self)

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        self._recording.leave()

    @contextmanager
    def carrying(self, request_ids: Sequence[int]) -> Iterator[None]:
        """The range with the requests that it is about."""
        self._recording.enter(self, tuple(request_ids))
        try:
            yield
        finally:
            self._recording.leave()


class CapturedRecording:
    """The ranges of one graph, and of its last replay that has not been read yet."""

    def __init__(self, recording: "Recording") -> None:
        self._recording = recording
        self.entries: list[_Entry] = []  # in the order of entering
        self.final: DeviceEvent | None = None  # the last that a replay records
        self.unread: _Replay | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Ranges that are entered inside belong to the graph."""
        with self._recording.capturing(self):
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Reads the replay before, then notes this one."""
        self._recording.read(self)
        self.unread = self._recording.launched()
        with self._recording.replaying(self.unread):
            yield


class Recording:
    """Records every range that is named through it; see the module.

    device: whose clock is read besides the host's; a CPU has none of its own.
    clock: how its moments are marked; None is CUDA events on a GPU.
    """

    listening = True

    def __init__(self, device: torch.device | str, clock: DeviceClock | None = None) -> None:
        device = torch.device(device)
        self._clock = CudaClock(device) if clock is None and device.type == "cuda" else clock
        self._reading = RecordedRange(self, READ_EVENTS, "phase", launches=False)
        self._graphs: list[CapturedRecording] = []
        self._captures: dict[int, CapturedRecording] = {}  # by thread, while it captures
        self._replaying: dict[int, _Replay] = {}  # by thread, while it replays
        self._open: dict[int, list[_Entry]] = {}  # by thread, innermost last
        self._threads: dict[int, Track] = {}
        self.clear()

    def clear(self) -> None:
        """Begin anew; what was captured stays known. RuntimeError inside a range."""
        if any(self._open.values()):
            raise RuntimeError("a recording cannot begin anew inside a range")
        self._entries: list[_Entry] = []
        self._replays: list[_Replay] = []
        for graph in self._graphs:
            graph.unread = None
        if self._clock is not None:
            self._anchor = self._clock.mark(in_graph=False)
            self._clock.synchronize()
        self._origin_ns = time.perf_counter_ns()

    def named(self, name: str, category: Category, *, launches: bool = True) -> RecordedRange:
        return RecordedRange(self, name, category, launches=launches)

    def captured(self) -> CapturedRecording:
        graph = CapturedRecording(self)
        self._graphs.append(graph)
        return graph

    def enter(self, entered: RecordedRange, request_ids: tuple[int, ...] = ()) -> None:
        thread = threading.get_ident()
        stack = self._open.get(thread)
        if stack is None:
            stack = self._open[thread] = []
            self._threads[thread] = Track("host", threading.get_native_id(), threading.current_thread().name)
        parent = stack[-1] if stack else None
        entry = _Entry(entered, parent, self._threads[thread], time.perf_counter_ns(), request_ids)
        stack.append(entry)
        self._entries.append(entry)
        if self._clock is not None and entered.launches:
            entry.graph = self._captures.get(thread)
            if entry.graph is not None:
                entry.graph.entries.append(entry)
            entry.stream, entry.within = self._clock.stream, self._replaying.get(thread)
            entry.first = self._clock.mark(in_graph=entry.graph is not None)

    def leave(self) -> None:
        entry = self._open[threading.get_ident()].pop()
        if self._clock is not None and entry.first is not None:
            entry.last = self._clock.mark(in_graph=entry.graph is not None)
            if entry.graph is not None:
                entry.graph.final = entry.last
        entry.end_ns = time.perf_counter_ns()

    @contextmanager
    def capturing(self, graph: CapturedRecording) -> Iterator[None]:
        thread = threading.get_ident()
        self._captures[thread] = graph
        try:
            yield
        finally:
            del self._captures[thread]

    @contextmanager
    def replaying(self, replay: _Replay | None) -> Iterator[None]:
        """Ranges that are entered inside lie between two pieces of the replay."""
        if replay is None:
            yield
            return
        thread = threading.get_ident()
        self._replaying[thread] = replay
        try:
            yield
        finally:
            del self._replaying[thread]

    def launched(self) -> _Replay | None:
        """A replay that this thread is about to launch."""
        if self._clock is None:
            return None
        stack = self._open.get(threading.get_ident())
        parent = stack[-1] if stack else None
        outermost = None
        around = parent
        while around is not None:  # the same event as the spans around it, so that rounding cannot make them overlap
            outermost = around.first if around.first is not None else outermost
            around = around.parent
        return _Replay(parent, outermost or self._clock.mark(in_graph=False), self._clock.stream, [])

    def read(self, graph: CapturedRecording) -> None:
        """Takes the times of a graph's last replay, before the next one overwrites them."""
        replay, graph.unread = graph.unread, None
        if replay is None or graph.final is None:
            return
        with self._reading:
            graph.final.synchronize()
            for entry in graph.entries:
                assert entry.first is not None
                assert entry.last is not None
                replay.times.append((entry, _ns(replay.root, entry.first), _ns(replay.root, entry.last)))
        self._replays.append(replay)

    def spans(self) -> list[Span]:
        """All ranges that were left: the host's in the order of entering, then the device's in that of beginning."""
        if self._clock is not None:
            self._clock.synchronize()
            for graph in self._graphs:
                self.read(graph)
        spans: list[Span] = []
        at: dict[int, int] = {}
        for entry in self._entries:
            if entry.end_ns >= 0:
                at[id(entry)] = len(spans)
                begin, end = entry.begin_ns - self._origin_ns, entry.end_ns - self._origin_ns
                parent = -1 if entry.parent is None else at.get(id(entry.parent), -1)
                kind = entry.range
                spans.append(Span(kind.name, kind.category, entry.track, begin, end, parent, entry.request_ids))
        for placed in self._place_entries():
            at[id(placed)] = len(spans)
            parent = -1 if placed.parent is None else at[id(placed.parent)]
            kind, track = placed.entry.range, Track("device", placed.stream, f"stream {placed.stream}")
            ids = placed.entry.request_ids
            spans.append(Span(kind.name, kind.category, track, placed.begin_ns, placed.end_ns, parent, ids))
        return spans

    def _place_entries(self) -> list[_Placed]:
        """The device's spans, in the order of beginning, each inside its parent and after the one before it."""
        bases: dict[int, int] = {}

        def base(root: DeviceEvent) -> int:
            # Times inside a range count from its outermost one's event: elapsed_time is a float32 of milliseconds,
            # which after a minute is good for 4 us alone.
            if id(root) not in bases:
                bases[id(root)] = _ns(self._anchor, root)
            return bases[id(root)]

        eager: dict[int, _Placed] = {}
        for entry in self._entries:
            if entry.is_timed and entry.end_ns >= 0:
                around = list(_placed_around(entry.parent, eager))
                root = around[-1].entry.first if around else entry.first
                assert root is not None
                inside = next((one for one in around if one.stream == entry.stream), None)
                begin, end = (base(root) + _ns(root, event) for event in (entry.first, entry.last))
                eager[id(entry)] = _Placed(entry, entry.stream, begin, end, inside)
        placed = list(eager.values())
        for replay in self._replays:
            start, inside = base(replay.root), next(_placed_around(replay.parent, eager), None)
            mine: dict[int, _Placed] = {}
            for entry, begin, end in replay.times:
                outer = next(_placed_around(entry.parent, mine), inside)
                mine[id(entry)] = _Placed(entry, replay.stream, start + begin, start + end, outer)
            placed += mine.values()
            for one in eager.values():
                if one.entry.within is replay and (one.parent is None or one.parent.entry.within is not replay):
                    around = [other for other in mine.values() if other.begin_ns <= one.begin_ns < other.end_ns]
                    one.parent = min(around, key=lambda other: other.end_ns - other.begin_ns, default=one.parent)
        placed.sort(key=lambda one: one.begin_ns)  # stable: of two that begin together the outer one came first
        _fit_into_parents(placed)
        return placed


def _placed_around(entry: _Entry | None, placed: Mapping[int, _Placed]) -> Iterator[_Placed]:
    """The places of the entry and of those around it, innermost first, as far as they have one."""
    while entry is not None:
        if id(entry) in placed:
            yield placed[id(entry)]
        entry = entry.parent


def _fit_into_parents(placed: Sequence[_Placed]) -> None:
    """Moves what begins before the end of the one before it, or lies beyond its parent, by the clock's rounding."""
    ends: dict[tuple[int, int], int] = {}
    for one in placed:
        low, high = (0, one.end_ns) if one.parent is None else (one.parent.begin_ns, one.parent.end_ns)
        key = (one.stream, id(one.parent))
        one.begin_ns = max(one.begin_ns, min(high, max(low, ends.get(key, 0))))
        one.end_ns = max(one.begin_ns, min(one.end_ns, high))
        ends[key] = one.end_ns


def _ns(begin: DeviceEvent, end: Any) -> int:
    return round(begin.elapsed_time(end) * 1e6)
