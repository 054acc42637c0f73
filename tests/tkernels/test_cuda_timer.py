"""The CUDA timer's order of events, with the driver's part played by a recorder: what is queued, and when."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tkernels import timing

CPU = torch.device("cpu")


class Recorder:
    """Stands for torch.cuda: notes what is queued; each event lies a millisecond after the one before."""

    def __init__(self) -> None:
        self.queued: list[str] = []
        self.capturing: list[str] | None = None
        self.events = 0

    def note(self, what: str) -> None:
        (self.queued if self.capturing is None else self.capturing).append(what)

    def event(self, enable_timing: bool) -> Any:
        def record() -> None:
            self.events += 1
            event.at = float(self.events)
            self.note("event")

        event = SimpleNamespace(record=record, elapsed_time=lambda end: end.at - event.at)
        return event

    @contextmanager
    def graph(self, graph: Any, stream: Any) -> Iterator[None]:
        self.capturing = []
        yield
        body, self.capturing = list(self.capturing), None
        graph.replay = lambda: [self.note(f"replayed {what}") for what in body]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()

    @contextmanager
    def stream(stream: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1024))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: recorder.note("wait"))
    monkeypatch.setattr(torch.cuda, "Event", recorder.event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", recorder.graph)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "a stream of its own")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current stream")
    monkeypatch.setattr(timing, "_FLUSHED_BYTES", 1024)
    monkeypatch.setattr(torch.Tensor, "sum", lambda tensor: recorder.note(f"read {tensor.numel() * 4}"))
    return recorder


def run(cuda: Recorder, launch: timing.Launch, l2: timing.Cache) -> tuple[timing.Timing, list[str]]:
    """What was timed with two sets of data, three samples and one warm-up, and what was queued for the samples."""
    calls = [lambda: cuda.note("a"), lambda: cuda.note("b")]
    result = timing._time_on_cuda(calls, CPU, 3, 1, launch, l2)
    first = cuda.queued.index("event")
    start = first - 1 if l2 == "cold" else first
    assert cuda.queued[:5] == ["wait", "a", "wait", "a", "b"]  # the first call apart, then the warm-up of both sets
    assert cuda.queued[start - 1] == "wait"  # nothing of the warm-up is still running
    return result, cuda.queued[start:]


def test_cold_and_eager_each_sample_meets_a_flushed_cache(cuda: Recorder) -> None:
    result, queued = run(cuda, "eager", "cold")
    samples = [["read 2048", "event", call, "event"] for call in ("a", "b", "a")]
    assert queued == [*(what for sample in samples for what in sample), "wait"]
    assert result.samples_us == (1000.0, 1000.0, 1000.0)
    assert (result.calls_per_sample, result.timer) == (1, "cuda events, cold L2")
    assert result.first_call_us is not None


def test_warm_and_eager_is_one_set_again_and_again(cuda: Recorder) -> None:
    result, queued = run(cuda, "eager", "warm")
    assert queued == [*(["event", "a", "event"] * 3), "wait"]
    assert result.timer == "cuda events, warm L2"


def test_a_cold_graph_holds_every_set_once_and_a_sample_is_their_mean(cuda: Recorder) -> None:
    result, queued = run(cuda, "graph", "cold")
    assert queued == [*(["read 2048", "event", "replayed a", "replayed b", "event"] * 3), "wait"]
    assert result.samples_us == (500.0, 500.0, 500.0)
    assert (result.calls_per_sample, result.timer) == (2, "cuda graph, cold L2")


def test_a_warm_graph_holds_the_first_set(cuda: Recorder) -> None:
    result, queued = run(cuda, "graph", "warm")
    assert queued == [*(["event", "replayed a", "replayed a", "event"] * 3), "wait"]
    assert result.timer == "cuda graph, warm L2"
