"""Beam search on forks against beam search by brute force: every hypothesis from scratch, all continuations sorted."""

from __future__ import annotations

import dataclasses
import itertools
import random
import zlib
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
import torch

from tests.tsched.hash_model import HashModel, hash_cache
from tests.tsched.schedulers import build_scheduler
from tkernels.runtime import HostRuntime
from tmodel.kv_cache import KVCache
from tsched.execution.beam_search import BeamSearch, BeamSearchParams, Hypothesis, select_largest
from tsched.execution.engine import Engine
from tsched.execution.model_runner import ModelRunner
from tsched.execution.request import Request
from tsched.requests.errors import RefusedError
from tsched.requests.sampling_params import SamplingParams

BLOCK_SIZE = 4
LogprobsAfter = Callable[[list[int]], torch.Tensor]


class Levels(HashModel):
    """Logits that are a hash of all tokens, on few `levels`, so that sums often tie."""

    dtype = torch.float64

    def __init__(self, vocab_size: int, levels: int, seed: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.levels = levels
        self.seed = seed

    def logits_after(self, tokens: np.ndarray) -> torch.Tensor:
        digest = zlib.crc32(np.ascontiguousarray(tokens, dtype=np.int64).tobytes(), self.seed)
        drawn = np.random.default_rng(digest).integers(0, self.levels, self.vocab_size)
        return torch.from_numpy(drawn * (4.0 / self.levels))

    def logprobs_after(self, tokens: list[int]) -> torch.Tensor:
        return self.logits_after(np.array(tokens)).log_softmax(dim=-1)


class Pages:
    """Copies pages within the stub's cache."""

    def __init__(self, kv_cache: KVCache) -> None:
        self.kv_cache = kv_cache
        self.num_copied = 0

    def copy(self, pages: np.ndarray) -> None:
        src, dst = pages.astype(np.int64)
        for cache in itertools.chain(*self.kv_cache):
            cache[dst] = cache[src]
        self.num_copied += src.size

    def swap_out(self, pages: np.ndarray) -> None:
        raise AssertionError("nothing is swapped here")

    swap_in = swap_out


def make_engine(model: HashModel, num_blocks: int, *, max_num_seqs: int = 32, **options: object) -> Engine:
    scheduler = build_scheduler(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_model_len=64,
        **options,
    )
    kv_cache = hash_cache(num_blocks, BLOCK_SIZE)
    return Engine(scheduler, ModelRunner(model, kv_cache, scheduler, runtime=HostRuntime(), pages=Pages(kv_cache)))


def by_brute_force(
    logprobs_after: LogprobsAfter, prompt: list[int], params: BeamSearchParams, ends: set[int]
) -> list[Hypothesis]:
    """The definition, without a cache and without stopping early."""
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[Hypothesis] = []
    for length in range(1, params.max_tokens + 1):
        continuations = []
        for tokens, total in live:
            logprobs = logprobs_after([*prompt, *tokens]).tolist()
            continuations += [((*tokens, token), total + logprob) for token, logprob in enumerate(logprobs)]
        live = []
        for tokens, total in sorted(continuations, key=lambda one: -one[1]):  # stable
            if len(live) == params.beam_width:
                break
            if tokens[-1] in ends and not params.ignore_eos:
                finished.append(Hypothesis(tokens, total, "stop"))
            elif length == params.max_tokens:
                live.append((tokens, total))
                finished.append(Hypothesis(tokens, total, "length"))
            else:
                live.append((tokens, total))
    score = [one.logprob / len(one.token_ids) ** params.length_penalty for one in finished]
    order = sorted(range(len(finished)), key=lambda i: -score[i])
    return [finished[i] for i in order[: params.beam_width]]


def search(engine: Engine, prompts: list[list[int]], params: BeamSearchParams, ends: set[int]) -> list[BeamSearch]:
    ids = count(1000)
    searches = [BeamSearch(engine, prompt, params, next_id=lambda: next(ids), eos_token_ids=ends) for prompt in prompts]
    for one in searches:
        one.begin(arrival_time=0.0)
    while not all(one.is_over for one in searches):
        engine.step()
        for one in searches:
            one.advance()
    return searches


def check_nothing_is_left(engine: Engine) -> None:
    assert not engine.has_unfinished
    pool = engine.scheduler.pool
    assert pool.num_referenced == 0
    assert pool.num_free + pool.num_cached == pool.num_blocks


def draw_params(rng: random.Random) -> tuple[BeamSearchParams, set[int]]:
    params = BeamSearchParams(
        beam_width=rng.choice([1, 2, 3, 4, 7]),
        max_tokens=rng.randint(1, 12),
        length_penalty=rng.choice([1.0, 0.0, 0.6, 2.0, -0.5]),
        ignore_eos=rng.random() < 0.2,
    )
    return params, set(rng.sample(range(6), rng.choice([0, 1, 2])))


@pytest.mark.parametrize("prefix_cache", ["none", "hash", "radix"])
@pytest.mark.parametrize("num_blocks", [200, 22])
def test_the_beams_are_those_of_brute_force(num_blocks: int, prefix_cache: str) -> None:
    """Ties everywhere; with few blocks beams wait, give way and are computed again."""
    rng = random.Random(num_blocks)
    num_copied = num_preempted = num_early = 0
    for seed in range(25):
        model = Levels(rng.choice([6, 11]), rng.choice([2, 3, 50]), seed)
        params, ends = draw_params(rng)
        engine = make_engine(model, num_blocks, prefix_cache=prefix_cache)
        prompts = [[rng.randrange(6) for _ in range(rng.randint(1, 11))] for _ in range(2)]
        for prompt, one in zip(prompts, search(engine, prompts, params, ends), strict=True):
            expected = by_brute_force(model.logprobs_after, prompt, params, ends)
            assert one.error is None
            assert [(h.token_ids, h.finish_reason) for h in one.finished] == [
                (h.token_ids, h.finish_reason) for h in expected
            ]
            assert [h.logprob for h in one.finished] == pytest.approx([h.logprob for h in expected], abs=1e-12)
            num_early += max(len(h.token_ids) for h in one.finished) < params.max_tokens
        check_nothing_is_left(engine)
        num_copied += engine._runner._pages.num_copied
        num_preempted += engine.stats().num_preemptions
    assert num_copied > 20, "beams that share a last page must copy it before they write"
    assert num_early > 0
    assert (num_preempted > 0) == (num_blocks == 22)


@pytest.mark.parametrize("num_blocks", [200, 22])
@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(55, 12), (60, 2**31 - 1), (63, 5)])
def test_the_models_length_ends_hypotheses(prompt_len: int, max_tokens: int, num_blocks: int) -> None:
    """As it does requests: at 64 tokens, prompt and output together. With few blocks beams end while others wait."""
    prompts = [[(i * k) % 6 for i in range(prompt_len)] for k in (1, 5)]
    for ends in (set(), {2, 3}):
        model, params = Levels(6, 50, seed=4), BeamSearchParams(beam_width=4, max_tokens=max_tokens)
        engine = make_engine(model, num_blocks)
        within = dataclasses.replace(params, max_tokens=64 - prompt_len)
        for prompt, one in zip(prompts, search(engine, prompts, params, ends), strict=True):
            expected = by_brute_force(model.logprobs_after, prompt, within, ends)
            assert one.error is None
            assert [(h.token_ids, h.finish_reason) for h in one.finished] == [
                (h.token_ids, h.finish_reason) for h in expected
            ]
        check_nothing_is_left(engine)


