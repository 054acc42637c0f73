"""Walked from `openai`'s own typed request classes: each field has its effect, or none as the page says, or its 400.

A field that OpenAI adds is in no table here, and fails the walk.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import ChatCompletionContentPartParam, ChatCompletionMessageParam
from openai.types.chat import completion_create_params as chat_params
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam
from pydantic import TypeAdapter, ValidationError

from tests.tsched.serving.conftest import OPTIONS, Answer, RunningServer
from tsched import LLM, SamplingParams
from tsched.serving.protocol.chat import ChatRequest
from tsched.serving.protocol.completions import CompletionRequest
from tsched.serving.protocol.sampling import WireModel

PATHS = {"text": "/v1/completions", "chat": "/v1/chat/completions"}
KINDS = {
    "text": (text_params.CompletionCreateParamsNonStreaming, text_params.CompletionCreateParamsStreaming),
    "chat": (chat_params.CompletionCreateParamsNonStreaming, chat_params.CompletionCreateParamsStreaming),
}
PROMPT, RENDERED = "def scan(line):", "<user>def scan(line):<assistant>"
MESSAGES = [{"role": "user", "content": PROMPT}]
SAMPLING: dict[str, Any] = {"max_tokens": 12, "temperature": 1.3, "seed": 11}
BASES: dict[str, dict[str, Any]] = {
    "text": {"model": "random", "prompt": PROMPT, **SAMPLING},
    "chat": {"model": "random", "messages": MESSAGES, **SAMPLING},
}
SCHEMA = {"type": "array", "items": {"type": "boolean"}, "minItems": 2}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "flags", "schema": SCHEMA, "strict": True}}

LIKE_THE_ENGINE: dict[str, tuple[Any, dict[str, Any]]] = {
    # field -> its value, and SamplingParams that say the same
    "frequency_penalty": (2.0, {"frequency_penalty": 2.0}),
    "presence_penalty": (-2.0, {"presence_penalty": -2.0}),
    "logit_bias": ({"260": 100}, {"logit_bias": {260: 100.0}}),
    "max_tokens": (5, {"max_tokens": 5}),
    "n": (3, {"n": 3}),
    "seed": (12, {"seed": 12}),
    "temperature": (0, {"temperature": 0.0}),
    "top_p": (0.1, {"top_p": 0.1}),
    "max_completion_tokens": (7, {"max_tokens": 7}),
    "response_format": (JSON_SCHEMA, {"structured_outputs": {"json": SCHEMA}}),
}
BESIDE: dict[str, dict[str, Any]] = {
    # without which the field could say nothing, or would by chance alone
    "frequency_penalty": {"logit_bias": {"260": 6}},
    "repetition_penalty": {"logit_bias": {"260": 6}},
    "min_tokens": {"logit_bias": {"0": 8}},
    "ignore_eos": {"logit_bias": {"0": 8}},
    "skip_special_tokens": {"logit_bias": {"0": 8}, "ignore_eos": True},
    "include_stop_str_in_output": {"stop": list(string.ascii_letters)},
}
WITHOUT_EFFECT: dict[str, Any] = {
    "user": "u",
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "safety_identifier": "s",
    "service_tier": "default",
    "store": False,
    "tool_choice": "none",
}
UNSUPPORTED: dict[str, Any] = {
    "suffix": "}",
    "audio": {"format": "wav", "voice": "alloy"},
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "moderation": {"model": "omni"},
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "verbosity": "low",
    "web_search_options": {},
}


def list_models(model: type[WireModel]) -> Iterator[type[WireModel]]:
    for one in model.__subclasses__():
        yield one
        yield from list_models(one)


def test_a_field_that_is_left_out_has_a_value_that_it_takes() -> None:
    fields = [field for model in list_models(WireModel) for field in model.model_fields.values()]
    for field in fields:
        if not field.is_required():
            TypeAdapter(field.annotation).validate_python(field.default)


def test_a_list_of_allowed_tokens_has_a_thousand_at_most() -> None:
    CompletionRequest.model_validate(BASES["text"] | {"allowed_token_ids": [5] * 1000})
    with pytest.raises(ValidationError, match="allowed_token_ids"):
        CompletionRequest.model_validate(BASES["text"] | {"allowed_token_ids": [5] * 1001})


class Asker:
    """Asks one API, and knows what the engine says to the same prompt."""

    def __init__(self, api: str, server: RunningServer, llm: LLM) -> None:
        self.api, self._server, self._llm = api, server, llm

    def post(self, **changes: Any) -> Answer:
        body = {name: value for name, value in (BASES[self.api] | changes).items() if value is not None}
        return self._server.post(PATHS[self.api], body)

    def choices(self, **changes: Any) -> list[dict[str, Any]]:
        answer = self.post(**changes)
        assert answer.status == 200, answer.body
        choices: list[dict[str, Any]] = answer.json["choices"]
        return choices

    def texts(self, **changes: Any) -> list[str]:
        return [one["text"] if self.api == "text" else one["message"]["content"] for one in self.choices(**changes)]

    def generate(self, prompt: str | None = None, **changes: Any) -> list[str]:
        prompt = prompt or (PROMPT if self.api == "text" else RENDERED)
        return [one.text for one in self._llm.generate([prompt], SamplingParams(**SAMPLING | changes))[0].outputs]

    def ask_with(self, name: str, value: Any, own: dict[str, Any], **changes: Any) -> None:
        """The field `name` does what `own` says to the engine, and not nothing."""
        beside = BESIDE.get(name, {})
        biases = {int(token): bias for token, bias in beside.get("logit_bias", {}).items()}
        offline = beside | ({"logit_bias": biases} if biases else {})
        asked = self.texts(**beside, **changes, **{name: value})
        assert asked == self.generate(**offline, **own) != self.generate(**offline)


def ask_for_another_model(one: Asker) -> None:
    answer = one.post(model="gpt-4")
    assert (answer.status, answer.error["param"]) == (404, "model")


def ask_other_prompts(one: Asker) -> None:
    others = ["return [word", "x"]
    assert one.texts(prompt=others) == [one.generate(other)[0] for other in others]


def ask_other_messages(one: Asker) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}]
    assert one.texts(messages=messages) == one.generate("<system>s<user>x<assistant>")


def ask_for_the_best(one: Asker) -> None:
    assert one.texts(best_of=2, n=2) == one.generate(n=2)
    assert one.post(best_of=3, n=2).error["param"] == "best_of"


def ask_for_an_echo(one: Asker) -> None:
    assert one.texts(echo=True) == [PROMPT + one.generate()[0]]


def ask_to_stop(one: Asker) -> None:
    text = one.generate()[0]
    for stop in (text[3], [text[3], "\0"]):
        assert one.texts(stop=stop) == one.generate(stop=stop) == [text[: text.index(text[3])]]


def ask_for_log_probabilities(one: Asker) -> None:
    asked = {"logprobs": 3} if one.api == "text" else {"logprobs": True}
    assert all(choice["logprobs"] is None for choice in one.choices())
    (choice,) = one.choices(**asked)
    if one.api == "text":
        assert [len(tops) >= 3 for tops in choice["logprobs"]["top_logprobs"]] == [True] * SAMPLING["max_tokens"]
        (none,) = one.choices(logprobs=0)
        assert none["logprobs"]["token_logprobs"] == choice["logprobs"]["token_logprobs"]
        assert {len(tops) for tops in none["logprobs"]["top_logprobs"]} == {1}
    else:
        assert [place["top_logprobs"] for place in choice["logprobs"]["content"]] == [[]] * SAMPLING["max_tokens"]


def ask_for_the_most_likely(one: Asker) -> None:
    (choice,) = one.choices(logprobs=True, top_logprobs=2)
    assert {len(place["top_logprobs"]) for place in choice["logprobs"]["content"]} == {2}
    for alone in ({"top_logprobs": 2}, {"top_logprobs": 2, "logprobs": False}):
        assert one.post(**alone).error["param"] == "top_logprobs"


def ask_for_a_stream(one: Asker) -> None:
    events = one.post(stream=True).events
    parts = [choice["text"] if one.api == "text" else choice["delta"].get("content", "")
             for event in events for choice in event["choices"]]  # fmt: skip
    assert len(parts) > 1
    assert "".join(parts) == one.generate()[0]
    assert one.texts(stream=False) == one.generate()


def ask_for_usage(one: Asker) -> None:
    for options, has_usage in (({"include_usage": True}, True), ({"include_usage": False}, False)):
        last = one.post(stream=True, stream_options=options).events[-1]
        assert (last.get("usage") is not None, last["choices"] == []) == (has_usage, has_usage)
    events = one.post(stream=True, stream_options={"include_obfuscation": False}).events
    assert {name for event in events for name in event} == {"id", "object", "created", "model", "choices"}
    assert one.post(stream=True, stream_options={"include_obfuscation": True}).error["param"] == "stream_options"
    assert one.post(stream_options={"include_usage": True}).error["param"] == "stream_options"


EFFECTS: dict[str, Callable[[Asker], None]] = {
    "model": ask_for_another_model,
    "prompt": ask_other_prompts,
    "messages": ask_other_messages,
    "best_of": ask_for_the_best,
    "echo": ask_for_an_echo,
    "stop": ask_to_stop,
    "logprobs": ask_for_log_probabilities,
    "top_logprobs": ask_for_the_most_likely,
    "stream": ask_for_a_stream,
    "stream_options": ask_for_usage,
}


@pytest.fixture(scope="module")
def llm(chat_checkpoint: Path) -> LLM:
    return LLM(chat_checkpoint, **OPTIONS)


def fields_of(api: str) -> set[str]:
    return {name for kind in KINDS[api] for name in get_type_hints(kind)}


FIELDS = [(api, name) for api in PATHS for name in sorted(fields_of(api))]


def test_every_field_is_in_one_table() -> None:
    tables: tuple[dict[str, Any], ...] = (EFFECTS, LIKE_THE_ENGINE, WITHOUT_EFFECT, UNSUPPORTED)
    assert sorted(name for table in tables for name in table) == sorted(fields_of("text") | fields_of("chat"))
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    listed = page[page.index("Without effect") :].partition("\n\n")[0]
    assert [name for name in WITHOUT_EFFECT if f"`{name}" not in listed] == []


@pytest.mark.parametrize(("api", "name"), FIELDS)
def test_each_field_has_its_effect_or_is_refused(api: str, name: str, server: RunningServer, llm: LLM) -> None:
    one = Asker(api, server, llm)
    if name in EFFECTS:
        EFFECTS[name](one)
    elif name in LIKE_THE_ENGINE:
        value, own = LIKE_THE_ENGINE[name]
        one.ask_with(name, value, own, **({"max_tokens": None} if name == "max_completion_tokens" else {}))
    elif name in WITHOUT_EFFECT:
        assert one.texts(**{name: WITHOUT_EFFECT[name]}) == one.generate()
    else:
        answer = one.post(**{name: UNSUPPORTED[name]})
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unsupported_parameter", name)
    assert one.post(**{name: None}).status == (400 if name in ("model", "prompt", "messages") else 200)


def render_without_a_prompt(one: Asker) -> None:
    assert one.texts(add_generation_prompt=False) == one.generate(f"<user>{PROMPT}")
    assert one.texts(add_generation_prompt=True) == one.generate()


def go_on_with_the_last_message(one: Asker) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "    ret"}]
    asked = {"messages": messages, "add_generation_prompt": False}
    assert one.texts(**asked, continue_final_message=True) == one.generate(f"{RENDERED}    ret")


def set_a_variable(one: Asker) -> None:
    assert one.texts(chat_template_kwargs={"loud": True}) == one.generate(f"{RENDERED}!")
    assert "reads loud" in one.post(chat_template_kwargs={"lout": True}).error["message"]


def go_first(one: Asker) -> None:
    """What the engine is given: tests/tsched/serving/test_operations.py; what it does: tests/tsched."""
    assert one.texts(priority=-3) == one.generate()
    assert one.post(priority=2**31).error["param"] == "priority"


def keep_a_cache_apart(one: Asker) -> None:
    """What no other tenant finds: tests/tsched/serving/test_answers.py."""
    assert one.texts(cache_salt="s") == one.generate()


VLLMS: dict[str, tuple[Any, dict[str, Any]] | Callable[[Asker], None]] = {
    "top_k": (1, {"top_k": 1}),
    "min_p": (0.5, {"min_p": 0.5}),
    "repetition_penalty": (3.0, {"repetition_penalty": 3.0}),
    "truncate_prompt_tokens": (3, {"truncate_prompt_tokens": 3}),
    "stop_token_ids": (list(range(5, 150)), {"stop_token_ids": range(5, 150)}),
    "allowed_token_ids": ([5, 6, 7], {"allowed_token_ids": [5, 6, 7]}),
    "bad_words": ([[one] for one in range(5, 205)], {"bad_words": [[one] for one in range(5, 205)]}),
    "structured_outputs": ({"regex": "[ab]{8}"}, {"structured_outputs": {"regex": "[ab]{8}"}}),
    "min_tokens": (9, {"min_tokens": 9}),
    "ignore_eos": (True, {"ignore_eos": True}),
    "include_stop_str_in_output": (True, {"include_stop_str_in_output": True}),
    "skip_special_tokens": (False, {"skip_special_tokens": False}),
    "add_generation_prompt": render_without_a_prompt,
    "continue_final_message": go_on_with_the_last_message,
    "chat_template_kwargs": set_a_variable,
    "priority": go_first,
    "cache_salt": keep_a_cache_apart,
}
OWN = {"text": set(CompletionRequest.model_fields), "chat": set(ChatRequest.model_fields)}
EXTRAS = [(api, name) for api in PATHS for name in sorted(OWN[api] - fields_of(api))]


@pytest.mark.parametrize(("api", "name"), EXTRAS)
def test_each_field_that_openai_has_not_has_its_effect(api: str, name: str, server: RunningServer, llm: LLM) -> None:
    one, entry = Asker(api, server, llm), (VLLMS | LIKE_THE_ENGINE)[name]
    if not isinstance(entry, tuple):
        entry(one)
        return
    one.ask_with(name, *entry)


def literal_of(kind: Any, name: str) -> str:
    (value,) = get_args(next(iter([get_type_hints(kind)[name]])))
    return str(value)


def test_every_kind_of_message_and_part_is_served_or_refused(server: RunningServer, llm: LLM) -> None:
    one = Asker("chat", server, llm)
    served = {"developer", "system", "user", "assistant"}
    kinds = {literal_of(kind, "role"): kind for kind in get_args(ChatCompletionMessageParam)}
    assert kinds.keys() - served == {"tool", "function"}
    fields = {name for role in served for name in get_type_hints(kinds[role])}
    assert fields == {"role", "content", "name", "audio", "function_call", "refusal", "tool_calls"}
    for role in kinds:
        answer = one.post(messages=[{"role": role, "content": "x"}])
        assert answer.status == (200 if role in served else 400), answer.body
        if role in served:
            shown = "system" if role == "developer" else role  # the template does not know the word
            expected = one.generate(f"<{shown}>x<assistant>")
            assert one.texts(messages=[{"role": role, "content": "x"}]) == expected
    for name in fields - {"role", "content", "name"}:
        assert one.post(messages=[{"role": "assistant", "content": "x", name: {"a": 1}}]).error["param"] == "messages"
        for empty in (None, []):  # as answers have them
            answer = one.post(messages=[{"role": "assistant", "content": "x", name: empty}])
            assert answer.status == 200, answer.body
    parts = {literal_of(kind, "type") for kind in get_args(ChatCompletionContentPartParam)}
    assert parts == {"text", "image_url", "input_audio", "file"}
    for part in parts - {"text"}:
        answer = one.post(messages=[{"role": "user", "content": [{"type": part, part: {}}]}])
        assert (answer.status, answer.error["param"]) == (400, "messages")


def test_every_option_of_a_stream_and_format_of_a_response_is_known() -> None:
    assert set(get_type_hints(ChatCompletionStreamOptionsParam)) == {"include_usage", "include_obfuscation"}
    formats = {literal_of(kind, "type") for kind in get_args(chat_params.ResponseFormat)}
    assert formats == {"text", "json_object", "json_schema"}
