"""A device with too little memory for a step: its requests end with the reason, and the engine serves on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tsched.async_serving import LONG, check_empty, collect, make_async, run
from tests.tsched.hash_model import HashModel
from tests.tsched.schedulers import build_scheduler
from tests.tsched.simulated_device import check_accounts, tokens_alone
from tests.tsched.test_engine import MAX_MODEL_LEN, MODES, build_engine
from tests.tsched.test_engine import run as run_engine
from tests.tsched.test_llm import GREEDY, PROMPTS, make_llm
from tmodel.batch import Batch
from tmodel.kv_cache import KVCache
from tsched.execution.beam_search import BeamSearch, BeamSearchParams
from tsched.execution.exhaustion import explain_exhaustion
from tsched.execution.sampler import Sampler
from tsched.requests.sampling_params import SamplingParams

ON_GPU = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.1 GiB, and so on"
ON_CPU = (
    "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
)
ERRORS = {"cuda": torch.OutOfMemoryError(ON_GPU), "cpu": RuntimeError(ON_CPU)}


class RunsOutAt(HashModel):
    """Runs out of memory in its forward number `step`, from 0."""

    def __init__(self, step: int, error: RuntimeError = ERRORS["cuda"]) -> None:
        super().__init__()
        self.step, self.error = step, error

    def __call__(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        logits = super().__call__(batch, kv_cache)
        if len(self.batches) == self.step + 1:
            kv_cache[0][0][batch.slots[batch.slots >= 0] // 4] = 77  # what the forward wrote before it failed
            raise self.error
        return logits


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("step", [0, 1, 4])
def test_the_requests_of_that_step_end_and_the_others_are_served(mode: str, kind: str, step: int) -> None:
    model = RunsOutAt(step, ERRORS[kind])
    engine = build_engine(model, max_num_seqs=2, prefix_cache="hash", **MODES[mode])
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [[i, *range(1, 9)] for i in range(5)]
    for i, prompt in enumerate(prompts):
        engine.add(i, prompt, params)
    requests = {one.sequence.id: one for one in run_engine(engine)}
    failed = {i for i, one in requests.items() if one.error is not None}
    assert failed == {0, 1}, "those that ran"
    for i, prompt in enumerate(prompts):
        expected = tokens_alone(prompt, params, MAX_MODEL_LEN)[0]
        found = requests[i].sequence.output_token_ids
        if i in failed:
            assert requests[i].sequence.finish_reason == "error"
            assert "the device had too little memory for a step of " in requests[i].error
            assert "ried to allocate" in requests[i].error
            assert "GPU 0" not in requests[i].error
            assert requests[i].finish_time is not None
            assert found == expected[: len(found)]
            assert len(found) < 6
        else:
            assert found == expected
    check_accounts(engine.scheduler)
    assert engine.scheduler.pool.num_referenced == 0
    engine.add(9, prompts[0], params)
    (again,) = run_engine(engine)
    assert again.sequence.output_token_ids == tokens_alone(prompts[0], params, MAX_MODEL_LEN)[0]


@pytest.mark.parametrize("mode", ["plain", "overlap"])
def test_a_sampler_that_runs_out_ends_its_step_alone(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(max_num_seqs=2, **MODES[mode])
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    sample, calls = Sampler.sample, []

    def exhausted(self: Sampler, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError(ON_GPU)
        return sample(self, *arguments)

    monkeypatch.setattr(Sampler, "sample", exhausted)
    for i in range(3):
        engine.add(i, [i, 1, 2], params)
    requests = {one.sequence.id: one for one in run_engine(engine)}
    assert [requests[i].error is None for i in range(3)] == [False, False, True]
    assert requests[2].sequence.output_token_ids == tokens_alone([2, 1, 2], params, MAX_MODEL_LEN)[0]
    assert [len(requests[i].sequence.output_token_ids) for i in range(2)] == [2, 2]
    check_accounts(engine.scheduler)


def test_a_fork_holds_nothing_of_a_lost_plan() -> None:
    sizes = {"num_blocks": 10, "block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 20, "max_model_len": 40}
    scheduler = build_scheduler(**sizes)
    scheduler.add(0, range(1, 9), SamplingParams(max_tokens=8))
    plan = scheduler.schedule()
    child = scheduler.fork(0, 1, SamplingParams(max_tokens=8))
    assert child.blocks.size == 2
    assert [sequence.id for sequence in scheduler.lose(plan)] == [0]
    assert (child.blocks.size, child.num_computed, scheduler.pool.num_referenced) == (0, 0, 0)
    assert scheduler.schedule().num_tokens == 8


def test_only_the_allocators_are_believed() -> None:
    assert explain_exhaustion(ERRORS["cuda"]) == "CUDA out of memory. Tried to allocate 20.00 GiB."
    assert explain_exhaustion(ERRORS["cpu"]) == "can't allocate memory: you tried to allocate 8 bytes."
    assert explain_exhaustion(RuntimeError("out of memory")) is None
    assert (
        explain_exhaustion(MemoryError("Unable to allocate 8. GiB for an array"))
        == "Unable to allocate 8. GiB for an array"
    )
    assert explain_exhaustion(MemoryError("the device is full")) is None
    pinned = RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")
    assert explain_exhaustion(pinned) == "CUDA error: out of memory"
    recording = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    assert explain_exhaustion(recording) is None
    recording.__context__ = ERRORS["cuda"]
    assert explain_exhaustion(recording) == explain_exhaustion(ERRORS["cuda"])
    with pytest.raises(RuntimeError) as asked:
        torch.empty(2**45)
    assert "you tried to allocate 140737488355328 bytes" in str(explain_exhaustion(asked.value))


def run_out_once(llm: Any, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The next forward, or the next reading of tokens, asks a real allocator for more than there is."""
    runner, left = llm._engine._runner, [1]

    def exhausted(act: Any) -> Any:
        return lambda *arguments: torch.empty(2**45) if left and left.pop() else act(*arguments)

    if where == "forward":
        monkeypatch.setattr(runner, "_model", exhausted(runner._model))
    else:
        start = runner._reader.start
        monkeypatch.setattr(runner._reader, "start", lambda sampled: exhausted(start(sampled)))


