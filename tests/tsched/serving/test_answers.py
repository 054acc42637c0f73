"""Bodies and streams: their text, reasons, log-probabilities and usage are those of `LLM.generate`."""

import json
import random
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.tsched.serving.conftest import OPTIONS, RunningServer
from tsched import LLM, RequestOutput, SamplingParams
from tsched.serving.app import create_app
from tsched.serving.auth import Keys, Tenant
from tsched.serving.local_client import LocalClient
from tsched.serving.protocol.completions import CompletionRequest
from tsched.serving.responses import frame
from tsched.serving.text import TextCodec

PROMPTS = ["def scan(line, start=0):", "return [word", "'ünïcode 🐍'"]


@pytest.fixture(scope="module")
def llm(chat_checkpoint: Path) -> LLM:
    return LLM(chat_checkpoint, **OPTIONS)


@pytest.fixture(scope="module")
def tokenizer(chat_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(chat_checkpoint / "tokenizer.json"))


def generate(llm: LLM, prompts: Any, **sampling: Any) -> list[RequestOutput]:
    return llm.generate(prompts, SamplingParams(**sampling))


def own_logprobs(places: Any, token_ids: list[int]) -> list[float]:
    """Those of the tokens themselves."""
    return [place[token].logprob for place, token in zip(places or (), token_ids, strict=True)]


def joined(events: list[Any], count: int) -> list[dict[str, Any]]:
    """Text, reason and tokens of each choice of a stream's chunks."""
    found = [{"text": "", "finish_reason": None, "tokens": [], "logprobs": []} for _ in range(count)]
    for event in events:
        for choice in event["choices"]:
            one = found[choice["index"]]
            assert one["finish_reason"] is None, "a chunk after the end"
            one["text"] += choice["text"]
            one["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"] is not None:
                one["tokens"] += choice["logprobs"]["tokens"]
                one["logprobs"] += choice["logprobs"]["token_logprobs"]
    return found


def test_drawn_requests_have_one_text_whole_streamed_and_offline(server: RunningServer, llm: LLM) -> None:
    drawn = random.Random(0)
    for _ in range(8):
        sampling: dict[str, Any] = {
            "temperature": drawn.choice([0.0, 0.7, 1.5]),
            "max_tokens": drawn.randint(1, 16),
            "seed": drawn.randint(0, 9),
            "n": drawn.choice([1, 1, 3]),
            "top_p": drawn.choice([1.0, 0.8]),
            "stop": drawn.choice([None, ["e"], ["wor", " "]]),
            "logprobs": drawn.choice([None, 0, 2]),
            "presence_penalty": drawn.choice([0.0, 0.5]),
        }
        if sampling["temperature"] == 0:
            sampling["n"] = 1
        prompts = drawn.sample(PROMPTS, drawn.randint(1, 2))
        body = {"model": "random", "prompt": prompts, **sampling}
        outputs = [one for request in generate(llm, prompts, **sampling) for one in request.outputs]
        whole = server.post("/v1/completions", body)
        assert whole.status == 200, whole.body
        answer = whole.json
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(outputs)))
        assert [choice["text"] for choice in answer["choices"]] == [one.text for one in outputs]
        assert [choice["finish_reason"] for choice in answer["choices"]] == [one.finish_reason for one in outputs]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, usage = server.post("/v1/completions", body | options).events
        streamed = joined(chunks, len(outputs))
        assert [one["text"] for one in streamed] == [one.text for one in outputs]
        assert [one["finish_reason"] for one in streamed] == [one.finish_reason for one in outputs]
        assert usage["usage"] == answer["usage"]
        assert usage["usage"]["completion_tokens"] == sum(len(one.token_ids) for one in outputs)
        if sampling["logprobs"] is not None:
            for one, choice, expected in zip(streamed, answer["choices"], outputs, strict=True):
                assert one["tokens"] == choice["logprobs"]["tokens"]
                assert one["logprobs"] == choice["logprobs"]["token_logprobs"]
                own = [
                    places[token].logprob
                    for places, token in zip(expected.logprobs or (), expected.token_ids, strict=True)
                ]
                assert one["logprobs"] == pytest.approx(own, abs=1e-5)


