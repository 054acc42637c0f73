"""Each kind of bad input has its status, `code` and `param`, in OpenAI's form, and no token is made for it."""

import gzip
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.tsched.serving.conftest import RunningServer
from tsched.requests.chat_template import ChatEncoder, ChatTemplate
from tsched.requests.errors import RefusedError
from tsched.serving.engine_client import ModelFacts
from tsched.serving.protocol.chat import ChatRequest
from tsched.serving.protocol.completions import CompletionRequest
from tsched.serving.protocol.errors import ApiError
from tsched.serving.requests import encode_chat, refuse
from tsched.serving.text import TextCodec

TEXT: dict[str, Any] = {"model": "random", "prompt": "def", "max_tokens": 2}
TALK: dict[str, Any] = {"model": "random", "messages": [{"role": "user", "content": "def"}], "max_tokens": 2}
JSON = {"content-type": "application/json"}
IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]
TOO_MANY = [[5]] * 129
TALK_ONLY = {"max_completion_tokens": -1}


def schema(definition: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": definition}}}


def deep(depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": deep(depth - 1)}} if depth else {"type": "string"}


def talk(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"} | message]}


FIELDS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    # base, changes, code, param
    (TEXT, {"temprature": 1}, "unsupported_parameter", "temprature"),
    (TEXT, {"suffix": "b"}, "unsupported_parameter", "suffix"),
    (TEXT, {"best_of": 3}, "invalid_value", "best_of"),
    (TEXT, {"n": True}, "invalid_value", "n"),
    (TEXT, {"n": "2"}, "invalid_value", "n"),
    (TEXT, {"n": 1.5}, "invalid_value", "n"),
    (TEXT, {"n": 0}, "invalid_value", "n"),
    (TEXT, {"n": 10**30}, "invalid_value", "n"),
    (TEXT, {"n": 10**400}, "invalid_value", "n"),
    (TEXT, {"n": 100}, "invalid_value", "n"),
    (TEXT, {"temperature": -1}, "invalid_value", "temperature"),
    (TEXT, {"temperature": "hot"}, "invalid_value", "temperature"),
    (TEXT, {"temperature": True}, "invalid_value", "temperature"),
    (TEXT, {"top_p": 0}, "invalid_value", "top_p"),
    (TEXT, {"presence_penalty": 3}, "invalid_value", "presence_penalty"),
    (TEXT, {"seed": -1}, "invalid_value", "seed"),
    (TEXT, {"max_tokens": -1}, "invalid_value", "max_tokens"),
    (TEXT, {"min_tokens": 3}, "invalid_value", "min_tokens"),
    (TEXT, {"logprobs": 21}, "invalid_value", "logprobs"),
    (TEXT, {"logprobs": -1}, "invalid_value", "logprobs"),
    (TEXT, {"stop": ""}, "invalid_value", "stop"),
    (TEXT, {"stop": [1]}, "invalid_value", "stop"),
    (TEXT, {"stop": ["a"] * 1001}, "invalid_value", "stop"),
    (TEXT, {"stop_token_ids": [300]}, "invalid_value", "stop_token_ids"),
    (TEXT, {"logit_bias": {"5": 101}}, "invalid_value", "logit_bias"),
    (TEXT, {"logit_bias": {"a": 1}}, "invalid_value", "logit_bias"),
    (TEXT, {"logit_bias": {"-1": 1}}, "invalid_value", "logit_bias"),
    (TEXT, {"logit_bias": {"300": 1}}, "invalid_value", "logit_bias"),
    (TEXT, {"logit_bias": [5]}, "invalid_value", "logit_bias"),
    (TEXT, {"allowed_token_ids": []}, "invalid_value", "allowed_token_ids"),
    (TEXT, {"allowed_token_ids": [300]}, "invalid_value", "allowed_token_ids"),
    (TEXT, {"allowed_token_ids": [5] * 1001}, "invalid_value", "allowed_token_ids"),
    (TEXT, {"stop_token_ids": [5] * 1001}, "invalid_value", "stop_token_ids"),
    (TEXT, {"bad_words": [" "]}, "invalid_value", "bad_words"),
    (TEXT, {"bad_words": "word"}, "invalid_value", "bad_words"),
    (TEXT, {"priority": 2**31}, "invalid_value", "priority"),
    (TEXT, {"stream": 1}, "invalid_value", "stream"),
    (TEXT, {"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    (TEXT, {"stream": True, "stream_options": {"usage": True}}, "invalid_value", "stream_options"),
    (TEXT, {"prompt": ""}, "invalid_value", "prompt"),
    (TEXT, {"prompt": []}, "invalid_value", "prompt"),
    (TEXT, {"prompt": [""]}, "invalid_value", "prompt"),
    (TEXT, {"prompt": [[]]}, "invalid_value", "prompt"),
    (TEXT, {"prompt": ["a", 5]}, "invalid_value", "prompt"),
    (TEXT, {"prompt": ["a", [5]]}, "invalid_value", "prompt"),
    (TEXT, {"prompt": [True]}, "invalid_value", "prompt"),
    (TEXT, {"prompt": [300]}, "invalid_value", "prompt"),
    (TEXT, {"prompt": [-1]}, "invalid_value", "prompt"),
    (TEXT, {"prompt": [10**400]}, "invalid_value", "prompt"),
    (TEXT, {"prompt": TOO_MANY}, "invalid_value", "prompt"),
    (TEXT, {"prompt": None}, "invalid_value", "prompt"),
    (TEXT, {"prompt": [5] * 129}, "context_length_exceeded", "prompt"),
    (TEXT, {"prompt": [5] * 120, "max_tokens": 9}, "context_length_exceeded", "prompt"),
    (TEXT, {"prompt": "word " * 9999}, "context_length_exceeded", "prompt"),
    (TALK, {"messages": []}, "invalid_value", "messages"),
    (TALK, {"messages": "hello"}, "invalid_value", "messages"),
    (TALK, talk(role="wizard"), "invalid_value", "messages"),
    (TALK, talk(role="tool"), "invalid_value", "messages"),
    (TALK, talk(content=None), "invalid_value", "messages"),
    (TALK, talk(content=[]), "invalid_value", "messages"),
    (TALK, talk(content=IMAGE), "invalid_value", "messages"),
    (TALK, talk(tool_calls=[{"id": "a"}]), "invalid_value", "messages"),
    (TALK, talk(refusal="no"), "invalid_value", "messages"),
    (TALK, talk(content="word " * 9999), "context_length_exceeded", "messages"),
    (TALK, talk(content="x", name="word " * 9999), "context_length_exceeded", "messages"),
    (TALK, {"chat_template_kwargs": {"tone": "word " * 9999}}, "context_length_exceeded", "messages"),
    (TALK, {"max_completion_tokens": 3}, "invalid_value", "max_completion_tokens"),
    (TALK, {"chat_template_kwargs": {"messages": "a"}}, "invalid_value", "chat_template_kwargs"),
    (TALK, {"chat_template_kwargs": {"tools": None}}, "invalid_value", "chat_template_kwargs"),
    (TALK, {"chat_template_kwargs": {"add_generation_prompt": False}}, "invalid_value", "chat_template_kwargs"),
    (TALK, {"chat_template_kwargs": {"enable_thinking": False}}, "invalid_value", "chat_template_kwargs"),
    (TALK, {"continue_final_message": True}, "invalid_value", "continue_final_message"),
    (TEXT, {"min_tokens": 1, "structured_outputs": {"regex": "a"}}, "invalid_value", "min_tokens"),
    (TALK, {"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    (TALK, {"logprobs": 2}, "invalid_value", "logprobs"),
    (TALK, {"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    (TALK, {"response_format": {"type": "xml"}}, "invalid_value", "response_format"),
    (TALK, {"response_format": {"type": "json_schema"}}, "invalid_value", "response_format"),
    (TALK, schema({"type": "wizard"}), "invalid_value", "response_format"),
    (TALK, schema(deep(100)), "invalid_value", "response_format"),
    (TALK, schema({"type": "string", "pattern": "("}), "invalid_value", "response_format"),
    (TALK, schema({"$ref": "#"}), "invalid_value", "response_format"),
    (TEXT, {"structured_outputs": {"json": {"$ref": "#"}}}, "invalid_value", "structured_outputs"),
    (TEXT, {"structured_outputs": {"regex": "[^\\s\\S]"}}, "invalid_value", "structured_outputs"),
    (TEXT, {"structured_outputs": {"grammar": "start: start"}}, "invalid_value", "structured_outputs"),
    (TEXT, {"allowed_token_ids": [7], "bad_words": [[7]]}, "invalid_value", "allowed_token_ids"),
    (TEXT, {"allowed_token_ids": [7, 0], "stop_token_ids": [7], "min_tokens": 1}, "invalid_value", "allowed_token_ids"),
    (TALK, schema({"enum": ["a" * 10**6]}), "invalid_value", "response_format"),
    (TEXT, {"structured_outputs": {"regex": "("}}, "invalid_value", "structured_outputs"),
    (TEXT, {"structured_outputs": {"regexp": "a"}}, "invalid_value", "structured_outputs"),
    (TEXT, {"structured_outputs": {}}, "invalid_value", "structured_outputs"),
    (TEXT, {"structured_outputs": {"regex": "a"}, **schema({})}, "invalid_value", "response_format"),
    (TALK, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "unsupported_parameter", "tools"),
    (TALK, {"tool_choice": "auto"}, "invalid_value", "tool_choice"),
    (TALK, {"modalities": ["text", "audio"]}, "invalid_value", "modalities"),
    (TALK, {"service_tier": "flex"}, "invalid_value", "service_tier"),
    (TALK, {"store": True}, "invalid_value", "store"),
    (TALK, {"store": 0}, "invalid_value", "store"),
    (TALK, {"store": 0.0}, "invalid_value", "store"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_is_made(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """No refused request takes a step, or stays at the door; those refused by their length are not tokenized."""
    before = server.front.client.stats().num_steps
    yield
    assert server.front.client.stats().num_steps == before
    deadline = time.monotonic() + 5
    while server.front.exchanges and time.monotonic() < deadline:  # the answer was read before its end was noted
        time.sleep(0.001)
    assert not server.front.exchanges
    door = server.front.open_door()
    assert (door.num_in_flight, door.num_waiting_tokens) == (0, 0)


@pytest.mark.parametrize(("base", "changes", "code", "param"), FIELDS, ids=lambda value: repr(value)[:40])
def test_a_wrong_field_is_named(
    base: dict[str, Any], changes: dict[str, Any], code: str, param: str, server: RunningServer
) -> None:
    """And before it is tokenized."""
    path = "/v1/completions" if base is TEXT else "/v1/chat/completions"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server.front.codec, "encode", fail)
        patched.setattr(server.front.chats, "_encode", fail)
        answer = server.post(path, base | changes)
    assert answer.status == 400, answer.body
    assert (answer.error["code"], answer.error["param"]) == (code, param), answer.error
    if base is TALK and param == "response_format":
        assert "structured_outputs" not in answer.error["message"], "which was not asked for"
    assert len(answer.body) <= 4096
    assert set(answer.error) == {"message", "type", "param", "code"}


def test_a_refusal_by_number_has_the_numbers_and_blames_the_larger_one(server: RunningServer) -> None:
    for asked, param, says in (
        ({"prompt": [[5]] * 40}, "prompt", "40 completions in work, and the server takes 32: 40 prompts with n = 1"),
        ({"prompt": [[5]] * 20, "n": 2}, "prompt", "20 prompts with n = 2"),
        ({"prompt": [[5]] * 2, "n": 20}, "n", "2 prompts with n = 20"),
        ({"n": 40}, "n", "asks for 40 completions in work, and the server takes 32"),
        ({"n": 129}, "n", "n must be from 1 to 128, got 129"),
        ({"prompt": TOO_MANY}, "prompt", "at most 128 items"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens must be at least 0"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "max_tokens must be at least 0"),
        ({"max_tokens": None} | TALK_ONLY, "max_completion_tokens", "max_completion_tokens must be at least 1"),
        (
            {"prompt": 5},
            "prompt",
            "prompt must be a text, a list of texts, a list of token ids, or a list of such lists",
        ),
        ({"prompt": ["a", 5]}, "prompt", "or a list of such lists, got a list of 2"),
        ({"prompt": [""]}, "prompt", "prompt: 0 String should have at least 1 character, got ''"),
        ({"stop": [1]}, "stop", "stop must be a text or a list of texts, got"),
        ({"prompt": [5] * 129}, "prompt", "the model takes 128 tokens; prompt has 129"),
        ({"prompt": [5] * 120, "max_tokens": 9}, "prompt", "takes 128 tokens; the request has 120 of prompt and 9 of"),
        ({"prompt": "a" * 9999}, "prompt", "the model takes 128 tokens, and a text of 9999 characters has more"),
    ):
        is_talk = TALK_ONLY.items() <= asked.items()
        path, base = ("/v1/chat/completions", TALK) if is_talk else ("/v1/completions", TEXT)
        answer = server.post(path, base | asked)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
        assert says in answer.error["message"]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("structured_outputs.json is no JSON: a", "response_format.json_schema.schema is no JSON: a"),
        ("structured_outputs has a fault", "response_format has a fault"),
    ],
)
def test_a_fault_of_a_form_is_said_in_the_words_of_who_asked(message: str, says: str) -> None:
    asked = CompletionRequest.model_validate(TEXT | schema({}))
    error = refuse(asked, RefusedError(message))
    assert (str(error), error.param) == (says, "response_format")
    asked = CompletionRequest.model_validate(TEXT | {"structured_outputs": {"json": {}}})
    error = refuse(asked, RefusedError(message))
    assert (str(error), error.param) == (message, "structured_outputs")


def test_a_missing_field_is_named(server: RunningServer) -> None:
    for base, name in ((TEXT, "prompt"), (TEXT, "model"), (TALK, "messages")):
        body = {key: value for key, value in base.items() if key != name}
        answer = server.post("/v1/completions" if base is TEXT else "/v1/chat/completions", body)
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "missing_required_parameter", name)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"a"',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"1" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "a", "prompt": "b"}',
        json.dumps(TEXT).encode("utf-16"),
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_is_no_json_is_refused(body: bytes, server: RunningServer) -> None:
    answer = server.post("/v1/completions", body)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_json", None)
    assert len(answer.body) <= 4096
    assert "sys." not in answer.error["message"]  # advice for who writes Python


def test_other_statuses(server: RunningServer) -> None:
    ok = json.dumps(TEXT).encode()
    cases: list[tuple[str, str, Any, dict[str, str], int, str]] = [
        ("POST", "/v1/completions", TEXT | {"model": "gpt-4"}, {}, 404, "model_not_found"),
        ("GET", "/v1/models/gpt-4", None, {}, 404, "model_not_found"),
        ("GET", "/v1/embeddings", None, {}, 404, "not_found"),
        ("POST", "/v1/completions/", TEXT, {}, 404, "not_found"),
        ("GET", "/v1/completions", None, {}, 405, "method_not_allowed"),
        ("PUT", "/v1/chat/completions", TALK, {}, 405, "method_not_allowed"),
        ("OPTIONS", "/v1/chat/completions", None, {}, 405, "method_not_allowed"),
        ("POST", "/v1/completions", ok, {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ("POST", "/tokenize", gzip.compress(ok), {"content-encoding": "gzip"}, 415, "unsupported_content_encoding"),
        ("POST", "/v1/completions", b" " * (4 << 20) + ok, {}, 413, "body_too_large"),
        ("GET", "/live", None, {"x-long": "a" * 40_000}, 431, "headers_too_large"),
        ("POST", "/v1/completions", ok, {"x-request-timeout": "soon"}, 400, "invalid_value"),
        ("POST", "/admin/kernels", {}, {}, 404, "not_found"),
    ]  # fmt: skip
    for method, path, body, headers, status, code in cases:
        answer = server.ask(method, path, body, headers)
        assert (answer.status, answer.error["code"]) == (status, code), answer.body
    assert server.ask("GET", "/v1/completions").headers["allow"] == "POST"


def exchange_bytes(server: RunningServer, sent: bytes) -> bytes:
    """What comes back for raw bytes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(sent)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    return received


def test_a_chunked_body_is_counted(server: RunningServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    received = exchange_bytes(server, head + b"transfer-encoding: chunked\r\n\r\n" + chunk * 65)
    assert received.startswith(b"HTTP/1.1 413")
    assert b"body_too_large" in received


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /live HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 200_000, b"431"),
        (b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n", b"400"),
    ],
)
def test_what_is_no_http_has_an_answer_too(sent: bytes, status: bytes, server: RunningServer) -> None:
    received = exchange_bytes(server, sent)
    assert received.startswith(b"HTTP/1.1 " + status)
    assert b'{"error": {"message"' in received


def fail(*_: Any, **__: Any) -> Any:
    raise AssertionError("tokenized")


def test_a_text_too_long_is_not_tokenized(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.front.codec, "encode", fail)
    for path, body in (
        ("/v1/completions", TEXT | {"prompt": "a" * 100_000}),
        ("/v1/chat/completions", TALK | talk(content="a" * 100_000)),
        ("/tokenize", {"prompt": "a" * 100_000}),
        ("/v1/completions", TEXT | {"n": -1}),
        ("/v1/completions", TEXT | {"model": "gpt-4"}),
    ):
        assert server.post(path, body).status in (400, 404)


@pytest.mark.parametrize("form", ["json", "regex", "grammar", "choice", "response_format"])
@pytest.mark.parametrize("fault", ["deep", "repeated", "long"])
def test_a_form_that_no_server_should_compile_is_refused_unread(form: str, fault: str, server: RunningServer) -> None:
    long = "a" * 10**6
    forms: dict[str, dict[str, Any]] = {
        "deep": {"json": deep(300)},
        "repeated": {"json": {"items": {"pattern": "(a+)+$"}}, "regex": "(a+)+$", "grammar": "start: /(a+)+$/"},
        "long": {"json": {"const": long}, "regex": long, "grammar": f'start: "{long}"', "choice": [long]},
    }
    if form == "response_format" or form in forms[fault]:
        asked = {"structured_outputs": {form: forms[fault].get(form)}}
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(server.front, "read_form", fail)
            answer = server.post("/v1/completions", TEXT | (schema(forms[fault]["json"]) if "_" in form else asked))
        assert (answer.status, answer.error["code"]) == (400, "invalid_value"), answer.body
        assert answer.error["param"] == ("response_format" if "_" in form else "structured_outputs")
        assert len(answer.body) < 1000


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_every_unsupported_field_has_its_refusal_and_null_is_leaving_it_out(kind: Any, server: RunningServer) -> None:
    base, path = (TEXT, "/v1/completions") if kind is CompletionRequest else (TALK, "/v1/chat/completions")
    unsupported = [name for name, field in kind.model_fields.items() if field.annotation is type(None)]
    assert unsupported
    for name in unsupported:
        for value in ("x", 1, {}, [1]):
            answer = server.post(path, base | {name: value})
            assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unsupported_parameter", name)


def test_a_refusal_stays_short_however_much_is_wrong(server: RunningServer) -> None:
    for wrong in ({"prompt": ["", 1] * 2000}, {"a" * 9999: 1}, {"stop": [1] * 3000}, {"model": "m" * 9999}):
        answer = server.post("/v1/completions", TEXT | wrong)
        assert answer.status in (400, 404)
        assert len(answer.body) <= 4096


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (CompletionRequest, {"prompt": ["a", 5] * 50_000}),
        (CompletionRequest, {"prompt": [[True] * 1000] * 100}),
        (CompletionRequest, {"prompt": [5.5] * 100_000}),
        (CompletionRequest, {"stop": [1] * 100_000}),
        (CompletionRequest, {"stop_token_ids": ["a"] * 100_000}),
        (CompletionRequest, {"allowed_token_ids": ["a"] * 100_000}),
        (CompletionRequest, {"bad_words": [[None] * 1000] * 100}),
        (ChatRequest, {"messages": [1] * 4096}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 100_000}]}),
        (ChatRequest, {"messages": [{}] * 100_000}),
    ],
)
def test_of_many_wrong_entries_few_are_collected(kind: Any, wrong: dict[str, Any]) -> None:
    """All of them would take seconds, in which the interpreter does nothing else."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate((TEXT if kind is CompletionRequest else TALK) | wrong)
    assert refused.value.error_count() < 20


def test_a_wrong_token_is_named_unless_it_is_as_long_as_a_line(server: RunningServer) -> None:
    for wrong, name in ((300, "300"), (-1, "-1"), (10**30, "a number of dozens of digits")):
        refused = server.post("/v1/completions", TEXT | {"prompt": [5, wrong]})
        assert refused.error["message"] == f"token id {name} is out of vocabulary; ids go from 0 to 299"


@pytest.mark.parametrize("field", ["logit_bias", "nothing"])
def test_an_object_of_many_keys_is_not_read(field: str, server: RunningServer) -> None:
    answer = server.post("/v1/completions", TEXT | {field: {str(i): "a" for i in range(20_000)}})
    assert (answer.status, answer.error["code"]) == (400, "invalid_json")


def test_messages_need_a_tokenizer_and_a_template_that_makes_tokens_of_them(checkpoint: Path) -> None:
    facts, codec = ModelFacts("random", 1, 128, 300, (0,), str(checkpoint), 4, 256, 4), TextCodec(checkpoint)
    silent = ChatEncoder(codec.tokenizer, ChatTemplate("{% if false %}{% endif %}", {}))
    for parts, said in (
        ((None, None), "^the model has no tokenizer: send token ids$"),
        ((codec, None), "start the server with --chat-template FILE, or use /v1/completions$"),
        ((codec, silent), "^the rendered messages have no tokens$"),
    ):
        with pytest.raises(ApiError, match=said) as refused:
            encode_chat(ChatRequest.model_validate(TALK), facts, *parts)
        assert (refused.value.status, refused.value.param) == (400, "messages")
