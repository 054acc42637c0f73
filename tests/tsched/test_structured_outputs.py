"""Outputs of a form: what is chosen, where it ends, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tsched.async_serving import make_async, run
from tests.tsched.drawn_schemas import draw_params, find_fault
from tests.tsched.test_llm import PROMPTS, completion, crowded_bytes, make_llm
from tkernels.runtime import HostRuntime
from tsched import LLM, SamplingParams, StructuredOutputsParams
from tsched.execution.token_masks import bar_others, count_words, pack_mask, unpack_masks
from tsched.requests import grammar_reader
from tsched.requests.errors import RefusedError
from tsched.requests.grammar import GrammarCompiler
from tsched.requests.grammar_reader import GrammarReader
from tsched.requests.repetitions import find_repeated_repetition

CHOICES = ("yes", "yes please", "no (a+)", "no!", "42")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return make_llm(checkpoint)


def with_form(**form: Any) -> SamplingParams:
    return SamplingParams(temperature=2.0, seed=3, max_tokens=60, structured_outputs=StructuredOutputsParams(**form))


class KeepToChoices:
    """The same by definition: a token is barred unless some choice begins with the text that it makes."""

    def __init__(self, llm: LLM) -> None:
        self._texts = [llm.tokenizer.decode([token]) for token in range(300)]

    def __call__(self, prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        text = "".join(self._texts[token] for token in output)
        for token, own in enumerate(self._texts):
            ends = text in CHOICES if token == 0 else any(one.startswith(text + own) for one in CHOICES)
            if not ends:
                logits[token] = -torch.inf
        return logits


@pytest.mark.parametrize("temperature", [0.0, 1.0, 30.0])
def test_a_choice_is_chosen_as_if_each_token_were_tried(llm: LLM, temperature: float) -> None:
    """The reference sees the end token where a choice is complete, also where nothing else may follow."""
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=30) for seed in range(len(PROMPTS))]
    form = StructuredOutputsParams(choice=CHOICES)
    found = llm.generate(PROMPTS, [dataclasses.replace(one, structured_outputs=form) for one in params])
    expected = llm.generate(
        PROMPTS, [dataclasses.replace(one, logits_processors=[KeepToChoices(llm)]) for one in params]
    )
    for one, other in zip(found, expected, strict=True):
        assert one.outputs[0].text == other.outputs[0].text
        assert one.outputs[0].text in CHOICES
        assert one.outputs[0].finish_reason == "stop"
        ids = other.outputs[0].token_ids
        assert one.outputs[0].token_ids in (ids, ids[:-1])
    assert temperature < 1 or len({one.outputs[0].text for one in found}) > 1


FORMS: list[Mapping[str, Any]] = [
    {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 3}},
    {"regex": "[ab]{4,9}c?"},
    {"grammar": 'start: "x" start | "y"'},
    {"choice": list(CHOICES)},
    {"json_object": True},
]


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": True, "prefix_cache": "hash"},
        {"overlap": False, "cuda_graphs": True, "preemption": "swap", "swap_bytes": 10**6},
        {"overlap": True, "preemption": "swap", "swap_bytes": 10**6},
    ],
)
def test_company_preemption_and_overlap_change_nothing(checkpoint: Path, llm: LLM, options: Mapping[str, Any]) -> None:
    params = [
        SamplingParams(
            temperature=1.5, seed=i, max_tokens=30, n=1 + i % 2, logprobs=1, presence_penalty=0.3 * (i % 3),
            structured_outputs=StructuredOutputsParams(**FORMS[i % 5]) if i != 7 else None, bad_words=["b"] * (i == 1),
        )
        for i in range(len(PROMPTS))
    ]  # fmt: skip
    crowded = make_llm(
        checkpoint, block_size=4, max_num_batched_tokens=24, kv_cache_bytes=crowded_bytes(checkpoint, 22), **options
    )
    together = crowded.generate(PROMPTS, params)
    assert crowded.stats().num_preemptions > 0
    assert crowded.stats().num_used_blocks == 0
    assert not crowded._engine._runner._sampler.grammars._states
    for prompt, one, output in zip(PROMPTS, params, together, strict=True):
        (alone,) = llm.generate([prompt], one)
        assert output.error is None
        for mine, other in zip(output.outputs, alone.outputs, strict=True):
            assert (mine.token_ids, mine.text, mine.finish_reason) == (other.token_ids, other.text, other.finish_reason)
            form = one.structured_outputs
            if form is not None and form.regex is not None and mine.finish_reason == "stop":
                assert re.fullmatch(form.regex, mine.text)


def test_finished_outputs_of_drawn_schemas_parse_and_validate(llm: LLM) -> None:
    params = [draw_params(seed, 100) for seed in range(30)]
    outputs = llm.generate([PROMPTS[seed % 10][:5] for seed in range(30)], params)
    assert [find_fault(one, output) for one, output in zip(params, outputs, strict=True)] == [None] * 30
    assert sum(output.outputs[0].finish_reason == "stop" for output in outputs) >= 10


def test_the_end_of_a_form_ends_the_output(llm: LLM) -> None:
    """So min_tokens would be dropped, and is refused; a form says itself how long it is."""
    with pytest.raises(ValueError, match="^min_tokens does not go with structured_outputs.*minLength"):
        dataclasses.replace(with_form(regex="[a-z]*"), min_tokens=40)
    (output,) = llm.generate([PROMPTS[1]], dataclasses.replace(with_form(regex="[a-z]{40,}"), logit_bias={0: 100.0}))
    text, (*_, last, _) = output.outputs[0].text, output.outputs[0].token_ids
    assert len(text) >= 40 > len(text) - len(llm.tokenizer.decode([last]))
    assert output.outputs[0].finish_reason == "stop"
    for ignore_eos in (False, True):
        whole = dataclasses.replace(with_form(choice=["yes"]), ignore_eos=ignore_eos)
        (output,) = llm.generate([PROMPTS[1]], whole)
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("yes", "stop")
    short = dataclasses.replace(with_form(choice=["yyyyyyyyyyyyyyyyyyyyyyyyyy"]), max_tokens=2)
    assert llm.generate([PROMPTS[1]], short)[0].outputs[0].finish_reason == "length"


def test_a_form_that_is_complete_at_the_longest_output_has_stopped(llm: LLM) -> None:
    params = with_form(choice=["yes"])
    (whole,) = llm.generate([PROMPTS[1]], params)
    (exact,) = llm.generate([PROMPTS[1]], dataclasses.replace(params, max_tokens=len(whole.outputs[0].token_ids)))
    assert completion(exact) == completion(whole)
    assert completion(exact)[1] == "stop"


def test_a_stop_string_ends_the_output_within_its_form(llm: LLM) -> None:
    params = dataclasses.replace(with_form(json={"const": {"k": [1, 2]}}), stop=["["])
    (output,) = llm.generate([PROMPTS[2]], params)
    assert output.outputs[0].finish_reason == "stop"
    assert re.fullmatch(r'\s*\{\s*"k"\s*:\s*', output.outputs[0].text)


def test_a_stream_has_a_form_too(checkpoint: Path) -> None:
    params = with_form(json={"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                             "additionalProperties": False})  # fmt: skip

    async def main() -> None:
        async with make_async(checkpoint) as llm:
            parts = [part.outputs[0].text async for part in llm.add_request("a", PROMPTS[1], params)]
        assert set(json.loads("".join(parts))) == {"a"}

    run(main)


def test_an_online_engine_serves_others_while_a_form_is_compiled(checkpoint: Path) -> None:
    """And those whose form it knows; one that is aborted, or whose engine drains, in that time has its end."""
    slow, known = with_form(json=INTERSECTED), with_form(choice=["yes"])

    async def main() -> None:
        async with make_async(checkpoint) as llm:
            first = [part async for part in llm.add_request("known", PROMPTS[2], known)]
            names = ("refused", "aborted")
            streams = [llm.add_request(name, PROMPTS[0], slow) for name in names]
            before = llm.stats().num_steps
            parts = [part async for part in llm.add_request("b", PROMPTS[1], SamplingParams(max_tokens=30))]
            assert sum(len(part.outputs[0].token_ids) for part in parts) == 30
            again = [part async for part in llm.add_request("known", PROMPTS[2], known)]
            assert "".join(part.outputs[0].text for part in (*first, *again)) == "yesyes"
            assert llm.stats().num_steps >= before + 30
            assert not streams[0]._news, "its form is being compiled"
            await streams[1].aclose()
            draining = asyncio.ensure_future(llm.drain())
            (part,) = [part async for part in streams[0]]
            assert "takes more than 0.8 s" in str(part.error)
            await draining
        while any(thread.name == "grammar compiler" for thread in threading.enumerate()):  # the aborted one's
            await asyncio.sleep(0.05)

    run(main)


def test_a_grammar_that_gives_up_ends_its_request_alone(llm: LLM) -> None:
    engine = llm._engine
    params = [with_form(regex="[a-z]*"), with_form(regex="[a-z]*")]
    bad, good = (llm._start(llm._prepare(i, PROMPTS[i], one, 0.0))[0] for i, one in enumerate(params))
    engine.step()
    assert bad.grammar is not None
    bad.grammar.append(int(llm.tokenizer("!")["input_ids"][0]))
    while engine.has_unfinished:
        engine.step()
    assert bad.sequence.finish_reason == "error"
    assert str(bad.error).startswith("structured_outputs: ")
    assert good.error is None


@pytest.mark.parametrize(
    ("asked", "param", "other"),
    [
        ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [5]}, "structured_outputs", "allowed_token_ids"),
        ({"structured_outputs": {"regex": "a"}, "bad_words": ["a"]}, "structured_outputs", "bad_words"),
        ({"allowed_token_ids": [7, 8], "bad_words": [[7], [8]]}, "allowed_token_ids", "bad_words"),
        ({"allowed_token_ids": [0], "min_tokens": 1}, "allowed_token_ids", "min_tokens"),
        ({"bad_words": [[token] for token in range(300)]}, "bad_words", ""),
    ],
)  # fmt: skip
def test_parameters_that_leave_no_first_token_are_refused_before_a_step(
    llm: LLM, asked: Mapping[str, Any], param: str, other: str
) -> None:
    before = llm.stats().num_steps
    (output,) = llm.generate([PROMPTS[1]], SamplingParams(**asked))
    assert output.error == f"{param}{other and f' beside {other}'} leaves the output no token to begin with"
    assert output.outputs[0].finish_reason == "error"
    assert llm.stats().num_steps == before


def test_a_form_that_is_found_out_while_it_is_written_ends_its_request_alone(llm: LLM) -> None:
    """A grammar whose texts never end, and tokens of which a form has but the first."""
    letter = {one: int(llm.tokenizer(one)["input_ids"][0]) for one in "ab"}
    params = [
        with_form(grammar='start: "a" start'),
        with_form(regex="[a-z]*"),
        dataclasses.replace(with_form(regex="abc"), allowed_token_ids=[letter["a"], letter["b"]]),
    ]
    endless, good, barred = llm.generate(PROMPTS[:3], params)
    assert str(endless.error).startswith("structured_outputs: ")
    assert good.error is None
    assert barred.error == "structured_outputs and allowed_token_ids left no token to choose output token 2 from"
    assert barred.outputs[0].text == "ab"


INTERSECTED = {"allOf": [{"type": "string", "pattern": f"a.*b{i}"} for i in range(40)]}
DEEP: list[Any] = []
for _ in range(300):
    DEEP = [DEEP]


def nested(depth: int) -> dict[str, Any]:
    """A schema of `depth` levels."""
    return {"type": "array", "items": nested(depth - 1)} if depth > 1 else {"type": "string"}


NESTED_GROUPS, NESTED_RULES = ("(" * 300 + inner + ")" * 300 for inner in ("a", '"a"'))


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"json": {"const": DEEP}}, "structured_outputs.json is refused: recursion limit"),
        ({"json": INTERSECTED}, "structured_outputs.json is refused: it takes more than 0.8 s to compile"),
        ({"json": {"type": "strin"}}, "structured_outputs.json is refused: Invalid type: strin"),
        ({"json": {"$ref": "http://localhost/x"}}, "structured_outputs.json is refused: Resource"),
        (
            {"json": {"oneOf": [{}, {}]}},
            "is refused: oneOf is not taken where a value might have two of its forms: write anyOf",
        ),
        ({"regex": "(a"}, "structured_outputs.regex is refused"),
        ({"grammar": 'start: "a'}, "structured_outputs.grammar is refused"),
        ({"grammar": "start: missing"}, "structured_outputs.grammar is refused"),
        ({"regex": NESTED_GROUPS}, "structured_outputs.regex is refused"),
        ({"grammar": f"start: {NESTED_RULES}"}, "structured_outputs.grammar is refused"),
        ({"json": {"pattern": "ab(c"}}, "refused: unclosed group at character 3 of a regex, in 'ab(c'"),
        ({"regex": "a" * 500 + "[c"}, f"class at character 501 of a regex, in '{'a' * 20}[c'"),
        ({"json": {"$ref": "#"}}, "structured_outputs.json is refused: no output has this form"),
        ({"regex": r"[^\s\S]"}, "structured_outputs.regex is refused: no output has this form"),
        ({"grammar": "start: start"}, "structured_outputs.grammar is refused: no output has this form"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_its_field_and_others_go_on(
    llm: LLM, form: Mapping[str, Any], why: str
) -> None:
    refused, served = llm.generate(PROMPTS[:2], [with_form(**form), with_form(choice=["yes"])])
    assert why in str(refused.error)
    assert refused.outputs[0].finish_reason == "error"
    assert len(str(refused.error)) < 500
    assert served.outputs[0].text == "yes"


def test_a_slow_form_that_is_sent_again_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, slow = GrammarReader(), StructuredOutputsParams(json=INTERSECTED)
    monkeypatch.setattr(reader, "_ask", lambda _: ("", "it takes too long"))
    assert not reader.knows(slow)
    for _ in range(2):
        with pytest.raises(RefusedError, match="structured_outputs.json is refused: it takes too long"):
            reader.read(slow)
        assert reader.knows(slow)
        monkeypatch.setattr(reader, "_ask", None)
    monkeypatch.setattr(grammar_reader, "_REFUSED_S", 0.0)  # it may have been the machine
    assert not reader.knows(slow)


def test_one_thread_compiles_each_form_once_for_all_who_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, may_go_on, threads = GrammarCompiler(llm.tokenizer, 300, (0,)), threading.Event(), list[str]()
    compiled = compiler._compile

    def wait(form: StructuredOutputsParams) -> Any:
        threads.append(threading.current_thread().name)
        assert may_go_on.wait(30)
        return compiled(form)

    monkeypatch.setattr(compiler, "_compile", wait)
    before = threading.active_count()
    forms = [StructuredOutputsParams(regex="a{2}"), StructuredOutputsParams(choice=["b"])]
    futures = [compiler.start(form) for form in forms * 50]
    assert threading.active_count() == before + 1
    may_go_on.set()
    found = {id(future.result(30)) for future in futures}
    assert len(found) == 2
    assert threads == ["grammar compiler"] * 2
    assert compiler.start(forms[0]).result(0) is futures[0].result()
    later = compiler.start(StructuredOutputsParams(regex="c{2}"))  # its thread may have ended
    assert not isinstance(later.result(30), str)


def test_a_reader_that_was_killed_is_started_again(llm: LLM) -> None:
    compiler = GrammarCompiler(llm.tokenizer, 300, (0,))
    for number in range(2):
        compiler.compile(StructuredOutputsParams(regex=f"a{{{number + 1}}}"))  # RefusedError where it cannot be
        assert compiler._reader is not None
        assert compiler._reader._process is not None
        compiler._reader._process.kill()
        compiler._reader._process.wait()


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object; got none"),
        ({"json": {}, "regex": "a"}, "got json and regex"),
        ({"json_object": False}, "got none"),
        ({"json_object": 1}, "json_object must be True or False"),
        ({"json": "x" * 10**6}, "json must have 1 to 65536 characters, got 1000000"),
        ({"json": {"const": "x" * 10**6}}, "json must have 1 to 65536 characters"),
        ({"json": 5}, "json must be a mapping or its text"),
        ({"json": {"const": {1, 2}}}, "json is no JSON"),
        ({"json": "{"}, "json is no JSON"),
        ({"json": f'{{"const": {"1" * 5000}}}'}, "json has a number of thousands of digits"),
        ({"json": nested(101)}, "json is nested more than 100 levels deep"),
        ({"json": nested(300)}, "json is nested more than 100 levels deep"),
        ({"regex": "(a+)+$"}, "regex repeats a repetition without bound, '(a+)+': write one, as a+ for (a+)+"),
        ({"json": {"items": {"pattern": "^(a+)+$"}}}, "json has a pattern that repeats a repetition"),
        ({"json": {"patternProperties": {"(a*)*": {}}}}, "json has patternProperties of which one repeats"),
        ({"grammar": 'start: "/(a+)+/" /b/ // (a+)+\n| /c(d+)*/'}, "grammar has a regex that repeats .* '(d+)*'"),
        ({"regex": ""}, "regex must have 1 to"),
        ({"regex": "\ud800"}, "regex cannot be encoded"),
        ({"grammar": 5}, "grammar must be a text"),
        ({"choice": "ab"}, "choice must be a list of texts"),
        ({"choice": []}, "choice must hold 1 to 1000 texts"),
        ({"choice": ["a", ""]}, "choice must hold"),
    ],
)
def test_a_wrong_form_is_named_with_what_is_allowed(form: Mapping[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=r"^structured_outputs\b") as error:
        StructuredOutputsParams(**form)
    assert re.search(re.escape(why).replace(r"\.\*", ".*"), str(error.value))
    with pytest.raises(ValueError, match=r"structured_outputs\b"):
        SamplingParams(structured_outputs=form)  # type: ignore[arg-type]


@pytest.mark.parametrize("schema", [{"properties": {"(a+)+": {}}}, {"const": {"pattern": "(a+)+"}}])
def test_what_is_no_regex_is_not_judged_as_one(schema: dict[str, Any]) -> None:
    assert json.loads(StructuredOutputsParams(json=schema).definition[1]) == schema


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+", "(a*)*", "(?:a+)*", "((a+))+", r"(\w+)*", "([a-z]+){2,}", "(a{2,})+", "(?P<n>[)+]+)*",
        r"(\)+)+", "([[:alpha:]]+)+", "(a+?)+", "(^a+$)*", "(?i:a+)+?",
    ],
)  # fmt: skip
def test_a_repetition_of_nothing_but_a_repetition_is_found(pattern: str) -> None:
    assert find_repeated_repetition(f"b{pattern}c") == pattern


@pytest.mark.parametrize(
    "pattern",
    [
        r"^\d+$", r"[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}", r"(\w+,)*\w+", "([a-z]+ ?)+", r'"([^"\\]+|\\.)*"',
        r"(\d+\.)+\d+", "(foo+)*", "((a|b)+c)*", "(a+)?", "(a+){3}", "([A-Z]+){1,5}", "[(a+)]+", r"\(a+\)+", "[]a+)]+",
        "(a+b*)+", r"\d{4}-\d{2}-\d{2}", r"(\s*\w+\s*)*", "(yes|no)+", "((a|b+))*", r"(?:https?://)?(?:[\w-]+\.)+[a-z]+",
        r"(?:/[\w./-]*)*\?q=.+", r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", r"(\p{L}+ )*\p{L}+", "#[0-9a-fA-F]{6}",
        "a{,3}", "{", "(", ")", "[", "\\", "",
    ],
)  # fmt: skip
def test_an_ordinary_pattern_is_not_taken_for_one(pattern: str) -> None:
    assert find_repeated_repetition(pattern) is None


def test_a_schema_of_the_greatest_depth_is_served(llm: LLM) -> None:
    (output,) = llm.generate([PROMPTS[1]], with_form(json=nested(100)))
    assert output.outputs[0].text.startswith("[")


def test_a_form_is_a_mapping_too() -> None:
    params = SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    assert params == SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    assert hash(params) == hash(dataclasses.replace(params))
    with pytest.raises(ValueError, match="structured_outputs has no 'rgex'.*regex"):
        SamplingParams(structured_outputs={"rgex": "a"})  # type: ignore[arg-type]


def test_without_the_extra_a_form_is_refused_with_the_command(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    (output,) = make_llm(checkpoint).generate([[1]], with_form(regex="a"))
    assert output.error == "structured_outputs.regex needs llguidance: pip install 'tkernels[serve]'"


def test_without_a_tokenizer_a_form_is_refused(checkpoint_without_tokenizer: Path) -> None:
    (output,) = make_llm(checkpoint_without_tokenizer).generate([[1]], with_form(regex="a"))
    assert "there is no tokenizer to make it" in str(output.error)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300])
def test_a_mask_bars_what_it_does_not_hold(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    for entries in ([0, 1, 2, 3], [1, 3], [2]):
        allowed = rng.random((len(entries), vocab_size)) < 0.5
        masks = np.stack([pack_mask(np.flatnonzero(one), vocab_size) for one in allowed])
        assert masks.shape[1] == count_words(vocab_size)
        scores = torch.from_numpy(rng.normal(size=(4, vocab_size)))
        expected = scores.clone().numpy()
        for i, one in zip(entries, allowed, strict=True):
            expected[i][~one] = -np.inf
        bar_others(scores, np.array(entries), torch.from_numpy(masks), HostRuntime())
        assert (scores.numpy() == expected).all()
        assert (unpack_masks(torch.from_numpy(masks))[:, :vocab_size].numpy() == allowed).all()
