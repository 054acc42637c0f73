from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from tsched.requests.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("n", 0, "from 1 to 128"),
        ("n", 129, "from 1 to 128"),
        ("n", 1.0, "integer"),
        ("temperature", -0.1, "at least 0"),
        ("temperature", math.nan, "finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", "hot", "finite number"),
        pytest.param("temperature", 10**400, "finite number", id="temperature-10**400"),
        ("temperature", True, "finite number"),
        ("top_k", -2, "at least -1"),
        ("top_k", 2.5, "integer"),
        ("top_k", True, "integer"),
        ("top_k", 2**31, "at least -1 and at most 2147483647"),
        ("top_k", 2**63, "at most 2147483647"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.1, "above 0 and at most 1"),
        ("min_p", -0.1, "at least 0 and at most 1"),
        ("min_p", 1.5, "at least 0 and at most 1"),
        ("repetition_penalty", 0.0, "above 0"),
        ("repetition_penalty", 1e-308, "at least 1.17549e-38"),
        ("repetition_penalty", 1e308, "at most 8.50706e\\+37"),
        pytest.param("repetition_penalty", 10**400, "finite number", id="repetition_penalty-10**400"),
        ("presence_penalty", 2.1, "at least -2 and at most 2"),
        ("frequency_penalty", -2.1, "at least -2 and at most 2"),
        ("seed", -1, "from 0 to"),
        ("seed", 2**64, "from 0 to"),
        ("logprobs", -1, "from 0 to 1000"),
        ("logprobs", 1001, "from 0 to 1000"),
        ("prompt_logprobs", -1, "from 0 to 1000"),
        ("prompt_logprobs", True, "integer"),
        ("truncate_prompt_tokens", 0, "at least 1"),
        ("stop", "", "non-empty"),
        ("stop", ["a", ""], "non-empty"),
        ("stop", [1], "non-empty strings"),
        ("stop", 1, "list"),
        ("stop", ["a"] * 1001, "at most 1000"),
        ("stop", "a" * 1001, "1000 characters at most, got 1001"),
        ("stop_token_ids", [-1], "at least 0"),
        ("stop_token_ids", [1.5], "integer"),
        ("stop_token_ids", [1, 2**63], "at most 2147483647, got 9223372036854775808"),
        ("stop_token_ids", 7, "list"),
        ("stop_token_ids", "12", "list"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", 1.0, "integer"),
        ("max_tokens", 2**31, "at least 1 and at most 2147483647"),
        ("min_tokens", -1, "from 0 to 16"),
        ("min_tokens", 17, "from 0 to 16"),
        ("min_tokens", None, "integer"),
        ("ignore_eos", 1, "True or False"),
        ("logit_bias", [1], "map token ids to numbers"),
        ("logit_bias", {"a": 1}, "integer"),
        ("logit_bias", {-1: 1.0}, "at least 0"),
        ("logit_bias", {1: 100.5}, "from -100 to 100, 1 has 100.5"),
        ("logit_bias", {1: math.nan}, "from -100 to 100"),
        ("logit_bias", {1: True}, "from -100 to 100"),
        ("logit_bias", dict.fromkeys(range(1001), 1.0), "at most 1000 entries, got 1001"),
        ("allowed_token_ids", [], "one token id at least"),
        ("allowed_token_ids", [1.5], "integer"),
        ("bad_words", "word", "list"),
        ("bad_words", [" "], "not only spaces"),
        ("bad_words", [[]], "one token id at least"),
        ("bad_words", [[1] * 65], "at most 64 entries, got 65"),
        ("bad_words", [[1, -1]], "at least 0"),
        ("bad_words", ["a"] * 257, "text counts for two; got 514"),
        ("logits_processors", 5, "list"),
        ("logits_processors", [5], "functions or callable objects, got 5"),
        ("logits_processors", [int], "functions or callable objects"),
        ("logits_processors", [lambda logits: logits], "called with 3 arguments"),
        ("logits_processors", [max] * 65, "at most 64"),
        ("stopping_criteria", [lambda tokens: True], "called with 2 arguments"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(name: str, value: object, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}\b.*{allowed}"):
        SamplingParams(**{name: value})


def test_good_values_are_kept_in_one_form() -> None:
    params = SamplingParams(
        n=1,
        temperature=0,
        top_k=np.int64(5),
        top_p=1,
        seed=2**64 - 1,
        stop="END",
        stop_token_ids=[3, 3, 1],
        max_tokens=None,
    )
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 5, 1.0)
    assert isinstance(params.temperature, float)
    assert type(params.top_k) is int
    assert params.stop == params.stop_strings == ("END",)
    assert params.stop_token_ids == params.stop_ids == (3, 1)
    assert params.is_greedy
    assert not params.has_penalties
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()
    assert SamplingParams(frequency_penalty=0.1).has_penalties
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6
    params = SamplingParams(logit_bias={np.int64(3): 1}, allowed_token_ids=[3, 3], bad_words=[[1, 2], "a", (1, 2)])
    assert (params.logit_bias, params.allowed_ids, params.bad_words) == ({3: 1.0}, (3,), ((1, 2), "a"))
    assert SamplingParams(logit_bias={}, bad_words=None) == SamplingParams()
    assert hash(params) == hash(dataclasses.replace(params))


OTHERS: dict[str, object] = {
    "n": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 1.5,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "seed": 7,
    "logprobs": 0, "prompt_logprobs": 0, "truncate_prompt_tokens": 5, "stop": "END", "stop_token_ids": [3],
    "max_tokens": None, "min_tokens": 2, "ignore_eos": True, "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "logit_bias": {3: 1.0}, "structured_outputs": {"regex": "a"},
    "allowed_token_ids": [3], "bad_words": ["a"], "logits_processors": [max],
    "stopping_criteria": [lambda tokens, text: True],
}  # fmt: skip
"""A value of each parameter that is not its default."""


@pytest.mark.parametrize("name", [one.name for one in dataclasses.fields(SamplingParams)])
def test_a_parameter_makes_a_request_special_unless_it_is_of_draws_or_of_the_end(name: str) -> None:
    greedy = {} if name in ("n", "temperature") else {"temperature": 0.0}
    params = SamplingParams(**{**greedy, name: OTHERS[name]})
    of_draws, of_the_end = ("top_k", "top_p", "min_p", "seed"), ("stop", "stop_token_ids", "max_tokens", "ignore_eos")
    of_prompts = ("prompt_logprobs", "truncate_prompt_tokens")
    of_text = ("include_stop_str_in_output", "skip_special_tokens")
    assert params.is_plain == (name in (*of_draws, *of_prompts, *of_text, *of_the_end, "stopping_criteria"))
    exact = dataclasses.replace(params, ignore_eos=True)
    assert exact.ends_by_length == (name not in ("stop", "stop_token_ids", "stopping_criteria"))
    assert not dataclasses.replace(params, ignore_eos=False).ends_by_length


def test_a_minimum_without_a_maximum_is_bounded_too() -> None:
    for params in ({"min_tokens": 2**63, "max_tokens": None}, {"min_tokens": 2**63, "max_tokens": 2**63}):
        with pytest.raises(ValueError, match=r"(min|max)_tokens must be at least [01] and at most 2147483647"):
            SamplingParams(**params)


def test_params_cannot_be_changed() -> None:
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5  # type: ignore[misc]
    assert dataclasses.replace(params, stop=["x"], temperature=0.5) == SamplingParams(stop="x", temperature=0.5)
    assert len({params, SamplingParams()}) == 1


@pytest.mark.parametrize("name", [one.name for one in dataclasses.fields(SamplingParams)])
def test_a_plain_request_asks_nothing_of_the_sampler(name: str) -> None:
    params = SamplingParams(**{"temperature": 0.0, name: OTHERS.get(name)})
    assert params.asks == 0 or not params.is_plain
