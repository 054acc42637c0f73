"""The engine one step behind the device: what happens when, what is dropped, what is left behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tests.tsched.hash_model import HashModel, hash_cache
from tests.tsched.schedulers import build_scheduler
from tests.tsched.simulated_device import VOCAB, check_accounts, tokens_alone
from tests.tsched.test_engine import GREEDY, MAX_MODEL_LEN, build_engine, run, spell
from tkernels.runtime import EagerRecorder, HostRuntime
from tmodel.batch import Batch
from tmodel.kv_cache import KVCache
from tsched.execution.engine import Engine
from tsched.execution.model_runner import ModelRunner
from tsched.execution.readback import HostReader, Outcome, Readback
from tsched.execution.sampler import Sampled
from tsched.requests.detokenizer import IncrementalDetokenizer
from tsched.requests.sampling_params import SamplingParams


class Observed(HashModel):
    """Notes in `events` when a forward is launched, and with `reader` when tokens are copied and waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.num_copies = 0

    def __call__(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        self.events.append(f"forward {len(self.batches)}")
        return super().__call__(batch, kv_cache)

    def reader(self) -> HostReader:
        model = self

        class Reader(HostReader):
            def start(self, sampled: Sampled) -> Readback:
                number = model.num_copies
                model.num_copies += 1
                model.events.append(f"copy {number}")
                wait = super().start(sampled)

                def observed() -> Outcome:
                    model.events.append(f"wait {number}")
                    return wait()

                return observed

        return Reader(HostRuntime())


def observed_engine(overlap: bool) -> tuple[Engine, Observed]:
    model = Observed()
    engine = build_engine(model, overlap=overlap)
    engine._runner._reader = model.reader()
    return engine, model


def test_the_next_forward_is_launched_before_the_last_tokens_are_waited_for() -> None:
    plain, in_turn = observed_engine(overlap=False)
    late, ahead = observed_engine(overlap=True)
    for engine in (plain, late):
        engine.add(0, [1, 2], SamplingParams(max_tokens=3, **GREEDY))
        run(engine)
    assert in_turn.events == ["forward 0", "copy 0", "wait 0", "forward 1", "copy 1", "wait 1", "forward 2", "copy 2", "wait 2"]  # fmt: skip # noqa: E501
    # The last step has nobody to run beside it: its sequence's length was known ahead.
    assert ahead.events == ["forward 0", "copy 0", "forward 1", "wait 0", "copy 1", "forward 2", "wait 1", "copy 2", "wait 2"]  # fmt: skip # noqa: E501


def test_tokens_past_a_stop_are_dropped() -> None:
    """An end-of-sequence, a stop id and a stop string are seen one step late; the step after is not part of the
    output, nor of the counts.
    """
    prompt = next(p for p in ([i] for i in range(1, VOCAB)) if 3 < len(end_alone(p)) < 20)
    stopping = end_alone(prompt)
    free, _ = tokens_alone(prompt, SamplingParams(max_tokens=20, ignore_eos=True), MAX_MODEL_LEN)
    text = spell(free)
    stop = text[2:4]
    cases: list[tuple[SamplingParams, list[int]]] = [
        (SamplingParams(temperature=0, max_tokens=20), stopping),
        (SamplingParams(stop_token_ids=[free[2]], max_tokens=20, **GREEDY), free[: free.index(free[2]) + 1]),
        (SamplingParams(stop=[stop], max_tokens=20, **GREEDY), free[: text.index(stop) + 2]),
    ]
    for params, tokens in cases:
        engine = build_engine(overlap=True)
        detokenizer = IncrementalDetokenizer(spell, params.stop_strings) if params.stop_strings else None
        engine.add(0, prompt, params, detokenizer=detokenizer)
        (request,) = run(engine)
        assert request.sequence.output_token_ids == tokens
        assert request.sequence.finish_reason == "stop"
        assert engine.stats().num_output_tokens == len(tokens)
        assert engine.stats().num_steps == len(tokens) + 1, "one step ran ahead of the stop"
        assert_nothing_left(engine)


def end_alone(prompt: list[int]) -> list[int]:
    return tokens_alone(prompt, SamplingParams(max_tokens=20), MAX_MODEL_LEN)[0]


def assert_nothing_left(engine: Engine) -> None:
    assert not engine.has_unfinished
    assert engine._launched is None
    assert not engine.scheduler._in_flight
    assert engine.scheduler.pool.num_referenced == 0
    check_accounts(engine.scheduler)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_logits_processor_sees_every_token_once_and_none_past_the_end(overlap: bool) -> None:
    class Remember:
        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def __call__(self, prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
            self.seen.append(output.tolist())
            logits[int(logits.argmax())] = -torch.inf  # so the second best, and another text than anyone's alone
            return logits

    prompt, remember = [4], Remember()
    engine = build_engine(overlap=overlap, max_num_seqs=2)
    engine.add(0, prompt, SamplingParams(max_tokens=25, temperature=0, logits_processors=[remember]))
    engine.add(1, [5, 6], SamplingParams(max_tokens=25, **GREEDY))
    requests = {r.sequence.id: r for r in run(engine)}
    output = requests[0].sequence.output_token_ids
    assert remember.seen == [output[:n] for n in range(len(output))]
    assert output != end_alone(prompt)[: len(output)]
    assert requests[1].sequence.output_token_ids == tokens_alone([5, 6], requests[1].sequence.params, MAX_MODEL_LEN)[0]


def draw_params(rng: np.random.Generator) -> tuple[SamplingParams, IncrementalDetokenizer | None]:
    kind = rng.integers(5)
    common: dict[str, Any] = {"max_tokens": int(rng.integers(1, 25))}
    if kind == 0:
        return SamplingParams(temperature=0, **common), None
    if kind == 1:
        return SamplingParams(seed=int(rng.integers(99)), top_k=5, temperature=2.0, **common), None
    if kind == 2:
        return SamplingParams(temperature=0, frequency_penalty=1.5, repetition_penalty=1.3, logprobs=2, **common), None
    if kind == 3:
        return SamplingParams(
            temperature=0, stop_token_ids=[3, 7], min_tokens=common["max_tokens"] // 2, **common
        ), None
    stop = chr(ord("a") + int(rng.integers(VOCAB)))
    return SamplingParams(temperature=0, stop=[stop], **common), IncrementalDetokenizer(spell, [stop])


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_arrivals_and_aborts_give_the_tokens_of_a_plain_engine(seed: int, graphs: bool) -> None:
    """The same requests and aborts in an engine that waits for each token, in one that runs ahead, under pressure."""
    rng = np.random.default_rng(seed)
    requests = [
        (
            number,
            [int(t) for t in rng.integers(0, VOCAB, rng.integers(1, 15))],
            *draw_params(rng),
            int(rng.integers(60)),
        )
        for number in range(40)
    ]
    aborts = {int(rng.integers(40)): int(rng.integers(70)) for _ in range(8)}
    answers = []
    for overlap in (False, True):
        engine = build_engine(overlap=overlap, cuda_graphs=graphs, num_blocks=18, max_num_seqs=5, seed=seed)
        entered = {}
        for step in range(4000):
            for number, prompt, params, _, arrives in requests:
                if arrives == step:
                    stops = IncrementalDetokenizer(spell, params.stop_strings) if params.stop_strings else None
                    entered[number] = engine.add(number, prompt, params, detokenizer=stops)
                if aborts.get(number) == step:
                    engine.abort(number)
            engine.step()
            check_accounts(engine.scheduler)
            if step > 70 and not engine.has_unfinished:
                break
        assert_nothing_left(engine)
        answers.append(
            {
                number: (
                    r.sequence.output_token_ids,
                    r.sequence.finish_reason,
                    r.logprobs,
                    r.detokenizer and r.detokenizer.text,
                )
                for number, r in entered.items()
            }
        )
        assert engine.stats().num_preemptions > 0
    for number, (tokens, reason, logprobs, text) in answers[0].items():
        ahead = answers[1][number]
        if "abort" in (reason, ahead[1]):  # it was cut off after another number of tokens
            length = min(len(tokens), len(ahead[0]))
            assert tokens[:length] == ahead[0][:length]
        else:
            assert ahead == (tokens, reason, logprobs, text)


def test_the_last_abort_leaves_no_step_under_way() -> None:
    for steps in range(1, 6):
        engine = build_engine(overlap=True)
        engine.add(0, [1, 2, 3], SamplingParams(max_tokens=20, **GREEDY))
        for _ in range(steps):
            engine.step()
        assert engine._launched is not None
        engine.abort(0)
        assert_nothing_left(engine)
        engine.add(1, [4], SamplingParams(max_tokens=3, **GREEDY))
        (request,) = run(engine)
        assert request.sequence.output_token_ids == tokens_alone([4], request.sequence.params, MAX_MODEL_LEN)[0]


def test_overlap_can_be_switched_off_and_on_between_steps() -> None:
    engine = build_engine(overlap=True)
    for i in range(3):
        engine.add(i, [i + 1, 2], SamplingParams(max_tokens=20, **GREEDY))
    finished = []
    for step in range(60):
        engine.overlap = step % 5 < 2
        finished += engine.step()
        assert (engine._launched is not None) == (engine.overlap and engine.has_unfinished)
    assert sorted(r.sequence.id for r in finished) == [0, 1, 2]
    for request in finished:
        expected = tokens_alone([request.sequence.id + 1, 2], request.sequence.params, MAX_MODEL_LEN)[0]
        assert request.sequence.output_token_ids == expected
    assert_nothing_left(engine)


class CountingRecorder(EagerRecorder):
    num_recorded = 0

    def record(self, run: Any) -> Any:
        self.num_recorded += 1
        return super().record(run)


@dataclass
class OrderedRecorder(EagerRecorder):
    """Runs what it records, as a GPU's does, and has memory for `most`."""

    most: int = 100
    rows: list[int] = field(default_factory=list)

    def record(self, run: Any) -> Any:
        if len(self.rows) == self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has")
        self.rows.append(run().shape[0])
        return run


def test_decode_steps_replay_one_graph_for_each_bucket() -> None:
    model = HashModel()
    engine = build_engine(model, cuda_graphs=True, max_num_seqs=12, num_blocks=100)
    graphs = engine._runner._graphs
    assert graphs is not None
    graphs._recorder = recorder = CountingRecorder()
    for i in range(7):
        engine.add(i, [i + 1], SamplingParams(max_tokens=4 + 2 * i, **GREEDY))
    finished = run(engine)
    for request in finished:
        expected = tokens_alone([request.sequence.id + 1], request.sequence.params, MAX_MODEL_LEN)[0]
        assert request.sequence.output_token_ids == expected
    assert graphs.buckets == [1, 2, 4, 8, 12]
    assert graphs.recorded == [(1, 60, False), (2, 60, False), (4, 60, False), (8, 60, False)]
    assert recorder.num_recorded == 4
    decodes = [batch for batch in model.batches if batch.cu_seqlens_q.numel() == 1]
    assert {batch.num_decodes for batch in decodes} == {1, 2, 4, 8}
    assert {batch.max_context_len for batch in decodes} == {60}
    # A replay finds its inputs where the recording found them.
    for name in ("block_tables", "logit_indices"):
        assert len({getattr(batch, name).data_ptr() for batch in decodes}) == 1


def test_graphs_recorded_at_the_start_are_all_there_largest_first_and_change_no_token() -> None:
    model = HashModel()
    engine = build_engine(model, cuda_graphs=True, max_num_seqs=12, num_blocks=100)
    graphs = engine._runner._graphs
    assert graphs is not None
    graphs._recorder = recorder = OrderedRecorder()
    told: list[tuple[int, int]] = []
    engine.record_graphs(lambda done, total: told.append((done, total)))
    assert recorder.rows == [12, 8, 4, 2, 1]
    assert told == [(done, 5) for done in range(6)]
    assert all(int(batch.slots.max()) == -1 for batch in model.batches), "padding is written nowhere"
    engine.record_graphs(lambda done, total: None)
    for i in range(7):
        engine.add(i, [i + 1], SamplingParams(max_tokens=4 + 2 * i, **GREEDY))
    for request in run(engine):
        expected = tokens_alone([request.sequence.id + 1], request.sequence.params, MAX_MODEL_LEN)[0]
        assert request.sequence.output_token_ids == expected
    assert recorder.rows == [12, 8, 4, 2, 1]


def test_graphs_that_memory_does_not_hold_at_the_start_are_left_to_their_first_use() -> None:
    engine = build_engine(HashModel(), cuda_graphs=True, max_num_seqs=4, num_blocks=40)
    graphs = engine._runner._graphs
    assert graphs is not None
    graphs._recorder = OrderedRecorder(most=2)
    told: list[tuple[int, int]] = []
    engine.record_graphs(lambda done, total: told.append((done, total)))
    assert (graphs.recorded, told[-1]) == ([(2, 60, False), (4, 60, False)], (2, 3))
    graphs._recorder = EagerRecorder()
    engine.add(0, [1], SamplingParams(max_tokens=4, **GREEDY))
    (request,) = run(engine)
    assert request.sequence.output_token_ids == tokens_alone([1], request.sequence.params, MAX_MODEL_LEN)[0]
    assert graphs.recorded == [(1, 60, False), (2, 60, False), (4, 60, False)]


def test_an_engine_on_a_cpu_waits_for_each_token_unless_it_is_told_not_to() -> None:
    scheduler = build_scheduler(num_blocks=4, block_size=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16)
    engine = Engine(scheduler, ModelRunner(HashModel(), hash_cache(4, 4), scheduler, runtime=HostRuntime()))
    assert not engine.overlap
    assert engine._runner._graphs is None
