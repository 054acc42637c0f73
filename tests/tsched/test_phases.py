"""A step names its phases, the model's layers, parts and kernels; a replayed graph's are those of its capture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from tests.tkernels.simulated_gpu import SimulatedGpu
from tests.tsched.hash_model import HashModel, hash_cache
from tests.tsched.schedulers import build_scheduler
from tkernels.ranges import RECORD_GRAPH, Ranges
from tkernels.recording import Recording
from tkernels.runtime import HostRuntime
from tkernels.spans import Span, breakdown
from tmodel.batch import Batch
from tmodel.kv_cache import KVCache
from tsched import LLM, SamplingParams
from tsched.execution.engine import Engine
from tsched.execution.model_runner import ModelRunner
from tsched.execution.phase_times import PhaseTimes
from tsched.execution.phases import PHASES, Phases

PARTS = {"embedding", "q_proj+k_proj+v_proj", "o_proj", "down_proj", "lm_head"}
LAYERS = {"layer 0", "layer 1"}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def serve(checkpoint: Path, ranges: Ranges, **options: bool) -> LLM:
    llm = LLM(
        checkpoint, dtype="float32", device="cpu", max_num_seqs=4, max_num_batched_tokens=32, block_size=16,
        kv_cache_bytes=1 << 20, ranges=ranges, **options,
    )  # fmt: skip
    llm.generate([[1, 2, 3], [4, 5]], PARAMS, use_tqdm=False)
    return llm


def names(spans: list[Span], category: str, clock: str = "host") -> set[str]:
    return {span.name for span in spans if span.category == category and span.track.clock == clock}


def path(spans: list[Span], span: Span) -> list[str]:
    found = [span.name]
    while span.parent >= 0:
        span = spans[span.parent]
        found.insert(0, span.name)
    return found


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_step_names_all_that_it_does(checkpoint: Path, cuda_graphs: bool) -> None:
    recording = Recording("cpu")
    llm = serve(checkpoint, recording, cuda_graphs=cuda_graphs)
    spans = recording.spans()
    assert names(spans, "phase") == set(PHASES) - (set() if cuda_graphs else {RECORD_GRAPH})
    assert names(spans, "layer") == LAYERS
    assert names(spans, "part") == PARTS
    uncalled = {"copy_pages", "logprobs"} | (set() if cuda_graphs else {"step_inputs"})
    assert names(spans, "op") == {f"{op}.{variant}" for op, variant in llm.arm.items() if op not in uncalled}
    steps = [span for span in spans if span.category == "step"]
    assert len(steps) == llm.stats().num_steps == 6
    down = next(span for span in spans if span.name == "down_proj")
    assert path(spans, down) == ["step", "forward", "layer 0", "down_proj"]
    assert {span.name for span in spans if span.parent < 0} == {"step", "detokenize"}
    forwards = [span.request_ids for span in spans if span.name == "forward"]
    assert forwards == [(0, 1)] * 6


def test_phases_that_launch_nothing_say_so() -> None:
    launches: dict[str, bool] = {}

    def note(name: str, category: str, *, launches: bool = True, into: dict[str, bool] = launches) -> None:
        into[name] = launches

    Phases(cast("Ranges", SimpleNamespace(listening=False, named=note)))
    assert {name for name, one in launches.items() if one} == {"prepare", "forward", "sample"}
    assert launches.keys() == {"step", *PHASES} - {RECORD_GRAPH}


def test_phases_are_timed_beside_who_else_listens(checkpoint: Path) -> None:
    recording = Recording("cpu")
    times = PhaseTimes(recording)
    llm = serve(checkpoint, times)
    spans = recording.spans()
    assert [span.request_ids for span in spans if span.name == "forward"] == [(0, 1)] * llm.stats().num_steps
    assert {name for name, seconds in times.seconds.items() if seconds} == names(spans, "phase") | {"step"}
    assert times.seconds["forward"] < times.seconds["step"]


def test_a_phase_between_two_steps_is_not_lost(checkpoint: Path) -> None:
    recording = Recording("cpu")
    serve(checkpoint, recording)
    found = breakdown(recording.spans())
    assert found.steps == 6
    assert sum(total.self_ns for total in found.totals) == found.step_ns
    calls = {total.name: total.calls for total in found.totals}
    assert calls["schedule"] == calls["forward"] == calls["commit"] == 6
    assert calls["layer 0"] == calls["down_proj"] // 2 == 6


class NamedModel(HashModel):
    """Has a layer with a kernel in it, which takes 2 ms of a simulated GPU for each row."""

    def __init__(self, gpu: SimulatedGpu, ranges: Ranges) -> None:
        super().__init__()
        self.gpu = gpu
        self.layer, self.op = ranges.named("layer 0", "layer"), ranges.named("paged_decode.one_pass", "op")
        self.is_replay = False

    def __call__(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        if not self.is_replay:
            with self.layer, self.op:
                self.gpu.launch(2.0 * batch.num_decodes)
        return super().__call__(batch, kv_cache)


class SimulatedRecorder:
    """What CudaRecorder does, on a simulated GPU: a replay launches the graph's nodes, and no Python runs."""

    def __init__(self, model: NamedModel, ranges: Ranges) -> None:
        self.model, self.ranges = model, ranges

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        run()
        captured, gpu = self.ranges.captured(), self.model.gpu
        with gpu.capturing() as nodes, captured.capture():
            run()

        def replay() -> torch.Tensor:
            with captured.replay():
                gpu.replay(nodes)
            self.model.is_replay = True
            try:
                return run()
            finally:
                self.model.is_replay = False

        return replay


def test_replayed_steps_have_the_ranges_of_their_graph() -> None:
    gpu = SimulatedGpu()
    recording = Recording("cpu", gpu)
    model = NamedModel(gpu, recording)
    scheduler = build_scheduler(
        num_blocks=20, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=20
    )
    runner = ModelRunner(model, hash_cache(20, 4), scheduler, runtime=HostRuntime(), cuda_graphs=True, ranges=recording)
    engine = Engine(scheduler, runner)
    assert runner._graphs is not None
    runner._graphs._recorder = SimulatedRecorder(model, recording)

    def serve(first_id: int) -> None:
        for i in range(2):
            engine.add(first_id + i, [1, 2, 3], PARAMS)
        while engine.has_unfinished:
            engine.step()
            gpu.synchronize()  # as the host waits for a step's tokens

    serve(0)
    recording.clear()
    serve(2)
    spans = recording.spans()
    on_device = [span for span in spans if span.category == "op" and span.track.clock == "device"]
    assert [span.ns for span in on_device] == [0, *[4_000_000] * 5]  # the prompts, then five decode steps of two rows
    assert path(spans, on_device[-1]) == ["forward", "layer 0", "paged_decode.one_pass"]
    assert names(spans, "op") == {"paged_decode.one_pass"}  # of the host's, from the prompts' step: a replay runs none
    found = {(total.name, total.clock): total for total in breakdown(spans).totals}
    assert found["paged_decode.one_pass", "device"].calls == 6
    assert found["paged_decode.one_pass", "device"].total_ns == 20_000_000
    assert [span.request_ids for span in spans if span.name == "forward" and span.track.clock == "host"] == [(2, 3)] * 6

    engine.forget_graphs()
    recording.clear()
    serve(4)
    assert RECORD_GRAPH in names(recording.spans(), "phase")
