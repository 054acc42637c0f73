"""Log-probabilities of prompts against a float64 forward of each prompt alone, and the memory that they take."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tmodel.packed import Driver, in_one_go, load
from tests.tsched.async_serving import make_async, run
from tests.tsched.random_model import save_random_model
from tests.tsched.test_llm import PROMPTS, crowded_bytes, make_llm
from tkernels.ops.logprobs.contract import baseline
from tkernels.runtime import HostRuntime
from tkernels.verification.accuracy import judge
from tsched import LLM, RequestOutput, SamplingParams
from tsched.execution.batch_builder import ArrangedPlan
from tsched.execution.prompt_logprobs import PromptScorer, PromptScores, PromptSpan, compute_with_prompts

SHARED = PROMPTS[3][:14]
LONGER = [*([*SHARED, *prompt] for prompt in PROMPTS[:7]), PROMPTS[0], PROMPTS[4]]
CROWDED = {"block_size": 4, "max_num_batched_tokens": 11, "max_num_seqs": 5}
ASKED = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, prompt_logprobs=3)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("windowed")
    save_random_model(directory, "MistralForCausalLM")
    return directory


def forward(directory: Path, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of each of LONGER alone, the log-probabilities [len - 1, V] of its tokens from the second on."""
    sequences = [torch.tensor(prompt) for prompt in LONGER]
    driver = Driver(load(directory, dtype), sequences, dtype)
    return [rows[:-1].log_softmax(-1) for rows in driver.run(in_one_go([len(prompt) for prompt in LONGER]))]


def chosen(prompt: list[int], logprobs: torch.Tensor) -> torch.Tensor:
    """[len - 1] of the prompt's own tokens."""
    return logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def check(outputs: list[RequestOutput], directory: Path) -> None:
    """By the error rule, where the baseline is a float32 forward of each prompt alone."""
    oracle, baseline = forward(directory, torch.float64), forward(directory, torch.float32)
    own, reported = [], []
    for prompt, output, truth in zip(LONGER, outputs, oracle, strict=True):
        assert output.error is None
        places = output.prompt_logprobs
        assert places is not None
        assert places[0] is None
        assert len(places) == len(prompt)
        for token, place, row in zip(prompt[1:], places[1:], truth, strict=True):
            assert place is not None
            assert next(iter(place)) == token
            assert place[token].rank == int((row > row[token]).sum()) + 1
            likely = row.topk(3).indices.tolist()
            assert set(place) == {token, *likely}
            assert [place[one].rank for one in likely] == [1, 2, 3]
            own.append(place[token].logprob)
            reported += [place[one].logprob for one in likely]
    truths = torch.cat([chosen(prompt, rows) for prompt, rows in zip(LONGER, oracle, strict=True)])
    naturals = torch.cat([chosen(prompt, rows) for prompt, rows in zip(LONGER, baseline, strict=True)])
    verdict = judge(torch.tensor(own), truths, naturals)
    assert verdict.ok, verdict
    best, best_natural = (torch.cat([r.topk(3).values.flatten() for r in rows]) for rows in (oracle, baseline))
    verdict = judge(torch.tensor(reported), best, best_natural)
    assert verdict.ok, verdict


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_cache": "hash", "overlap": True},
        {"prefix_cache": "radix", "preemption": "swap", "swap_bytes": 10**6, "cuda_graphs": True},
        {"prefix_cache": "none", "preemption": "swap", "swap_bytes": 10**6, "overlap": True},
    ],
)
def test_they_are_those_of_a_float64_forward_in_chunks_under_preemption_and_beside_warm_caches(
    checkpoint: Path, options: Mapping[str, Any]
) -> None:
    half = crowded_bytes(checkpoint, 28) // 2  # of float32
    llm = make_llm(checkpoint, dtype="float32", kv_cache_bytes=half, **CROWDED, **options)
    llm.generate(LONGER, SamplingParams(temperature=0, max_tokens=1))  # warms the cache
    before = llm.stats()
    outputs = llm.generate(LONGER, ASKED)
    check(outputs, checkpoint)
    stats = llm.stats()
    assert stats.num_preemptions > before.num_preemptions
    assert stats.num_used_blocks == 0


def test_they_are_right_where_layers_have_windows(windowed: Path) -> None:
    llm = make_llm(windowed, dtype="float32", overlap=True, kv_cache_bytes=40_000, **CROWDED)
    check(llm.generate(LONGER, ASKED), windowed)


def test_such_a_request_reads_no_cached_prefix_but_leaves_one(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, block_size=4, prefix_cache="hash")
    plain = SamplingParams(temperature=0, max_tokens=1)
    computed = []
    for params in (ASKED, ASKED, plain):
        before = llm.stats().num_prefill_tokens
        llm.generate([LONGER[3]], params)
        computed.append(llm.stats().num_prefill_tokens - before)
    assert computed[0] == computed[1] == len(LONGER[3])
    assert computed[2] < 4 + 1