def test_the_prompts_of_a_request_begin_in_one_step(server: RunningServer, llm: LLM) -> None:
    """At this temperature a batch that rounds apart draws apart."""
    sampling = {"temperature": 2.0, "n": 2, "seed": 1, "max_tokens": 8}
    body = {"model": "random", "prompt": [[1, 2], [3]], **sampling}
    outputs = [one.text for request in generate(llm, [[1, 2], [3]], **sampling) for one in request.outputs]
    for _ in range(8):
        assert [choice["text"] for choice in server.post("/v1/completions", body).json["choices"]] == outputs
        streamed = joined(server.post("/v1/completions", body | {"stream": True}).events, 4)
        assert [one["text"] for one in streamed] == outputs


def test_no_character_of_a_text_ends_its_event_for_clients_that_read_lines() -> None:
    event = {"text": "".join(map(chr, (0x0B, 0x1E, 0x85, 0x2028, 0x2029, 0x1F40D)))}
    line, *rest = frame(event).decode().splitlines()
    assert json.loads(line.removeprefix("data: ")) == event
    assert rest == [""]


def test_the_log_probabilities_of_a_completion(server: RunningServer, llm: LLM) -> None:
    (output,) = generate(llm, [PROMPTS[2]], temperature=1.0, seed=1, max_tokens=10, logprobs=3)
    body = {"model": "random", "prompt": PROMPTS[2], "temperature": 1.0, "seed": 1, "max_tokens": 10, "logprobs": 3}
    (choice,) = server.post("/v1/completions", body).json["choices"]
    found, (expected,) = choice["logprobs"], output.outputs
    assert len(found["tokens"]) == len(expected.token_ids) == len(found["text_offset"])
    for tops, token, own, places in zip(
        found["top_logprobs"], found["tokens"], found["token_logprobs"], expected.logprobs or (), strict=True
    ):
        assert tops[token] == own
        assert sorted(tops.values()) == pytest.approx(sorted(one.logprob for one in places.values()), abs=1e-5)
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if not token.startswith("bytes:") and "�" not in choice["text"]:
            assert choice["text"][offset : offset + len(token)] == token


