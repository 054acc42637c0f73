"""The engine with a model that hashes its whole history: batches, tokens, text, errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from tests.tsched.hash_model import HashModel, HashPages, hash_cache
from tests.tsched.schedulers import build_scheduler
from tests.tsched.simulated_device import EOS, VOCAB, check_accounts, tokens_alone
from tkernels.runtime import HostRuntime
from tmodel.batch import Batch
from tmodel.kv_cache import KVCache
from tsched.execution.engine import Engine
from tsched.execution.model_runner import Forward, ModelRunner
from tsched.execution.request import Request
from tsched.requests.detokenizer import IncrementalDetokenizer
from tsched.requests.errors import RefusedError
from tsched.requests.sampling_params import SamplingParams

MAX_MODEL_LEN = 60


MODES: dict[str, dict[str, bool]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "graphs": {"cuda_graphs": True},
    "overlap_graphs": {"overlap": True, "cuda_graphs": True},
}
MakeEngine = Callable[..., Engine]


@pytest.fixture(params=MODES)
def make_engine(request: pytest.FixtureRequest) -> MakeEngine:
    """build_engine in one of the modes, which all give the same tokens."""
    return partial(build_engine, **MODES[request.param])


def build_engine(
    model: Forward | None = None, seed: int = 0, overlap: bool = False, cuda_graphs: bool = False, **changes: object
) -> Engine:
    arguments: dict = {
        "num_blocks": 30,
        "block_size": 4,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 20,
        "max_model_len": MAX_MODEL_LEN,
        "eos_token_ids": (EOS,),
    }
    arguments |= changes
    cache = hash_cache(arguments["num_blocks"], arguments["block_size"])
    scheduler = build_scheduler(**arguments)
    runner = ModelRunner(
        model or HashModel(),
        cache,
        scheduler,
        pages=HashPages(cache, int(arguments.get("num_host_blocks", 0))),
        runtime=HostRuntime(),
        seed=seed,
        eos_token_ids=arguments["eos_token_ids"],
        cuda_graphs=cuda_graphs,
    )
    return Engine(scheduler, runner, overlap=overlap)


def run(engine: Engine, *, sharing: bool = False) -> list[Request]:
    """Serve to the end; the accounts are checked where no two sequences share a block."""
    finished = []
    while engine.has_unfinished:
        finished += engine.step()
        if not sharing:
            check_accounts(engine.scheduler)
    return finished


def spell(token_ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token_id) for token_id in token_ids)


GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize("num_blocks", [14, 60])
@pytest.mark.parametrize("budget", [3, 64])
def test_greedy_requests_get_the_tokens_they_get_alone(num_blocks: int, budget: int, make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=num_blocks, max_num_batched_tokens=budget)
    wanted = []
    for i in range(12):
        prompt = [(7 * i + j) % VOCAB for j in range(1 + 5 * i % 17)]
        params = SamplingParams(temperature=0, max_tokens=1 + 3 * i, ignore_eos=bool(i % 2))
        engine.add(i, prompt, params)
        wanted.append((prompt, params))
    finished = run(engine)
    assert sorted(r.sequence.id for r in finished) == list(range(12))
    for request in finished:
        sequence = request.sequence
        expected = tokens_alone(*wanted[sequence.id], MAX_MODEL_LEN)
        assert (sequence.output_token_ids, sequence.finish_reason) == expected
        assert request.arrival_time <= request.first_token_time <= request.finish_time
    stats = engine.stats()
    assert stats.num_output_tokens == sum(len(r.sequence.output_token_ids) for r in finished)
    assert (stats.num_used_blocks, stats.num_finished) == (0, 12)
    assert 0 < stats.peak_occupancy <= 1
    assert 0 < stats.last_page_waste < 1
    assert (stats.num_preemptions > 0) == (num_blocks == 14)


def test_sampled_requests_do_not_depend_on_their_company(make_engine: MakeEngine) -> None:
    """Under pressure, in company, split and preempted: the tokens are those of the request alone."""
    params = [
        SamplingParams(max_tokens=20, seed=1),
        SamplingParams(max_tokens=25, temperature=2.0, top_p=0.9, repetition_penalty=1.2),
        SamplingParams(max_tokens=15, top_k=5, frequency_penalty=0.5, logprobs=2),
        SamplingParams(max_tokens=20, temperature=0, presence_penalty=1.0),
        SamplingParams(max_tokens=30, min_p=0.1, min_tokens=12),
        SamplingParams(max_tokens=20, temperature=0),
    ]
    prompts = [[i + 1] * (3 + 4 * i) for i in range(6)]
    crowded = make_engine(num_blocks=17, max_num_batched_tokens=7, seed=3)
    for i in range(6):
        crowded.add(i, prompts[i], params[i])
    together = {r.sequence.id: r for r in run(crowded)}
    assert crowded.stats().num_preemptions > 0
    for i in range(6):
        lonely = make_engine(seed=3)
        lonely.add(i, prompts[i], params[i])
        (alone,) = run(lonely)
        assert alone.sequence.output_token_ids == together[i].sequence.output_token_ids
        assert alone.logprobs == together[i].logprobs
    assert len(together[4].sequence.output_token_ids) > 12
    assert len(together[2].logprobs) == len(together[2].sequence.output_token_ids)
    assert not together[0].logprobs


@pytest.mark.parametrize("num_host_blocks", [4, 40])
def test_swapped_requests_get_the_tokens_they_get_alone(make_engine: MakeEngine, num_host_blocks: int) -> None:
    engine = make_engine(num_blocks=14, preemption="swap", num_host_blocks=num_host_blocks)
    params = SamplingParams(max_tokens=30, **GREEDY)
    for i in range(8):
        engine.add(i, [i + 1, *range(i)], params)
    for request in run(engine):
        number = request.sequence.id
        assert request.sequence.output_token_ids == tokens_alone([number + 1, *range(number)], params, MAX_MODEL_LEN)[0]
    pages = engine._runner._pages
    assert isinstance(pages, HashPages)
    assert pages.moved["swap_out"] > 0
    assert 0 < pages.moved["swap_in"] <= pages.moved["swap_out"]


@pytest.mark.parametrize("prefix_cache", ["none", "hash", "radix"])
def test_shared_prefixes_and_samples_of_one_prompt(make_engine: MakeEngine, prefix_cache: str) -> None:
    """A prompt of five pages: three samples of it, which fork, then requests that find it in the cache."""
    engine = make_engine(prefix_cache=prefix_cache, num_blocks=40)
    prompt = [(3 * i) % VOCAB for i in range(18)]
    params = [SamplingParams(max_tokens=12, temperature=3.0, seed=s, ignore_eos=True) for s in range(3)]
    engine.add_group([0, 1, 2], prompt, params, detokenizers=[None] * 3)
    together = {r.sequence.id: r.sequence.output_token_ids for r in run(engine, sharing=True)}
    for i in range(3):
        engine.add(10 + i, prompt, params[i])
        engine.step()
    together |= {r.sequence.id: r.sequence.output_token_ids for r in run(engine, sharing=True)}
    for i in range(3):
        alone = build_engine()
        alone.add(0, prompt, params[i])
        (request,) = run(alone)
        assert together[i] == together[10 + i] == request.sequence.output_token_ids
    pages = engine._runner._pages
    assert isinstance(pages, HashPages)
    assert pages.moved["copy"] == 2, "the first writer of each shared page but the last copies it"
    stats = engine.stats()
    assert (stats.prefix_cache.hit_tokens > 0) == (prefix_cache != "none")
    keys, values = engine._runner._kv_cache[0]
    a_token = keys[0, 0].nbytes + values[0, 0].nbytes
    assert stats.saved_bytes == stats.prefix_cache.hit_tokens * a_token * len(engine._runner._kv_cache)
    assert stats.num_forks == 2
    assert stats.num_blocks_copied == 2
    assert stats.peak_used_blocks > 0
    engine.reset_peak()
    assert engine.stats().peak_used_blocks == 0


def test_decode_rows_come_first_in_the_batch(make_engine: MakeEngine) -> None:
    model = HashModel()
    engine = make_engine(model, max_num_batched_tokens=8)
    engine.add(0, [1], SamplingParams(max_tokens=8, **GREEDY))
    engine.step()
    engine.add(1, list(range(1, 12)), SamplingParams(max_tokens=2, **GREEDY))
    engine.step()
    batch = model.batches[1]
    assert batch.num_decodes == 1
    assert batch.cu_seqlens_q.tolist() == [0, 7]
    assert batch.positions.tolist() == [1, *range(7)]
    assert batch.context_lens.tolist() == [2, 7]
    assert batch.logit_indices.tolist() == [0]
    dtypes = {name: getattr(batch, name).dtype for name in ("token_ids", "positions", "slots", "logit_indices")}
    assert set(dtypes.values()) == {torch.int64}
    assert {batch.block_tables.dtype, batch.context_lens.dtype, batch.cu_seqlens_q.dtype} == {torch.int32}


def test_a_stop_string_ends_a_request_and_cuts_its_text(make_engine: MakeEngine) -> None:
    prompt = [1, 2, 3]
    tokens, _ = tokens_alone(prompt, SamplingParams(max_tokens=12, ignore_eos=True), MAX_MODEL_LEN)
    text = spell(tokens)
    stop = text[4:7]
    end = text.index(stop) + 3
    for max_tokens in (12, end):  # at `end` the length and the string end it together
        engine = make_engine()
        params = SamplingParams(max_tokens=max_tokens, stop=[stop], **GREEDY)
        engine.add(0, prompt, params, detokenizer=IncrementalDetokenizer(spell, [stop]))
        engine.add(1, prompt, SamplingParams(max_tokens=12, **GREEDY))
        stopped, other = run(engine)
        assert stopped.sequence.finish_reason == "stop"
        assert stopped.sequence.output_token_ids == tokens[:end]
        assert stopped.detokenizer.text == text[: end - 3]
        assert (other.sequence.finish_reason, other.sequence.output_token_ids) == ("length", tokens)


def test_min_tokens_holds_every_kind_of_stop_back(make_engine: MakeEngine) -> None:
    prompt = [1, 2, 3]
    tokens, _ = tokens_alone(prompt, SamplingParams(max_tokens=12, ignore_eos=True), MAX_MODEL_LEN)
    stop = spell(tokens[:1])
    engine = make_engine()
    params = SamplingParams(max_tokens=12, min_tokens=3, stop=stop, **GREEDY)
    engine.add(0, prompt, params, detokenizer=IncrementalDetokenizer(spell, [stop]))
    engine.add(1, prompt, SamplingParams(max_tokens=12, min_tokens=5, stop_token_ids=[tokens[0]], **GREEDY))
    finished = {r.sequence.id: r.sequence.output_token_ids for r in run(engine)}
    assert len(finished[0]) > 3
    assert tokens[0] not in finished[1][:5]
    assert finished[1][0] == (tokens[0] + 1) % VOCAB, "the next most likely takes its place"


def test_a_stop_string_without_a_detokenizer_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(RefusedError, match="no tokenizer"):
        engine.add(0, [1], SamplingParams(stop="x"))
    assert not engine.has_unfinished


def test_a_fork_with_a_grammar_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(0, [1, 2], SamplingParams(max_tokens=5))
    params = SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(RefusedError, match="^a fork takes no structured_outputs"):
        engine.fork(0, 1, params, num_tokens=2)
    assert engine.num_unfinished == 1


def test_a_request_knows_when_it_first_got_a_row(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    first, second = (engine.add(i, [1, 2], SamplingParams(max_tokens=2, **GREEDY)) for i in range(2))
    run(engine)
    times = [(one.first_scheduled_time, one.first_token_time, one.finish_time) for one in (first, second)]
    assert sorted(times[0] + times[1]) == [*times[0], *times[1]], "the second gets the first one's row"


def test_abort_keeps_what_there_is(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(
        0, [1, 2], SamplingParams(max_tokens=9, stop="?", **GREEDY), detokenizer=IncrementalDetokenizer(spell, "?")
    )
    kept = engine.add(1, [1, 2], SamplingParams(max_tokens=9, **GREEDY))
    engine.step()
    engine.step()
    aborted = engine.abort(0)
    assert aborted.sequence.finish_reason == "abort"
    num_known = 1 if engine.overlap else 2  # the second step's token is under way, and is dropped
    assert len(aborted.sequence.output_token_ids) == len(aborted.detokenizer.text) == num_known
    assert engine.abort(0) is None
    assert run(engine) == [kept]


class BrokenFrom(HashModel):
    """Gives NaN for the sequence that starts with `first`, from its third output token on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def __call__(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        logits = super().__call__(batch, kv_cache)
        for i, index in enumerate(batch.logit_indices.tolist()):  # every row is sampled here, so row i is logits i
            begins = int(kv_cache[0][0][int(batch.block_tables[i, 0]), 0])
            if begins == self.first and int(batch.positions[index]) == 4:
                logits[i, 3] = torch.nan
        return logits


@pytest.mark.parametrize("max_tokens", [9, 3])
def test_logits_that_are_not_finite_end_that_request_alone(max_tokens: int, make_engine: MakeEngine) -> None:
    engine = make_engine(BrokenFrom(first=9))
    params = SamplingParams(max_tokens=max_tokens, logprobs=1, **GREEDY)
    for i, first in enumerate((8, 9)):
        engine.add(i, [first, 1, 2], params)
    finished = {r.sequence.id: r for r in run(engine)}
    broken, sound = finished[1], finished[0]
    assert broken.sequence.finish_reason == "error"
    assert "output token 2 are not finite" in broken.error
    assert broken.sequence.output_token_ids == tokens_alone([9, 1, 2], params, MAX_MODEL_LEN)[0][:2]
    assert len(broken.logprobs) == 2
    assert sound.error is None
    assert sound.sequence.output_token_ids == tokens_alone([8, 1, 2], params, MAX_MODEL_LEN)[0]


def test_an_engine_works_on_after_its_model_failed(make_engine: MakeEngine) -> None:
    class FailsOnce(HashModel):
        def __call__(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
            if len(self.batches) == 2:
                self.batches.append(batch)
                raise RuntimeError("out of memory")
            return super().__call__(batch, kv_cache)

    engine = make_engine(FailsOnce())
    params = SamplingParams(max_tokens=6, **GREEDY)
    engine.add(0, [1, 2], params)
    engine.step()
    engine.step()
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    assert not engine.has_unfinished
    check_accounts(engine.scheduler)
    engine.add(1, [1, 2], params)
    (request,) = run(engine)
    assert request.sequence.output_token_ids == tokens_alone([1, 2], params, MAX_MODEL_LEN)[0]