def test_no_output_token_is_brought_where_none_is_asked_for(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, dtype="float32", **CROWDED)
    params = SamplingParams(n=2, max_tokens=0, prompt_logprobs=3, logprobs=2, stop=["a"], seed=1)
    outputs = llm.generate(LONGER, params)
    check(outputs, checkpoint)
    for output in outputs:
        for one in output.outputs:
            assert (one.token_ids, one.text, one.finish_reason, one.logprobs) == ([], "", "length", [])
    assert llm.stats().num_output_tokens == 0
    assert llm.stats().num_used_blocks == 0
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        SamplingParams(max_tokens=0)


def test_the_samples_of_a_prompt_share_them_and_greedy_ones_are_equal(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, **CROWDED)
    (alone,) = llm.generate([LONGER[2]], ASKED)
    (output,) = llm.generate([LONGER[2]], SamplingParams(**{**vars_of(ASKED), "n": 3}))
    assert output.prompt_logprobs == alone.prompt_logprobs
    assert [one.token_ids for one in output.outputs] == [alone.outputs[0].token_ids] * 3


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("temperature", "max_tokens", "ignore_eos", "prompt_logprobs")}


def test_they_are_there_although_the_first_sample_was_aborted_in_the_prompt(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, overlap=True, prefix_cache="hash", **CROWDED)
    (alone,) = llm.generate([LONGER[6]], ASKED)
    prepared = llm._prepare(0, LONGER[6], SamplingParams(**{**vars_of(ASKED), "n": 2}), 0.0)
    requests = llm._start(prepared)
    for _ in range(3):
        llm._engine.step()
    llm._engine.abort(requests[0].sequence.id)
    while llm._engine.has_unfinished:
        llm._engine.step()
    assert requests[1].sequence.output_token_ids == alone.outputs[0].token_ids
    assert llm._make_prompt_logprobs(requests[0]) == alone.prompt_logprobs


def test_a_stream_has_them_in_its_first_part(checkpoint: Path) -> None:
    expected = make_llm(checkpoint).generate([LONGER[1]], ASKED)[0].prompt_logprobs

    async def main() -> None:
        async with make_async(checkpoint) as llm:
            parts = [part.prompt_logprobs async for part in llm.add_request("a", LONGER[1], ASKED)]
        assert parts[0] == expected
        assert parts[1:] == [None] * (len(parts) - 1)

    run(main)


def test_a_prompt_whose_logits_are_not_finite_fails(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(checkpoint, dtype="float32", device="cpu")
    model = llm._engine._runner._model
    compute = model.compute_hidden

    def spoiled(batch: Any, cache: Any) -> torch.Tensor:
        hidden = compute(batch, cache).clone()
        hidden[2] = torch.nan
        return hidden

    monkeypatch.setattr(llm._engine._runner, "_model", SplitDouble(model, spoiled))
    bad, good = llm.generate([LONGER[0], LONGER[1]], [ASKED, SamplingParams(temperature=0, max_tokens=2)])
    assert bad.outputs[0].finish_reason == "error"
    assert "logits for the prompt's tokens are not finite" in str(bad.error)
    assert good.error is None


class SplitDouble:
    """`model` with another way to its hidden states."""

    def __init__(self, model: Any, compute_hidden: Any) -> None:
        self.compute_hidden, self.compute_logits = compute_hidden, model.compute_logits
        self._model = model

    def __call__(self, batch: Any, cache: Any) -> torch.Tensor:
        return self._model(batch, cache)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, and of those the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += size
            self.most = max(self.most, self.live)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@pytest.mark.parametrize("num_top", [0, 20])
def test_2048_tokens_of_a_vocabulary_of_151936_take_64_mb_more_at_most(
    num_top: int,
) -> None:
    """On the meta device, where tensors have sizes and no memory."""

    class Meta(HostRuntime):
        def send(self, array: np.ndarray) -> torch.Tensor:
            return super().send(array).to("meta")

    size, vocab, width = 2048, 151_936, 64
    hidden = torch.empty(size, width, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(vocab, width, dtype=torch.bfloat16, device="meta")
    model = SimpleNamespace(
        compute_hidden=lambda batch, cache: hidden, compute_logits=lambda states: (states @ weight.T).float()
    )
    scores = PromptScores(np.arange(size + 1), num_top)
    span = PromptSpan(scores, 0, np.arange(size - 1))
    with LiveBytes() as alone:
        model.compute_logits(hidden[-1:])
    with LiveBytes() as both:
        logits, scored = compute_with_prompts(
            model, None, None, np.array([size - 1]), [span], Meta(), baseline,  # type: ignore[arg-type]
        )  # fmt: skip
    assert logits.shape == (1, vocab)
    assert scored.tensors[2].shape == (size - 1, num_top)
    assert size * vocab * 4 > 2**30
    assert 2**24 < both.most - alone.most <= 64 * 10**6


def test_a_step_that_scores_nothing_builds_no_span() -> None:
    none: Any = None
    step = ArrangedPlan(none, none, none, none, 0, none, none, none, none, None)
    assert PromptScorer().find_spans(step) == []
