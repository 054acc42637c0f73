"""A tokenizer that fails on one request's tokens, or on its prompt, ends that request and no other."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tsched.async_serving import LONG, check_empty, collect, joined, make_async, run
from tests.tsched.test_llm import GREEDY, PROMPTS, completion, make_llm
from tmodel import ConfigError
from tsched import LLM, BeamSearchParams, SamplingParams
from tsched.requests import token_texts
from tsched.requests.tokenizer import load_tokenizer

FREE = dataclasses.replace(GREEDY, ignore_eos=True)
STOPPED = dataclasses.replace(FREE, stop=["no text has this"])
"""The engine makes the text of such a request itself, token by token."""


class PanicError(BaseException):
    """As a tokenizer's other half, in Rust, raises where it finds itself in a state that it did not foresee."""


class Breaking:
    """A tokenizer that fails where the ids that it decodes hold those of `bad`, or the text that it encodes does."""

    def __init__(self, tokenizer: Any, bad: Sequence[int], answer: Any) -> None:
        self._tokenizer = tokenizer
        self._bad = set(bad)
        self._answer = answer

    def decode(self, token_ids: Sequence[int], **options: Any) -> Any:
        if self._bad.intersection(token_ids):
            return self._break()
        return self._tokenizer.decode(token_ids, **options)

    def __call__(self, text: str) -> Any:
        return self._break() if text == "bad" else self._tokenizer(text)

    def _break(self) -> Any:
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


@pytest.fixture(scope="module", params=[False, True], ids=["", "overlap"])
def llm(checkpoint: Path, request: pytest.FixtureRequest) -> LLM:
    return make_llm(checkpoint, overlap=request.param)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> LLM:
    return make_llm(checkpoint)


def only_in(llm: LLM, index: int, place: int) -> int:
    """A token id that request `index` alone has, at output token `place` or after."""
    outputs = [set(output.outputs[0].token_ids) for output in llm.generate(PROMPTS[3:6], FREE)]
    others = set().union(*(tokens for one, tokens in enumerate(outputs) if one != index))
    tokens = llm.generate([PROMPTS[3 + index]], FREE)[0].outputs[0].token_ids
    return next(token for token in tokens[place:] if token not in others)


@pytest.mark.parametrize("params", [FREE, STOPPED], ids=["at the end", "in the engine"])
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ValueError("unknown id"), "the tokenizer's decode raised ValueError: unknown id"),
        (PanicError("index out of range"), "the tokenizer's decode raised PanicError: index out of range"),
        (None, "the tokenizer's decode gave a NoneType, not a text"),
    ],
)
def test_a_failing_decoder_ends_one_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, params: SamplingParams, answer: Any, message: str
) -> None:
    expected = llm.generate(PROMPTS[3:6], params)
    bad = only_in(llm, 1, 0)
    monkeypatch.setattr(llm, "tokenizer", Breaking(llm.tokenizer, [bad], answer))
    before, failed, after = llm.generate(PROMPTS[3:6], params)
    assert failed.error == message
    assert failed.outputs[0].finish_reason == "error"
    for output, alone in ((before, expected[0]), (after, expected[2])):
        assert output.error is None
        assert completion(output) == completion(alone)
        assert output.outputs[0].text == alone.outputs[0].text
    assert llm.stats().num_used_blocks == 0


def test_a_token_whose_bytes_cannot_be_found_ends_one_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise ValueError("no bytes")

    monkeypatch.setattr(token_texts, "find_token_bytes", fail)
    llm._texts._labels.clear()
    failed, other = llm.generate(PROMPTS[3:5], [dataclasses.replace(FREE, logprobs=1), FREE])
    assert failed.error == "the tokenizer's decode raised ValueError: no bytes"
    assert other.error is None


