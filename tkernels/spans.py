"""Ranges that were entered and left, and what they add up to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tkernels.ranges import RECORD_GRAPH, Category

Clock = Literal["host", "device"]
READ_EVENTS = "read events"
"""The range in which a recording reads the device's times: its own cost, no part of what is recorded."""
DEVICE_IDLE = "device idle"


class Track(NamedTuple):
    """Where spans nest in each other: a thread of the host by its native id, or a stream of the device."""

    clock: Clock
    number: int
    title: str


@dataclass(frozen=True, slots=True)
class Span:
    """A range from entering to leaving it, in nanoseconds from the recording's beginning. `parent`: the index of the
    span around it on its track, in the list that it is in; -1 for none.
    """

    name: str
    category: Category
    track: Track
    begin_ns: int
    end_ns: int
    parent: int
    request_ids: tuple[int, ...] = ()

    @property
    def ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass(frozen=True)
class RangeTotal:
    """All spans of one name by one clock. total_ns: with what is nested in them. self_ns: without, and of it what lies
    in steps; None where nothing tells.
    """

    name: str
    category: Category | Literal["gap"]
    clock: Clock
    calls: int
    total_ns: int
    self_ns: int | None


@dataclass(frozen=True)
class Breakdown:
    """Where the time of `steps` steps went, step_ns in all: the self_ns of each clock's totals add up to it. On the
    host's, what is in no phase is the step's own; on the device's, it is DEVICE_IDLE.
    """

    steps: int
    step_ns: int
    totals: tuple[RangeTotal, ...]


def breakdown(spans: Sequence[Span]) -> Breakdown:
    """What ranges took, in the order in which they first came.

    Of what happened while a CUDA graph was recorded only the whole is counted, under RECORD_GRAPH: it was no work for
    a step's sake. READ_EVENTS is taken out of all that it lies in.
    """
    nested = _nesting(spans)
    kept = [index for index, span in enumerate(spans) if span.name != READ_EVENTS and not nested.in_record[index]]
    steps = [index for index in kept if spans[index].category == "step"]
    step_ns = sum(spans[index].ns - nested.read_ns[index] for index in steps)
    on_device = [spans[index] for index in kept if spans[index].track.clock == "device"]
    totals = _totals(spans, nested, kept)
    if busy_ns := sum(span.ns for span in on_device if span.parent < 0):
        idle = max(0, step_ns - busy_ns)
        totals.append(RangeTotal(DEVICE_IDLE, "gap", "device", len(steps), idle, idle))
    return Breakdown(len(steps), step_ns, tuple(totals))


def _totals(spans: Sequence[Span], nested: "_Nesting", kept: Sequence[int]) -> list[RangeTotal]:
    found: dict[tuple[str, Clock], list[int]] = {}  # calls, total, self
    categories: dict[str, Category] = {}
    for index in kept:
        span = spans[index]
        sums = found.setdefault((span.name, span.track.clock), [0, 0, 0])
        categories.setdefault(span.name, span.category)
        sums[0] += 1
        if all(spans[outer].name != span.name for outer in _enclosing_spans(spans, span)):
            sums[1] += span.ns - nested.read_ns[index]
        if span.track.clock == "device" or nested.in_step[index]:
            sums[2] += span.ns - (0 if span.name == RECORD_GRAPH else nested.inside_ns[index])
    return [RangeTotal(name, categories[name], clock, *sums) for (name, clock), sums in found.items()]


@dataclass(frozen=True)
class _Nesting:
    """Of each span: the nanoseconds of those right inside it and of READ_EVENTS however deep in it, and where it is."""

    inside_ns: list[int]
    read_ns: list[int]
    in_step: list[bool]
    in_record: list[bool]


def _nesting(spans: Sequence[Span]) -> _Nesting:
    inside_ns, read_ns = [0] * len(spans), [0] * len(spans)
    in_step, in_record = [False] * len(spans), [False] * len(spans)
    for index, span in enumerate(spans):
        outer = span.parent
        in_step[index] = span.category == "step" or (outer >= 0 and in_step[outer])
        if outer >= 0:
            in_record[index] = in_record[outer] or spans[outer].name == RECORD_GRAPH
            inside_ns[outer] += span.ns
        if span.name == READ_EVENTS:
            for enclosing in _enclosing_spans(spans, span):
                read_ns[enclosing] += span.ns
    return _Nesting(inside_ns, read_ns, in_step, in_record)


def _enclosing_spans(spans: Sequence[Span], span: Span) -> Iterator[int]:
    """Indices of the spans around one, the nearest first."""
    while span.parent >= 0:
        yield span.parent
        span = spans[span.parent]