def test_a_chats_log_probabilities_have_bytes(server: RunningServer, llm: LLM, tokenizer: Tokenizer) -> None:
    prompt = "<user>'ünï<assistant>"
    (output,) = generate(llm, [prompt], temperature=1.0, seed=5, max_tokens=12, logprobs=2)
    messages = [{"role": "user", "content": "'ünï"}]
    body = {"model": "random", "messages": messages, "temperature": 1.0, "seed": 5, "max_tokens": 12}
    answer = server.post("/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 2})
    (choice,) = answer.json["choices"]
    places, (expected,) = choice["logprobs"]["content"], output.outputs
    whole = b"".join(bytes(place["bytes"]) for place in places)
    assert whole.decode("utf-8", "replace") == tokenizer.decode(expected.token_ids, skip_special_tokens=False)
    for place, token_id, scores in zip(places, expected.token_ids, expected.logprobs or (), strict=True):
        assert place["logprob"] == pytest.approx(scores[token_id].logprob, abs=1e-5)
        assert len(place["top_logprobs"]) == 2
        best = sorted((one.logprob for one in scores.values()), reverse=True)[:2]
        assert [one["logprob"] for one in place["top_logprobs"]] == pytest.approx(best, abs=1e-5)
    stream = server.post("/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 2, "stream": True}).events
    assert [one for event in stream for one in event["choices"][0]["logprobs"]["content"]] == places
    assert "".join(event["choices"][0]["delta"]["content"] for event in stream) == choice["message"]["content"]


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_the_prompt_as_lm_eval_reads_it(
    max_tokens: int, stream: bool, server: RunningServer, llm: LLM
) -> None:
    prompts = [[5, 6, 7, 260, 30], [261, 9, 10]]
    sampling = {"temperature": 0.0, "logprobs": 1, "max_tokens": max_tokens}
    outputs = generate(llm, prompts, **sampling, prompt_logprobs=1)
    body = {"model": "random", "prompt": prompts, "echo": True, **sampling, "stream": stream}
    answer = server.post("/v1/completions", body)
    if stream:
        choices = joined(answer.events, 2)
        found = [(one["text"], one["logprobs"]) for one in choices]
    else:
        found = [(choice["text"], choice["logprobs"]["token_logprobs"]) for choice in answer.json["choices"]]
        for choice, output in zip(answer.json["choices"], outputs, strict=True):
            tops = choice["logprobs"]["top_logprobs"]
            assert tops[0] is None
            assert len(tops) == len(output.prompt_token_ids) + max_tokens
            assert all(
                max(top.values()) >= own
                for top, own in zip(tops[1:], choice["logprobs"]["token_logprobs"][1:], strict=True)
            )
    for (text, logprobs), output in zip(found, outputs, strict=True):
        assert text == llm.tokenizer.decode(output.prompt_token_ids) + output.outputs[0].text
        own = [
            place[token].logprob
            for place, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        ]
        new = [
            place[token].logprob
            for place, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
        ]
        assert logprobs[0] is None
        assert logprobs[1:] == pytest.approx(own + new, abs=1e-5)


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_an_echo_without_a_text_has_its_log_probabilities_too(
    has_tokenizer: bool, server: RunningServer, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Special tokens have no text, and nothing has one where there is no tokenizer."""
    if not has_tokenizer:
        monkeypatch.setattr(server.front, "codec", None)
    body = {"model": "random", "prompt": [0, 0], "echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = server.post("/v1/completions", body).json["choices"]
    (output,) = generate(llm, [[0, 0]], prompt_logprobs=1, max_tokens=0)
    assert choice["text"] == ""
    assert choice["logprobs"]["tokens"] == (["<end>"] * 2 if has_tokenizer else ["token_id:0"] * 2)
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1] == pytest.approx(output.prompt_logprobs[1][0].logprob, abs=1e-5)


def test_echo_alone_repeats_the_prompt(server: RunningServer) -> None:
    body = {"model": "random", "prompt": PROMPTS[0], "echo": True, "max_tokens": 0}
    answer = server.post("/v1/completions", body).json
    assert answer["choices"][0]["text"] == PROMPTS[0]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("skips", [True, False])
def test_an_echo_is_its_tokens_text_and_offsets_point_into_it(
    skips: bool, server: RunningServer, tokenizer: Tokenizer
) -> None:
    """However the prompt was sent, and whatever special tokens it spells."""
    text = "<end>def scan(<end>line"
    ids = tokenizer.encode(text).ids
    assert ids.count(0) == 2
    sampling = {"max_tokens": 3, "temperature": 0, "logit_bias": {"0": 100}, "ignore_eos": True}
    body = {"model": "random", "echo": True, "logprobs": 0, "skip_special_tokens": skips, **sampling}
    choices = [server.post("/v1/completions", body | {"prompt": one}).json["choices"] for one in (text, ids)]
    assert choices[0] == choices[1]
    ((choice,), _) = choices
    assert choice["text"] == (text.replace("<end>", "") if skips else text + "<end>" * 3)
    found = choice["logprobs"]
    assert found["tokens"][-3:] == ["<end>"] * 3
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if not (skips and token == "<end>"):
            assert choice["text"][offset : offset + len(token)] == token


def test_usage_rides_with_every_chunk_where_asked(server: RunningServer) -> None:
    body = {"model": "random", "prompt": PROMPTS[0], "max_tokens": 6, "ignore_eos": True, "stream": True}
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last = server.post("/v1/completions", body | options).events
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 6
    assert all("usage" not in chunk for chunk in server.post("/v1/completions", body).events)


def test_tokens_and_text_are_the_tokenizers(server: RunningServer, llm: LLM, tokenizer: Tokenizer) -> None:
    for text in PROMPTS:
        ids = server.post("/tokenize", {"prompt": text}).json["tokens"]
        assert ids == tokenizer.encode(text).ids == llm.tokenizer(text)["input_ids"]
        assert server.post("/detokenize", {"tokens": ids}).json == {"prompt": text}
    info = server.get("/tokenizer_info").json
    assert info["eos_token"] == "<end>"
    assert server.get("/load").json["in_flight"] == 0


def test_a_tokenizer_without_a_config_has_a_class_and_no_names(chat_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copy(chat_checkpoint / "tokenizer.json", tmp_path)
    told = TextCodec(tmp_path).describe(None).model_dump()
    assert told.pop("tokenizer_class") == "Tokenizer"
    assert set(told.values()) == {None}


def test_a_conversation_is_tokenized_as_its_chat_is(server: RunningServer, tokenizer: Tokenizer) -> None:
    """Each of vLLM's fields has its effect, or is refused by name."""

    def tokenize(**asked: Any) -> Any:
        answer = server.post("/tokenize", asked)
        assert answer.status == 200, answer.body
        return answer.json

    turns = [{"role": "user", "content": "def"}, {"role": "assistant", "content": "x"}]
    plain = tokenize(model="random", messages=turns)
    assert plain["tokens"] == tokenizer.encode("<user>def<assistant>x<assistant>", add_special_tokens=False).ids
    assert (plain["count"], plain["max_model_len"], plain["token_strs"]) == (len(plain["tokens"]), 128, None)
    usage = server.post("/v1/chat/completions", {"model": "random", "messages": turns, "max_tokens": 1}).json["usage"]
    assert usage["prompt_tokens"] == plain["count"]
    unprompted = tokenize(messages=turns, add_generation_prompt=False)["tokens"]
    assert unprompted == plain["tokens"][: len(unprompted)] != plain["tokens"]
    open_end = tokenize(messages=turns, add_generation_prompt=False, continue_final_message=True)["tokens"]
    assert open_end == unprompted  # this template ends no message
    named = tokenize(prompt="'ünï", return_token_strs=True)
    assert [tokenizer.token_to_id(one) for one in named["token_strs"]] == named["tokens"]
    for asked, param in (
        ({}, "prompt"),
        ({"prompt": "a", "messages": turns}, "messages"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": turns, "chat_template": "{{ messages }}"}, "chat_template"),
        ({"messages": turns, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"messages": turns, "continue_final_message": True}, "continue_final_message"),
        ({"messages": turns, "tools": []}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 100_000}]}, "messages"),
    ):
        answer = server.post("/tokenize", asked)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body


def test_what_stopped_a_choice_is_said(server: RunningServer, llm: LLM) -> None:
    sampling = {"temperature": 1.3, "seed": 11, "max_tokens": 12}
    (output,) = generate(llm, [PROMPTS[0]], **sampling)
    token, text = output.outputs[0].token_ids[4], output.outputs[0].text[0]
    body = {"model": "random", "prompt": PROMPTS[0], **sampling}
    for stop, reason in (({"stop_token_ids": [token]}, token), ({"stop": [text]}, text), ({}, None)):
        (choice,) = server.post("/v1/completions", body | stop).json["choices"]
        assert choice["stop_reason"] == reason
        (last,) = server.post("/v1/completions", body | stop | {"stream": True}).events[-1]["choices"]
        assert (last["stop_reason"], last["finish_reason"]) == (reason, choice["finish_reason"])


def test_tenants_share_no_cached_prefix(chat_checkpoint: Path) -> None:
    keys = {"alice-0123456789": Tenant("alice"), "bob-0123456789abc": Tenant("bob")}
    client = LocalClient(chat_checkpoint, **OPTIONS, prefix_cache="hash")
    own = RunningServer(create_app(client, keys=Keys(keys))).wait_until_ready()
    body = {"model": "random", "prompt": list(range(5, 45)), "max_tokens": 2}
    alice, bob = ({"authorization": f"Bearer {key}"} for key in keys)
    cached = [
        own.post("/v1/completions", body | salt, headers).json["usage"]["prompt_tokens_details"]["cached_tokens"]
        for headers, salt in ((alice, {}), (alice, {}), (bob, {}), (alice, {"cache_salt": "s"}), (bob, {}))
    ]
    own.stop()
    assert cached[0] == cached[2] == cached[3] == 0
    assert cached[1] == cached[4] >= 32


def test_a_long_prompt_is_cut_where_asked(server: RunningServer, llm: LLM) -> None:
    sampling = {"temperature": 0.0, "max_tokens": 6, "truncate_prompt_tokens": 7}
    for prompt in (list(range(5, 205)), "def scan(line): " * 200):
        (expected,) = generate(llm, [prompt], **sampling)
        answer = server.post("/v1/completions", {"model": "random", "prompt": prompt, "echo": True, **sampling}).json
        cut = llm.tokenizer.decode(expected.prompt_token_ids[-7:])
        assert answer["choices"][0]["text"] == cut + expected.outputs[0].text
        assert answer["usage"]["prompt_tokens"] == 7


def test_min_tokens_is_bounded_by_what_the_length_leaves(server: RunningServer) -> None:
    talk = {"model": "random", "messages": [{"role": "user", "content": "def"}], "logit_bias": {"0": 100}}
    answer = server.post("/v1/chat/completions", talk | {"min_tokens": 20})
    assert answer.status == 200, answer.body
    assert answer.json["usage"]["completion_tokens"] == 21  # the end that the bias brings included
    for asked, param, says in (
        ({"min_tokens": 128}, "min_tokens", "min_tokens must be from 0 to 127"),
        ({"min_tokens": 127}, "messages", "of prompt and 127 of output"),
    ):
        answer = server.post("/v1/chat/completions", talk | asked)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
        assert says in answer.error["message"]
    text = {"model": "random", "prompt": [5] * 120, "min_tokens": 9}
    answer = server.post("/v1/completions", text)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded"), answer.body
    answer = server.post("/v1/completions", text | {"min_tokens": 17})
    assert "from 0 to 16" in answer.error["message"]


def test_every_sampling_parameter_is_on_the_wire_or_said_otherwise() -> None:
    otherwise = {
        "prompt_logprobs": "echo with logprobs",
        "logits_processors": "code",
        "stopping_criteria": "code",
    }
    assert {one.name for one in fields(SamplingParams)} - CompletionRequest.model_fields.keys() == otherwise.keys()


@pytest.mark.parametrize(
    ("asked", "param", "begins"),
    [
        ({"structured_outputs": {"grammar": 'start: "a" start'}}, "structured_outputs", True),
        ({"structured_outputs": {"regex": "ab"}, "bad_words": ["b"]}, "structured_outputs", True),
        ({"structured_outputs": {"regex": "ab"}, "allowed_token_ids": [5]}, "structured_outputs", False),
        ({"response_format": {"type": "json_object"}, "allowed_token_ids": [5]}, "response_format", False),
    ],
)
def test_a_form_that_the_request_itself_makes_impossible_is_no_fault_of_the_server(
    asked: dict[str, Any], param: str, begins: bool, server: RunningServer
) -> None:
    """Clients would send it again after 500."""
    body = {"model": "random", "prompt": "def", "max_tokens": 20, "temperature": 0, **asked}
    code = "unsatisfiable" if begins else "invalid_value"
    whole = server.post("/v1/completions", body)
    assert (whole.status, whole.error["code"], whole.error["param"]) == (400, code, param), whole.body
    streamed = server.post("/v1/completions", body | {"stream": True})
    last = streamed.body.decode().strip().split("\n\n")[-1].removeprefix("data: ")
    error = json.loads(last)["error"]
    assert streamed.status == 400 or (begins and streamed.status == 200)
    assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
