"""The sampler against straightforward per-row references."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tkernels.simulated_cuda import DEVICE, SimulatedCuda
from tests.tkernels.simulated_streams import late
from tkernels.ops.sample._definition import reference
from tkernels.runtime import CudaRuntime, HostRuntime, Runtime
from tsched.execution.random_numbers import SeedTable, find_seed
from tsched.execution.readback import HostReader, Outcome
from tsched.execution.sampler import NONE_LEFT, NOT_FINITE, Sampler
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.block_pool import BlockPool
from tsched.scheduling.sequence import Sequence, SequenceTable

EOS = 3
PATHS = ("host", "cuda")
HOST = HostRuntime()


def sample_rows(
    logits: torch.Tensor,
    params: list[SamplingParams],
    known: list[tuple[list[int], list[int]]] | None = None,
    ids: list[int] | None = None,
    seed: int = 0,
    *,
    path: str = "host",
    inverse_cdf: bool = False,
) -> Outcome:
    """Sample once for rows whose (prompt, output) are `known`, on the host or a simulated device."""
    if path == "host":
        return sample_by(HOST, logits, params, known, ids, seed, inverse_cdf)
    with SimulatedCuda(late) as cuda, torch.inference_mode():
        runtime = CudaRuntime(DEVICE, cuda)
        return sample_by(runtime, runtime.send(logits.numpy()), params, known, ids, seed, inverse_cdf)


def sample_by(
    runtime: Runtime,
    logits: torch.Tensor,
    params: list[SamplingParams],
    known: list[tuple[list[int], list[int]]] | None,
    ids: list[int] | None,
    seed: int,
    inverse_cdf: bool,
) -> Outcome:
    known = known or [([1], [])] * len(params)
    table = SequenceTable(len(params), 200, 16)
    pool = BlockPool(len(params), 16)
    for i, (one, (prompt, output)) in enumerate(zip(params, known, strict=True)):
        sequence = Sequence((ids or list(range(len(params))))[i], prompt + output, one, 200)
        sequence.prompt_len = len(prompt)
        table.place(sequence, pool.allocate(1))
    sampler = Sampler(table, runtime, seed=seed, eos_token_ids=(EOS,), inverse_cdf=inverse_cdf)
    rows = np.arange(len(params))
    sampled = sampler.sample(logits, rows, np.array([len(p) + len(o) for p, o in known]))
    return HostReader(runtime).start(sampled)()


def reference_scores(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """vLLM's biases, penalties and bars, one token at a time; float64, in the order in which they are rounded."""
    scores = logits.copy()
    for token, bias in params.biases.items():
        scores[token] += scores.dtype.type(bias)
    scores = scores.astype(np.float64)
    repetition, frequency, presence = np.float32(
        (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    ).tolist()
    for token in set(prompt) | set(output):
        scores[token] = scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
    for token in set(output):
        scores[token] -= frequency * output.count(token)
        scores[token] -= presence
    if len(output) < params.min_tokens:
        scores[[*params.stop_ids, *([] if params.ignore_eos else [EOS])]] = -math.inf
    if params.allowed_ids is not None:
        scores[[token for token in range(len(scores)) if token not in params.allowed_ids]] = -math.inf
    for *before, last in params.bad_word_ids:
        if output[len(output) - len(before) :] == before and len(before) <= len(output):
            scores[last] = -math.inf
    return scores


def reference_token(scores: np.ndarray, params: SamplingParams, index: int, inverse_cdf: bool) -> int:
    """What the op's definition draws of scores [V]."""
    seed = np.array(params.seed, dtype=np.uint64).view(np.int64)
    floats = ([value] for value in (params.temperature, params.top_p, params.min_p))
    temperature, top_p, min_p = (torch.tensor(value, dtype=torch.float64) for value in floats)
    integers = ([value] for value in (max(params.top_k, 0), int(seed), index))
    top_k, seeds, indices = map(torch.tensor, integers)
    logits = torch.from_numpy(scores)[None]
    return int(reference(logits, temperature, top_k, top_p, min_p, seeds, indices, inverse_cdf=inverse_cdf))


sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.05, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 400]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.7]),
    presence_penalty=st.sampled_from([-1.5, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([-0.5, 0.0, 1.25]),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.sampled_from([(), (2, 5)]),
    ignore_eos=st.booleans(),
    logit_bias=st.sampled_from([None, {0: 100.0}, {1: -100.0, 4: 2.5}, {6: 0.25, **dict.fromkeys(range(5), -3)}]),
    allowed_token_ids=st.sampled_from([None, (2,), (1, 3, 6), range(1, 7)]),
    bad_words=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), max_size=12),
    seed=st.integers(0, 2**64 - 1),
)
known_tokens = st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=9), st.lists(st.integers(0, 6), max_size=9))


