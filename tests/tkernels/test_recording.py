"""A recording keeps what was entered, when and inside what: the host's time and, on a simulated GPU, the device's."""

import threading
import time
from collections.abc import Sequence

import pytest
import torch

import tkernels
from tests.tkernels.simulated_gpu import SimulatedGpu
from tkernels.ranges import RECORD_GRAPH
from tkernels.recording import Recording
from tkernels.spans import DEVICE_IDLE, READ_EVENTS, Span, Track, breakdown


def tree(spans: Sequence[Span], clock: str) -> list[tuple[str, str | None]]:
    return [(s.name, spans[s.parent].name if s.parent >= 0 else None) for s in spans if s.track.clock == clock]


def assert_nested(spans: Sequence[Span]) -> None:
    """On each track spans lie inside their parents, and those of one parent after each other."""
    ends: dict[tuple[Track, int], int] = {}
    for index, span in enumerate(spans):
        assert span.parent < index
        assert ends.get((span.track, span.parent), 0) <= span.begin_ns <= span.end_ns
        if span.parent >= 0:
            parent = spans[span.parent]
            assert span.track == parent.track
            assert parent.begin_ns <= span.begin_ns
            assert span.end_ns <= parent.end_ns
        ends[span.track, span.parent] = span.end_ns


def test_on_a_cpu_kernels_and_their_parts_are_spans_of_the_thread() -> None:
    recording = Recording("cpu")
    kernels = tkernels.select(
        {}, device="cpu", dtype=torch.float32, axes={"gate_up_swiglu": {"T": (1, 4), "H": 32, "I": 16}},
        ranges=recording,
    )  # fmt: skip
    with recording.named("forward", "phase").carrying([4, 9]):
        kernels.gate_up_swiglu(torch.ones(2, 32), torch.ones(32, 32))
    spans = recording.spans()
    assert tree(spans, "host") == [
        ("forward", None),
        ("gate_up_swiglu.composed", "forward"),
        ("matmul.torch", "gate_up_swiglu.composed"),
        ("swiglu.torch", "gate_up_swiglu.composed"),
    ]
    assert [span.request_ids for span in spans] == [(4, 9), (), (), ()]
    assert spans[0].track == ("host", threading.get_native_id(), threading.current_thread().name)
    assert_nested(spans)


def test_a_host_span_is_as_long_as_what_it_holds_and_threads_have_tracks_of_their_own() -> None:
    recording = Recording("cpu")

    def work() -> None:
        with recording.named("outer", "phase"), recording.named("inner", "phase"):
            time.sleep(0.02)

    thread = threading.Thread(target=work, name="engine")
    with recording.named("main", "phase"):
        thread.start()
        thread.join()
    spans = recording.spans()
    assert [(span.name, span.track.title) for span in spans] == [
        ("main", threading.current_thread().name), ("outer", "engine"), ("inner", "engine"),
    ]  # fmt: skip
    assert spans[1].parent == -1  # another thread's range is not around it
    assert all(0.02e9 <= span.ns < 10e9 for span in spans)
    recording.clear()
    assert recording.spans() == []
    with pytest.raises(RuntimeError, match="inside a range"), recording.named("main", "phase"):
        recording.clear()


def test_on_a_device_ranges_that_launch_work_have_its_time() -> None:
    gpu = SimulatedGpu(ms=1e5)
    recording = Recording("cpu", gpu)
    forward, op = recording.named("forward", "phase"), recording.named("swiglu.fused", "op")
    with recording.named("schedule", "phase", launches=False):
        pass
    for ms in (2.0, 3.0):
        with forward:
            gpu.launch(0.25)
            with op:
                gpu.launch(ms)
    spans = recording.spans()
    assert tree(spans, "device") == [
        ("forward", None), ("swiglu.fused", "forward"), ("forward", None), ("swiglu.fused", "forward"),
    ]  # fmt: skip
    device = [span for span in spans if span.track.clock == "device"]
    assert [span.ns for span in device] == [2_250_000, 2_000_000, 3_250_000, 3_000_000]
    assert {span.track for span in device} == {("device", 7, "stream 7")}
    assert_nested(spans)


class World:
    """Steps of an engine on a simulated GPU: a graph of one layer, and a head outside of it."""

    def __init__(self) -> None:
        self.gpu = SimulatedGpu()
        self.recording = Recording("cpu", self.gpu)
        named = self.recording.named
        self.step, self.forward = named("step", "step", launches=False), named("forward", "phase")
        self.record = named(RECORD_GRAPH, "phase")
        self.layer, self.op = named("layer 0", "layer"), named("paged_decode.one_pass", "op")
        self.sample = named("sample", "phase")
        self.op_ms = 4.0
        with self.step, self.forward, self.record:
            self.run()  # as a recorder warms up
            self.captured = self.recording.captured()
            with self.gpu.capturing() as self.nodes, self.captured.capture():
                self.run()

    def run(self) -> None:
        with self.layer:
            self.gpu.launch(1.0)
            with self.op:
                self.gpu._push(self.work)

    def work(self) -> None:
        self.gpu.ms += self.op_ms

    def replayed_step(self) -> None:
        with self.step:
            with self.forward, self.captured.replay():
                self.gpu.replay(self.nodes)
            with self.sample:
                self.gpu.launch(0.5)


