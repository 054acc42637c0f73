"""Spans as a trace that keeps Perfetto's rules."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.profiling.chrome_trace import trace_of, write_trace
from tests.experiments.profiling.perfetto_rules import problems_of
from tests.tkernels.simulated_gpu import SimulatedGpu
from tkernels.recording import Recording


@pytest.fixture(scope="module")
def trace() -> dict[str, Any]:
    gpu = SimulatedGpu()
    recording = Recording("cpu", gpu)
    forward, op = recording.named("forward", "phase"), recording.named('paged_decode.split_kv[num_splits="4"]', "op")
    for number in range(3):
        with recording.named("step", "step", launches=False), forward.carrying([number, 7]), op:
            gpu.launch(1 / 3)
    return trace_of(recording.spans(), {"experiment": "test", "device": torch.device("cpu").type})


def test_a_trace_of_host_and_device_keeps_the_rules(trace: dict[str, Any], tmp_path: Path) -> None:
    assert problems_of(json.dumps(trace)) == []
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in complete if event["pid"] == 1][:2] == ["step", "forward"]
    assert {event["cat"] for event in complete} == {"step", "phase", "op"}
    assert [event["args"] for event in complete if event["name"] == "forward"] == [
        {"request_ids": [number, 7]} for number in range(3)
    ] * 2
    titles = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert titles == {threading.current_thread().name, "stream 7"}
    on_device = [event for event in complete if event["pid"] == 2 and event["cat"] == "op"]
    assert [round(event["dur"], 2) for event in on_device] == [333.33] * 3
    write_trace(tmp_path / "trace.json", [], {})
    assert problems_of((tmp_path / "trace.json").read_text()) == ["there are no traceEvents"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dur": float("nan")}, "NaN is not JSON"),
        ({"dur": -1}, "dur is no time"),
        ({"ts": None}, "ts is no time"),
        ({"ph": "B"}, "ph is neither X nor M"),
        ({"tid": 0}, "tid is no number above 0"),
        ({"tid": 99}, "has no thread_name"),
        ({"name": 3}, "name is no text"),
        ({"dur": 1e6}, "in which it began"),
    ],
)
def test_the_rules_find_what_breaks_them(trace: dict[str, Any], changes: dict[str, Any], problem: str) -> None:
    copied = json.loads(json.dumps(trace))
    inner = next(event for event in copied["traceEvents"] if event["ph"] == "X" and event["cat"] == "op")
    inner |= changes
    assert problem in " ".join(problems_of(json.dumps(copied)))
