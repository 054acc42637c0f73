"""Logits processors and stopping criteria: what a request's own code may do, and what it does to others: nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tsched.test_llm import GREEDY, PROMPTS, completion, make_llm
from tsched import LLM, SamplingParams

FREE = dataclasses.replace(GREEDY, ignore_eos=True)


@pytest.fixture(scope="module", params=[False, True], ids=["", "overlap"])
def llm(checkpoint: Path, request: pytest.FixtureRequest) -> LLM:
    return make_llm(checkpoint, overlap=request.param)


class Force:
    """Bars all tokens but the next of `tokens`."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __call__(self, prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(logits, -torch.inf)
        forced[self.tokens[output.size % len(self.tokens)]] = 0.0
        return forced


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_sees_each_token_once_and_decides(llm: LLM, temperature: float) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def watch(prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        assert logits.shape == (300,)
        assert logits.dtype == torch.float64
        with pytest.raises(ValueError, match="read-only"):
            output[:] = 0
        seen.append((prompt.tolist(), output.tolist()))
        return logits

    forced = [17, 33, 99]
    params = dataclasses.replace(FREE, temperature=temperature, logits_processors=[watch, Force(forced)], max_tokens=7)
    plain, output = llm.generate([PROMPTS[3], PROMPTS[4]], [FREE, params])
    tokens = (forced * 3)[:7]
    assert output.outputs[0].token_ids == tokens
    assert seen == [(PROMPTS[4], tokens[:i]) for i in range(7)]
    assert completion(plain) == completion(llm.generate([PROMPTS[3]], FREE)[0])


def test_a_processor_may_change_its_logits_in_place_and_logprobs_stay_the_models(llm: LLM) -> None:
    def bar_the_best(prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        logits[logits.argmax()] = -torch.inf
        return logits

    params = dataclasses.replace(FREE, logits_processors=[bar_the_best], logprobs=2, max_tokens=5)
    (output,) = llm.generate([PROMPTS[3]], params)
    assert [next(iter(place.values())).rank for place in output.outputs[0].logprobs] == [2] * 5


def test_min_tokens_holds_over_a_processor_that_forces_a_stop(llm: LLM) -> None:
    def prefer_the_end(prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        logits[0] = 1e9
        return logits

    params = dataclasses.replace(GREEDY, logits_processors=[prefer_the_end], min_tokens=3)
    (output,) = llm.generate([PROMPTS[3]], params)
    assert len(output.outputs[0].token_ids) == 4
    assert output.outputs[0].finish_reason == "stop"


class Broken:
    def __call__(self, prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        if output.size == 2:
            raise KeyError("missing")
        return logits


def short(prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    return logits[:5]


def whole_numbers(prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    return logits.long()


def forgets_to_return(prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> None:
    return None


def bars_all(prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    return torch.full_like(logits, -torch.inf)


def not_a_number(prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    logits[7] = torch.nan
    return logits


@pytest.mark.parametrize(
    ("processor", "message", "num_tokens"),
    [
        (Broken(), "logits processor Broken at output token 2 raised KeyError: 'missing'", 2),
        (short, "logits processor short at output token 0 returned torch.float64 of shape [5]", 0),
        (whole_numbers, "returned torch.int64 of shape [300]", 0),
        (forgets_to_return, "returned a NoneType, not a tensor", 0),
        (bars_all, "that bars_all left at output token 0 have the maximum -inf", 0),
        (not_a_number, "that not_a_number left at output token 0 have the maximum nan", 0),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_that_fails_ends_its_own_request_alone(
    llm: LLM, processor: object, message: str, num_tokens: int, temperature: float
) -> None:
    seeded = SamplingParams(seed=3, max_tokens=20, ignore_eos=True, logprobs=1)
    bad = dataclasses.replace(FREE, temperature=temperature, logits_processors=[processor], logprobs=1)
    before, failed, after = llm.generate([PROMPTS[3], PROMPTS[4], PROMPTS[5]], [FREE, bad, seeded])
    assert message in failed.error
    assert failed.outputs[0].finish_reason == "error"
    assert len(failed.outputs[0].token_ids) == len(failed.outputs[0].logprobs) == num_tokens
    assert completion(before) == completion(llm.generate([PROMPTS[3]], FREE)[0])
    assert completion(after) == completion(llm.generate([PROMPTS[5]], seeded)[0])
    assert before.error is after.error is None
    assert llm.stats().num_used_blocks == 0


def test_one_failing_completion_of_several_is_named(llm: LLM) -> None:
    def fails_on_a_token(prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        if output.size == 1 and output[0] == first[1]:
            raise RuntimeError("that one")
        return logits

    params = SamplingParams(n=3, seed=5, temperature=4.0, max_tokens=6, ignore_eos=True)
    first = [c.token_ids[0] for c in llm.generate([PROMPTS[4]], params)[0].outputs]
    assert len(set(first)) == 3
    (output,) = llm.generate([PROMPTS[4]], dataclasses.replace(params, logits_processors=[fails_on_a_token]))
    assert output.error.startswith("completion 1: logits processor ")
    assert output.error.endswith("raised RuntimeError: that one")
    assert [c.finish_reason for c in output.outputs] == ["length", "error", "length"]


def test_a_criterion_ends_the_output_where_it_says(llm: LLM) -> None:
    (free,) = llm.generate([PROMPTS[3]], FREE)
    tokens = free.outputs[0].token_ids
    seen: list[list[int]] = []

    def sixth_token(prompt: np.ndarray, output: np.ndarray) -> bool:
        assert prompt.tolist() == PROMPTS[3]
        seen.append(output.tolist())
        return bool(output.size >= 6)

    params = dataclasses.replace(FREE, stopping_criteria=[lambda prompt, output: False, sixth_token])
    (output,) = llm.generate([PROMPTS[3]], params)
    assert completion(output) == (tokens[:6], "stop")
    assert seen == [tokens[:i] for i in range(1, 7)]
    (late,) = llm.generate([PROMPTS[3]], dataclasses.replace(params, min_tokens=9))
    assert completion(late) == (tokens[:10], "stop")


def test_a_criterion_beside_stop_strings_and_text(llm: LLM) -> None:
    (free,) = llm.generate([PROMPTS[3]], FREE)
    text, tokens = free.outputs[0].text, free.outputs[0].token_ids
    params = dataclasses.replace(FREE, stop="\x00never", stopping_criteria=[lambda prompt, output: output.size == 4])
    (output,) = llm.generate([PROMPTS[3]], params)
    assert completion(output) == (tokens[:4], "stop")
    assert text.startswith(output.outputs[0].text.rstrip("\ufffd"))


class Undecided:
    def __call__(self, prompt: np.ndarray, output: np.ndarray) -> bool:
        return None  # type: ignore[return-value]


def angry(prompt: np.ndarray, output: np.ndarray) -> bool:
    raise ZeroDivisionError("no")


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        (Undecided(), "stopping criterion Undecided at output token 0 answered None"),
        (angry, "stopping criterion angry at output token 0 raised ZeroDivisionError: no"),
    ],
)
def test_a_criterion_that_fails_ends_its_own_request_alone(llm: LLM, criterion: object, message: str) -> None:
    bad = dataclasses.replace(FREE, stopping_criteria=[criterion], stop=["zzz"])
    good, failed = llm.generate([PROMPTS[3], PROMPTS[4]], [FREE, bad])
    assert message in failed.error
    assert failed.outputs[0].finish_reason == "error"
    assert len(failed.outputs[0].token_ids) == 1
    assert completion(good) == completion(llm.generate([PROMPTS[3]], FREE)[0])
    assert llm.stats().num_used_blocks == 0