drawn_rows = given(
    rows=st.lists(st.tuples(sampling, known_tokens), min_size=1, max_size=5),
    vocab_size=st.sampled_from([7, 300, 1000]),
    seed=st.integers(0, 99),
    inverse_cdf=st.booleans(),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@drawn_rows
def test_every_row_follows_its_reference(
    rows: list[tuple[SamplingParams, tuple[list[int], list[int]]]], vocab_size: int, seed: int, inverse_cdf: bool
) -> None:
    check_rows(rows, vocab_size, seed, inverse_cdf, "host")


@settings(max_examples=10, deadline=None, derandomize=True)
@drawn_rows
def test_every_row_follows_its_reference_on_a_device(
    rows: list[tuple[SamplingParams, tuple[list[int], list[int]]]], vocab_size: int, seed: int, inverse_cdf: bool
) -> None:
    check_rows(rows, vocab_size, seed, inverse_cdf, "cuda")


def check_rows(
    rows: list[tuple[SamplingParams, tuple[list[int], list[int]]]],
    vocab_size: int,
    seed: int,
    inverse_cdf: bool,
    path: str,
) -> None:
    logits = 4 * torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(seed))
    params, known = [p for p, _ in rows], [k for _, k in rows]
    before = logits.clone()
    sampled = sample_rows(logits, params, known, path=path, inverse_cdf=inverse_cdf).token_ids
    assert torch.equal(logits, before)
    for i, (one, (prompt, output)) in enumerate(rows):
        scores = reference_scores(logits[i].numpy(), one, prompt, output)
        expected = NONE_LEFT if scores.max() == -math.inf else reference_token(scores, one, len(output), inverse_cdf)
        assert sampled[i] == expected


@pytest.mark.parametrize("path", PATHS)
def test_the_batch_around_a_request_does_not_matter(path: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(12, 500, generator=generator)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=5),
        SamplingParams(top_k=300, top_p=0.9),
        SamplingParams(top_p=0.999, temperature=3.0),
        SamplingParams(min_p=0.02, logprobs=3),
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, top_k=7),
        SamplingParams(temperature=0, presence_penalty=2.0, logprobs=0),
        SamplingParams(min_tokens=4, stop_token_ids=[7]),
        SamplingParams(top_k=2),
        SamplingParams(logit_bias=dict.fromkeys(range(0, 500, 3), 1.5), logprobs=1),
        SamplingParams(allowed_token_ids=range(0, 500, 7)),
        SamplingParams(bad_words=[[11, 12, t] for t in range(480)], temperature=3.0),
    ]
    known = [([1, 2, i], [i, i + 1, i][: i % 4]) for i in range(12)]
    together = sample_rows(logits, params, known, path=path)
    for i in range(12):
        alone = sample_rows(logits[i : i + 1], params[i : i + 1], known[i : i + 1], ids=[i], path=path)
        assert alone.token_ids.tolist() == [together.token_ids[i]]
        assert alone.logprobs.get(0) == together.logprobs.get(i)
    order = [4, 8, 0, 11, 3, 10, 7, 1, 6, 9, 2, 5]
    shuffled = sample_rows(logits[order], [params[i] for i in order], [known[i] for i in order], ids=order, path=path)
    assert shuffled.token_ids.tolist() == together.token_ids[order].tolist()


def test_a_request_keeps_its_seed_and_the_next_in_its_row_has_its_own() -> None:
    table = SequenceTable(2, 200, 16)
    pool = BlockPool(2, 16)
    other = table.place(Sequence(1, [1], SamplingParams(), 200), pool.allocate(1))
    row = table.place(Sequence(0, [1], SamplingParams(seed=11), 200), pool.allocate(1))
    seeds = SeedTable(table, 0)
    assert seeds.find_seeds(np.array([row, row])).tolist() == [11, 11]
    assert seeds.find_seeds(np.array([other, row])).tolist() == [find_seed(0, table.sequences[other]), 11]
    table.remove(row)
    seeds.find_seeds(np.array([other]))
    assert table.place(Sequence(2, [1], SamplingParams(seed=2**64 - 1), 200), pool.allocate(0)) == row
    assert seeds.find_seeds(np.array([row])).tolist() == [-1]


def test_seeds_and_requests_have_streams_of_their_own() -> None:
    def seed_of(engine_seed: int, sequence_id: int, seed: int | None) -> int:
        return find_seed(engine_seed, Sequence(sequence_id, [1], SamplingParams(seed=seed), 9))

    assert seed_of(0, 1, 7) == seed_of(5, 2, 7) == 7, "a request's own seed is all that counts"
    seeds = [seed_of(0, 1, None), seed_of(0, 2, None), seed_of(1, 1, None), seed_of(0, 1, 0), seed_of(0, 1, 2**64 - 1)]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("path", PATHS)
