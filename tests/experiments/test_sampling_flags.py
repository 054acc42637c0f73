"""Sampling parameters as flags and as a YAML's keys: those of SamplingParams, with its words and defaults."""

from dataclasses import fields
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from experiments.cli import app
from experiments.commands import generate
from experiments.sampling import SAMPLING_KEYS, read_meanings
from tsched import SamplingParams

NAMES = {one.name for one in fields(SamplingParams)}
CODE = {"logits_processors", "stopping_criteria"}
OF_PROMPTS = {"prompt_logprobs", "truncate_prompt_tokens"}


def test_a_parameter_is_a_key_unless_it_is_said_elsewhere() -> None:
    assert set(SAMPLING_KEYS) == NAMES - CODE - OF_PROMPTS - {"n", "max_tokens", "logprobs"}


def test_every_parameter_is_described() -> None:
    meanings = read_meanings()
    assert meanings.keys() == NAMES
    assert meanings["top_k"].startswith("Below 2**31, keeps the k most likely tokens")
    assert meanings["repetition_penalty"].endswith("of tokens in the prompt or the output.")


def test_the_flags_of_generate_are_the_parameters_with_their_words() -> None:
    shown = typer.main.get_command(app).commands["generate"].params  # type: ignore[attr-defined]
    panel = {one.name: one for one in shown if getattr(one, "rich_help_panel", None) == "Sampling"}
    assert panel.keys() == NAMES - CODE - OF_PROMPTS - {"n", "logprobs", "logit_bias", "structured_outputs"}
    for name, one in panel.items():
        assert one.opts == [f"--{name.replace('_', '-')}"]
        assert one.help.startswith(read_meanings()[name])


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], {"temperature": 0.0, "max_tokens": 64}),
        (
            ["--stop", "END", "--stop", "def", "--stop-token-ids", "3", "--ignore-eos", "--seed", "7", "--top-k", "5"],
            {
                "temperature": 0.0, "max_tokens": 64, "stop": ["END", "def"], "stop_token_ids": [3],
                "ignore_eos": True, "seed": 7, "top_k": 5,
            },
        ),
        (
            ["--bad-words", "def", "--bad-words", "if", "--allowed-token-ids", "3"],
            {"temperature": 0.0, "max_tokens": 64, "bad_words": ["def", "if"], "allowed_token_ids": [3]},
        ),
        (["--temperature", "0.5", "--max-tokens", "3"], {"temperature": 0.5, "max_tokens": 3}),
    ],
)  # fmt: skip
def test_what_generate_is_given_becomes_the_parameters(
    words: list[str], given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(generate, "run", lambda request: asked.append(request.sampling) or 0)
    CliRunner().invoke(app, ["generate", "--model", "m", "--prompt", "a", *words], catch_exceptions=False)
    assert [SamplingParams(**one) for one in asked] == [SamplingParams(**given)]