def test_the_last_token_of_a_request_may_be_the_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends by its length at the same moment."""
    tokens = llm.generate([PROMPTS[4]], FREE)[0].outputs[0].token_ids
    place = next(place for place, token in enumerate(tokens) if place and token not in tokens[:place])
    monkeypatch.setattr(llm, "tokenizer", Breaking(llm.tokenizer, [tokens[place]], ValueError("unknown id")))
    (failed,) = llm.generate([PROMPTS[4]], dataclasses.replace(STOPPED, max_tokens=place + 1))
    assert (failed.outputs[0].finish_reason, len(failed.outputs[0].token_ids)) == ("error", place + 1)
    assert "unknown id" in str(failed.error)
    assert llm.stats().num_used_blocks == 0


def test_one_of_several_samples(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(n=3, seed=1, temperature=1.5, max_tokens=6, ignore_eos=True)
    (whole,) = llm.generate([PROMPTS[3]], params)
    samples = [one.token_ids for one in whole.outputs]
    bad = next(token for token in samples[1] if token not in samples[0] and token not in samples[2])
    monkeypatch.setattr(llm, "tokenizer", Breaking(llm.tokenizer, [bad], ValueError("unknown id")))
    (output,) = llm.generate([PROMPTS[3]], params)
    assert output.error == "completion 1: the tokenizer's decode raised ValueError: unknown id"
    assert [one.finish_reason for one in output.outputs] == ["length", "error", "length"]
    assert [one.token_ids for one in output.outputs] == samples
    assert [one.text for one in output.outputs[::2]] == [one.text for one in whole.outputs[::2]]


def test_names_of_likely_tokens_and_beams(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "tokenizer", Breaking(llm.tokenizer, range(300), ValueError("unknown id")))
    (named,) = llm.generate([PROMPTS[3]], dataclasses.replace(FREE, logprobs=2))
    assert named.outputs[0].finish_reason == "error"
    assert "unknown id" in str(named.error)
    (found,) = llm.beam_search([PROMPTS[3]], BeamSearchParams(beam_width=2, max_tokens=3))
    assert found.outputs[0].finish_reason == "error"
    assert "unknown id" in str(found.error)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (PanicError("no such state"), "the tokenizer on the prompt raised PanicError: no such state"),
        ({}, "the tokenizer on the prompt raised KeyError: 'input_ids'"),
        ({"input_ids": [1, None]}, "the tokenizer on the prompt raised TypeError: "),
        ({"input_ids": [299, 300]}, "token id 300 at place 1 of the prompt is out of vocabulary"),
    ],
)
def test_a_failing_encoder_refuses_one_prompt(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, answer: Any, message: str
) -> None:
    monkeypatch.setattr(llm, "tokenizer", Breaking(llm.tokenizer, (), answer))
    good, bad = llm.generate(["good", "bad"], GREEDY)
    assert good.error is None
    assert message in str(bad.error)


@pytest.mark.parametrize("error", [ValueError("no such type"), PanicError("no entry found for key")])
def test_a_tokenizer_that_cannot_be_loaded_is_named_by_its_directory(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    with pytest.raises(ConfigError, match=f"{checkpoint}: its tokenizer cannot be loaded: .*: {error}"):
        load_tokenizer(checkpoint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": None}, "head_dim: transformers, .*Field 'head_dim' expected int, got NoneType"),
        ({"use_cache": "yes"}, "use_cache: transformers, which loads the tokenizer, reads this file first: "),
        ({"dtype": "torch.float32"}, "dtype: transformers, which loads the tokenizer, reads this file first: "),
    ],
)
def test_a_field_that_transformers_alone_reads_is_named_with_its_file(
    checkpoint: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((checkpoint / name).read_text())
    raw = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(ConfigError, match=f"^{tmp_path}/config.json: {message}") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_code_of_a_checkpoint_is_not_run_whatever_is_answered(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "y")
    (tmp_path / "strange.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')")
    (tmp_path / "tokenizer.json").write_text((checkpoint / "tokenizer.json").read_text())
    own_class = {"tokenizer_class": "Strange", "auto_map": {"AutoTokenizer": ["strange.Strange", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own_class))
    raw = json.loads((checkpoint / "config.json").read_text())
    own = {"model_type": "strange", "auto_map": {"AutoConfig": "strange.Config"}}
    (tmp_path / "config.json").write_text(json.dumps({**raw, **own}))
    with pytest.raises(ConfigError, match=f"^{tmp_path}/config.json: auto_map: .* own Python code, which is not run"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "was_run").exists()


def test_a_tokenizer_without_a_vocabulary_is_refused_in_a_line(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((checkpoint / name).read_text())
    with pytest.raises(ConfigError, match=f"^{tmp_path}: has tokenizer_config.json and no vocabulary; [^\n]*$"):
        load_tokenizer(tmp_path)


def test_the_users_interrupt_is_no_fault_of_the_tokenizer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = only_in(llm, 1, 0)
    with monkeypatch.context() as patch:
        patch.setattr(llm, "tokenizer", Breaking(llm.tokenizer, [bad], KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[3:6], STOPPED)
    assert llm.stats().num_used_blocks == 0
    assert llm.generate([PROMPTS[3]], FREE)[0].error is None


@pytest.mark.parametrize("stop", [(), ("no text has this",)], ids=["in the stream", "in the engine"])
def test_a_streams_request_ends_alone(
    checkpoint: Path, reference: LLM, monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...]
) -> None:
    params = dataclasses.replace(LONG, stop=stop)
    whole = reference.generate(PROMPTS[3:5], params)
    tokens = [output.outputs[0].token_ids for output in whole]
    bad = next(token for token in tokens[1][2:] if token not in tokens[0])

    async def main() -> None:
        async with make_async(checkpoint) as served:
            broken = Breaking(served.tokenizer, [bad], PanicError("unknown id"))
            monkeypatch.setattr(served, "tokenizer", broken)
            streams = [
                served.add_request(name, prompt, params) for name, prompt in zip("ab", PROMPTS[3:5], strict=True)
            ]
            good, failed = await asyncio.gather(*map(collect, streams))
            assert joined(good)[0].token_ids == tokens[0]
            assert joined(good)[0].text == whole[0].outputs[0].text
            assert joined(good)[0].finish_reason == "length"
            assert failed[-1].error == "the tokenizer's decode raised PanicError: unknown id"
            (ended,) = joined(failed)
            assert ended.finish_reason == "error"
            assert ended.token_ids == tokens[1][: len(ended.token_ids)]
            (after,) = joined(await collect(served.add_request("b", PROMPTS[3], params)))
            assert after.token_ids == tokens[0]
        check_empty(served)

    run(main)


def test_one_sample_of_a_stream(checkpoint: Path, reference: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(n=3, seed=1, temperature=1.5, max_tokens=12, ignore_eos=True)
    (whole,) = reference.generate([PROMPTS[3]], params)
    samples = [one.token_ids for one in whole.outputs]
    bad = next(token for token in samples[1] if token not in samples[0] and token not in samples[2])

    async def main() -> None:
        async with make_async(checkpoint) as served:
            monkeypatch.setattr(served, "tokenizer", Breaking(served.tokenizer, [bad], ValueError("unknown id")))
            parts = await collect(served.add_request("a", PROMPTS[3], params))
            assert [one.finish_reason for one in joined(parts)] == ["length", "error", "length"]
            assert parts[-1].error == "completion 1: the tokenizer's decode raised ValueError: unknown id"
            assert [one.text for one in joined(parts)[::2]] == [one.text for one in whole.outputs[::2]]
        check_empty(served)

    run(main)