def test_logprobs_are_those_of_the_raw_logits(path: str) -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    params = [
        SamplingParams(temperature=0.3, top_k=1, frequency_penalty=1.0, logprobs=4),
        SamplingParams(temperature=0, logprobs=0),
    ]
    sampled = sample_rows(logits, params, [([1], [2, 2]), ([1], [])], path=path)
    expected = logits.double().log_softmax(-1)
    for row, num_top in ((0, 4), (1, 0)):
        found = sampled.logprobs[row]
        order = expected[row].argsort(descending=True).tolist()
        assert found.token_ids == [sampled.token_ids[row], *order[:num_top]]
        assert found.ranks == [order.index(sampled.token_ids[row]) + 1, *range(1, num_top + 1)]
        np.testing.assert_allclose(found.logprobs, expected[row, found.token_ids], rtol=0, atol=1e-6)
    all_of_them = SamplingParams(temperature=0, logprobs=1000)
    assert len(sample_rows(logits[:1], [all_of_them], path=path).logprobs[0].token_ids) == 51


def test_what_is_kept_of_rows_is_as_if_read_anew() -> None:
    """Rows come, go and are taken over, a token is replaced; counts are those of all tokens, tokens the request's."""
    rng = np.random.default_rng(0)
    table, vocab_size = SequenceTable(4, 60, 16), 30
    sampler, pool = Sampler(table, HOST, seed=0, eos_token_ids=(EOS,)), BlockPool(40, 16)
    params = [
        SamplingParams(temperature=0, repetition_penalty=1.6, frequency_penalty=0.4),
        SamplingParams(temperature=0, presence_penalty=1.5),
        SamplingParams(temperature=0, frequency_penalty=-0.3, repetition_penalty=0.8),
        SamplingParams(temperature=0, allowed_token_ids=range(5, 25), logit_bias={7: 1.0, 8: 1.0, 9: -1.0}),
        SamplingParams(temperature=0, bad_words=[(a, b) for a in range(20) for b in range(20)], min_tokens=5),
        SamplingParams(temperature=0, bad_words=[[3], [4, 5, 6]], allowed_token_ids=[3, 4, 5, 6]),
        SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(0, 30, 2), 2.0), stop_token_ids=[4], min_tokens=9),
    ]
    num_done = 0
    for step in range(300):
        while table.num_free_rows and rng.random() < 0.5:
            tokens = rng.integers(0, vocab_size, rng.integers(1, 12))
            sequence = Sequence(num_done + 1000 * step, tokens, params[step % len(params)], 60)
            sequence.prompt_len = int(rng.integers(1, tokens.size + 1))
            table.place(sequence, pool.allocate(1))
        rows = np.array([s.row for s in table.sequences if s is not None and rng.random() < 0.8], dtype=np.int64)
        if rows.size == 0:
            continue
        if step % 7 == 0 and table.known[rows[0]] > table.prompt_len[rows[0]]:
            table.tokens[rows[0], table.known[rows[0]] - 1] = rng.integers(0, vocab_size)
            sampler.forget(rows[:1])
        logits = 2 * torch.from_numpy(rng.normal(size=(rows.size, vocab_size)))
        lengths = table.known[rows]
        sampled = sampler.sample(logits, rows, lengths).token_ids.numpy()
        for i, row in enumerate(rows.tolist()):
            sequence = table.sequences[row]
            known = table.tokens[row, : lengths[i]].tolist()
            expected = reference_scores(
                logits[i].numpy(), sequence.params, known[: sequence.prompt_len], known[sequence.prompt_len :]
            )
            assert sampled[i] == expected.argmax()
            table.tokens[row, lengths[i]] = sampled[i]
            table.known[row] += 1
            if rng.random() < 0.1 or table.known[row] == 59:
                _, blocks = table.remove(row)
                pool.release(blocks)
                num_done += 1
    assert num_done > 40


@pytest.mark.parametrize("path", PATHS)
def test_min_tokens_lets_go_at_that_many(path: str) -> None:
    logits = torch.zeros(3, 8)
    logits[:, EOS], logits[:, 6] = 9.0, 8.0
    params = [SamplingParams(temperature=0, min_tokens=2)] * 3
    assert sample_rows(logits, params, [([1], [2] * n) for n in (1, 2, 3)], path=path).token_ids.tolist() == [
        6,
        EOS,
        EOS,
    ]


@pytest.mark.parametrize("path", PATHS)
def test_broken_logits_break_their_own_row_only(path: str) -> None:
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(2))
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5, logprobs=1), SamplingParams()]
    sound = sample_rows(logits, params, path=path).token_ids
    for broken, value in ((0, math.nan), (1, math.nan), (2, math.inf), (3, -math.inf)):
        bad = logits.clone()
        bad[broken, slice(None) if value == -math.inf else 7] = value
        found = sample_rows(bad, params, path=path).token_ids
        assert found[broken] == NOT_FINITE < 0, "no token's id"
        assert (np.delete(found, broken) == np.delete(sound, broken)).all()