@pytest.mark.parametrize("where", ["forward", "reading"])
def test_offline_the_other_prompts_are_served(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    llm = make_llm(checkpoint, max_num_seqs=2)
    expected = llm.generate(PROMPTS, GREEDY)
    run_out_once(llm, monkeypatch, where)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.error is None for output in outputs[:3]] == [False, False, True]
    assert "tried to allocate" in outputs[0].error
    assert outputs[0].outputs[0].finish_reason == "error"
    assert [output.outputs[0].token_ids for output in outputs[2:]] == [
        output.outputs[0].token_ids for output in expected[2:]
    ]
    assert llm.generate(PROMPTS[:1], GREEDY)[0].outputs == expected[0].outputs


@pytest.mark.parametrize("where", ["forward", "reading"])
def test_online_the_engine_serves_on(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    async def main() -> None:
        async with make_async(checkpoint) as served:
            run_out_once(served, monkeypatch, where)
            (lost,) = await collect(served.add_request("a", PROMPTS[3], LONG))
            assert "tried to allocate" in lost.error
            assert lost.outputs[0].finish_reason == "error"
            assert served.is_running
            both = [collect(served.add_request(name, PROMPTS[3], LONG)) for name in "ab"]
            for outputs in await asyncio.gather(*both):
                assert outputs[-1].error is None
                assert outputs[-1].finished
            await served.drain()
        check_empty(served)

    run(main)


def test_a_search_whose_beams_do_not_fit_ends_alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(checkpoint)
    params = BeamSearchParams(beam_width=2, max_tokens=5)
    expected = llm.beam_search(PROMPTS[:2], params)
    rank, calls = BeamSearch._rank, []

    def exhausted(self: BeamSearch, *arguments: Any) -> Any:
        calls.append(1)
        return rank(self, *arguments) if len(calls) != 3 else torch.empty(2**45)

    monkeypatch.setattr(BeamSearch, "_rank", exhausted)
    lost, found = llm.beam_search(PROMPTS[:2], params)
    assert "too little memory to compare 2 beams: can't allocate memory: you tried to allocate" in lost.error
    assert lost.outputs[0].finish_reason == "error"
    assert [one.token_ids for one in found.outputs] == [one.token_ids for one in expected[1].outputs]
    assert llm._engine.scheduler.pool.num_referenced == 0
    (again,) = llm.beam_search(PROMPTS[:1], params)
    assert [one.token_ids for one in again.outputs] == [one.token_ids for one in expected[0].outputs]