def test_no_request_of_a_beam_may_run_past_the_longest_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for the others goes on by itself meanwhile, and takes blocks for what nobody asked for."""
    engine, longest = make_engine(Levels(6, 50, seed=4), 100), set[int]()
    fork = engine.fork

    def note(*arguments: object, **options: object) -> Request:
        request = fork(*arguments, **options)
        longest.add(request.sequence.max_length)
        return request

    monkeypatch.setattr(engine, "fork", note)
    (one,) = search(engine, [[1, 2, 3]], BeamSearchParams(beam_width=2, max_tokens=6), set())
    assert len(one.finished[0].token_ids) == 6
    assert longest == {3 + 6}


def test_what_the_engine_refuses_ends_one_search_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, params = Levels(11, 1000, seed=9), BeamSearchParams(beam_width=4, max_tokens=9)
    engine = make_engine(model, 100)
    fork, calls = engine.fork, count()

    def refuses(request_id: int, *arguments: object, **options: object) -> Request:
        if engine._requests[request_id].sequence.prompt_len == 2 and next(calls) == 6:
            raise RefusedError("no room for the seventh fork")
        return fork(request_id, *arguments, **options)

    monkeypatch.setattr(engine, "fork", refuses)
    bad, good = search(engine, [[1, 2], [3, 1, 4]], params, set())
    assert bad.error == "no room for the seventh fork"
    expected = by_brute_force(model.logprobs_after, [3, 1, 4], params, set())
    assert [h.token_ids for h in good.finished] == [h.token_ids for h in expected]
    check_nothing_is_left(engine)


def test_a_beam_as_wide_as_the_tree_finds_the_best_output_of_all() -> None:
    model = Levels(4, 1000, seed=3)
    params = BeamSearchParams(beam_width=64, max_tokens=3, length_penalty=0.0)
    (one,) = search(make_engine(model, 400, max_num_seqs=64), [[1, 2]], params, set())
    outputs = {}
    for output in itertools.product(range(4), repeat=3):
        outputs[output] = sum(float(model.logprobs_after([1, 2, *output[:i]])[output[i]]) for i in range(3))
    best = sorted(outputs, key=lambda output: -outputs[output])
    assert [h.token_ids for h in one.finished] == best
    assert one.finished[0].logprob == pytest.approx(outputs[best[0]], abs=1e-12)


def test_one_beam_is_greedy() -> None:
    model = Levels(11, 1000, seed=5)
    engine = make_engine(model, 50)
    (one,) = search(engine, [[1, 2, 3]], BeamSearchParams(beam_width=1, max_tokens=12), set())
    request = engine.add(0, [1, 2, 3], SamplingParams(temperature=0, max_tokens=12))
    while engine.has_unfinished:
        engine.step()
    assert list(one.finished[0].token_ids) == request.sequence.output_token_ids
    assert engine._runner._pages.num_copied == 0


def test_the_prompt_is_computed_once_and_its_blocks_are_shared() -> None:
    model = Levels(11, 50, seed=1)
    engine = make_engine(model, 100)
    prompt = list(range(6)) * 6  # 36 tokens, 9 blocks
    params = BeamSearchParams(beam_width=8, max_tokens=8)
    search(engine, [prompt], params, set())
    stats = engine.stats()
    assert stats.num_prefill_tokens == 36
    assert stats.num_steps == 8
    assert stats.num_decode_tokens == 8 * 7
    assert stats.peak_used_blocks <= 9 + 8 * 2 + 8  # eight prompts alone would take 72


def test_other_requests_are_not_disturbed() -> None:
    model = Levels(11, 1000, seed=9)
    params = SamplingParams(temperature=0, max_tokens=20)
    alone = make_engine(model, 60)
    expected = alone.add(0, [3, 1, 4], params)
    while alone.has_unfinished:
        alone.step()
    engine = make_engine(model, 60)
    beside = engine.add(0, [3, 1, 4], params)
    (one,) = search(engine, [[1, 2]], BeamSearchParams(beam_width=4, max_tokens=9), set())
    while engine.has_unfinished:
        engine.step()
    assert beside.sequence.output_token_ids == expected.sequence.output_token_ids
    wanted = by_brute_force(model.logprobs_after, [1, 2], BeamSearchParams(beam_width=4, max_tokens=9), set())
    assert [h.token_ids for h in one.finished] == [h.token_ids for h in wanted]


class Breaks(Levels):
    def logits_after(self, tokens: np.ndarray) -> torch.Tensor:
        logits = super().logits_after(tokens)
        return logits * torch.nan if tokens.size >= 6 else logits


def test_logits_that_are_not_finite_end_the_search_with_that_error() -> None:
    engine = make_engine(Breaks(11, 1000, seed=9), 60)
    (one,) = search(engine, [[1, 2]], BeamSearchParams(beam_width=4, max_tokens=9), set())
    assert "are not finite" in one.error
    check_nothing_is_left(engine)


def test_an_aborted_search_leaves_nothing() -> None:
    engine = make_engine(Levels(11, 1000, seed=9), 60)
    ids = count()
    one = BeamSearch(
        engine, [1, 2], BeamSearchParams(beam_width=4, max_tokens=9), next_id=lambda: next(ids), eos_token_ids=()
    )
    one.begin(arrival_time=0.0)
    for _ in range(4):
        engine.step()
        one.advance()
    assert not one.is_over
    one.abort()
    assert one.is_over
    check_nothing_is_left(engine)


def test_the_largest_break_ties_by_place() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0], [3.0, -torch.inf, 1.0]], dtype=torch.float64)
    assert select_largest(values, 2) == [(0, 1, 3.0), (0, 2, 3.0)]
    assert select_largest(values, 4) == [(0, 1, 3.0), (0, 2, 3.0), (1, 0, 3.0), (0, 0, 1.0)]
    assert len(select_largest(values, 100)) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beam_width": 0}, "beam_width must be an integer from 1 to 128, got 0"),
        ({"beam_width": 129}, "beam_width must be"),
        ({"beam_width": 2.0}, "beam_width must be"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1"),
        ({"max_tokens": True}, "max_tokens must be"),
        ({"max_tokens": 2**31}, "max_tokens must be an integer of at least 1 and at most 2147483647"),
        ({"length_penalty": float("nan")}, "length_penalty must be a number from -16 to 16"),
        ({"length_penalty": 17}, "length_penalty must be"),
        ({"length_penalty": "1"}, "length_penalty must be"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False"),
    ],
)
def test_bad_params_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **arguments})