def test_every_replay_of_a_graph_has_times_of_its_own() -> None:
    world = World()
    world.recording.clear()
    for ms in (4.0, 6.0, 5.0):
        world.gpu.synchronize()  # the engine has waited for the step's tokens
        world.op_ms = ms
        world.replayed_step()
    spans = world.recording.spans()
    device = [span for span in spans if span.track.clock == "device"]
    once = [
        ("forward", None), ("layer 0", "forward"), ("paged_decode.one_pass", "layer 0"), ("sample", None),
    ]  # fmt: skip
    assert tree(spans, "device") == once * 3
    assert [span.ns for span in device if span.category == "op"] == [4_000_000, 6_000_000, 5_000_000]
    assert [span.ns for span in device if span.category == "layer"] == [5_000_000, 7_000_000, 6_000_000]
    assert_nested(spans)
    assert [s.name for s in spans if s.track.clock == "host"].count(
        READ_EVENTS
    ) == 3  # two before the next replay, the last at the end


def test_what_a_capture_and_its_warm_up_take_is_no_work_of_the_step() -> None:
    world = World()
    for _ in range(2):
        world.replayed_step()
    totals = {(t.name, t.clock): t for t in breakdown(world.recording.spans()).totals}
    assert totals["paged_decode.one_pass", "device"].calls == 2
    assert totals["paged_decode.one_pass", "device"].total_ns == 8_000_000
    assert totals[RECORD_GRAPH, "device"].total_ns == 5_000_000  # the warm-up; nothing runs while it captures
    assert ("paged_decode.one_pass", "host") not in totals
    assert (READ_EVENTS, "host") not in totals


def test_what_runs_between_the_pieces_of_a_replay_has_its_time_inside_the_range_around_it() -> None:
    gpu = SimulatedGpu()
    recording = Recording("cpu", gpu)
    forward, layer = recording.named("forward", "phase"), recording.named("layer 0", "layer")
    attention = recording.named("paged_prefill.packed_gqa", "op")
    captured = recording.captured()
    with captured.capture():
        with gpu.capturing() as first:
            layer.__enter__()
            gpu.launch(1.0)
        with gpu.capturing() as second:
            gpu.launch(2.0)
            layer.__exit__(None, None, None)
    recording.clear()
    for _ in range(2):
        with forward, captured.replay():
            gpu.replay(first)
            with attention:
                gpu.launch(4.0)
            gpu.replay(second)
    spans = [span for span in recording.spans() if span.track.clock == "device"]
    whole = recording.spans()
    assert [(span.name, span.ns) for span in spans] == 2 * [
        ("forward", 7_000_000), ("layer 0", 7_000_000), ("paged_prefill.packed_gqa", 4_000_000),
    ]  # fmt: skip
    inside = [whole[span.parent].name for span in spans if span.name == "paged_prefill.packed_gqa"]
    assert inside == ["layer 0", "layer 0"]


def test_an_event_that_is_no_node_of_the_graph_would_have_no_time() -> None:
    """What the recorder must not do, as the simulated device sees it."""
    gpu = SimulatedGpu()
    with gpu.capturing():
        event = gpu.mark(in_graph=False)
    with pytest.raises(RuntimeError, match="dependency in a graph"):
        gpu.mark(in_graph=False).elapsed_time(event)


def host(name: str, category: str, begin: int, end: int, parent: int) -> Span:
    return Span(name, category, Track("host", 1, "main"), begin, end, parent)  # type: ignore[arg-type]


def device(name: str, category: str, begin: int, end: int, parent: int) -> Span:
    return Span(name, category, Track("device", 7, "stream 7"), begin, end, parent)  # type: ignore[arg-type]


def test_own_times_of_each_clock_add_up_to_the_steps() -> None:
    spans = [
        host("step", "step", 0, 100, -1),
        host("schedule", "phase", 5, 15, 0),
        host("forward", "phase", 20, 80, 0),
        host("layer 0", "layer", 30, 50, 2),
        host("swiglu.fused", "op", 32, 42, 3),
        host("layer 0", "layer", 50, 60, 2),
        host("detokenize", "phase", 200, 230, -1),  # after the step: in no step's time
        host("step", "step", 300, 350, -1),
        host(READ_EVENTS, "phase", 310, 330, 7),
        device("forward", "phase", 25, 85, -1),
        device("swiglu.fused", "op", 40, 75, 9),
    ]
    found = breakdown(spans)
    assert (found.steps, found.step_ns) == (2, 130)
    table = {(t.name, t.clock): (t.calls, t.total_ns, t.self_ns) for t in found.totals}
    assert table == {
        ("step", "host"): (2, 130, 60),
        ("schedule", "host"): (1, 10, 10),
        ("forward", "host"): (1, 60, 30),
        ("layer 0", "host"): (2, 30, 20),
        ("swiglu.fused", "host"): (1, 10, 10),
        ("detokenize", "host"): (1, 30, 0),
        ("forward", "device"): (1, 60, 25),
        ("swiglu.fused", "device"): (1, 35, 35),
        (DEVICE_IDLE, "device"): (2, 70, 70),
    }
    for clock in ("host", "device"):
        assert sum(own for (_, c), (_, _, own) in table.items() if c == clock) == found.step_ns
