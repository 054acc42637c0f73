"""What no sound client sends: each has an answer below 500, a refusal one of at most 4 KiB in OpenAI's form."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from tests.tsched.serving.conftest import Answer, RunningServer
from tests.tsched.serving.fuzz_routes import LONGEST_REFUSAL
from tests.tsched.serving.scripted_client import ScriptedClient
from tests.tsched.serving.test_bad_input import TALK, TEXT, exchange_bytes
from tsched.serving.app import create_app


@pytest.fixture(scope="module")
def wire(chat_checkpoint: Path) -> Iterator[RunningServer]:
    running = RunningServer(create_app(ScriptedClient(chat_checkpoint))).wait_until_ready()
    yield running
    running.stop()


def check(answer: Answer, *statuses: int) -> None:
    assert answer.status in statuses, (answer.status, answer.body[:300])
    if answer.status >= 400:
        assert len(answer.body) <= LONGEST_REFUSAL
        assert set(answer.error) == {"message", "type", "param", "code"}


ODD: list[tuple[Any, tuple[int, ...]]] = [
    (TEXT | {"prompt": "a\0b"}, (200,)),
    (TEXT | {"prompt": "a", "stop": ["\0"]}, (200,)),
    (TEXT | {"model": "\0"}, (404,)),
    (TEXT | {"\0": 1}, (400,)),
    (TEXT | {"": 1}, (400,)),
    (TEXT | {"user": "\0" * 1000}, (200,)),
    (TEXT | {"cache_salt": "\0"}, (200,)),
    (TEXT | {"prompt": "\U0010ffff\ufffe\u202e"}, (200,)),
    (TEXT | {"prompt": [-0]}, (200,)),
    (TEXT | {"temperature": -0.0}, (200,)),
    (TEXT | {"temperature": 1e-320}, (200, 400)),
    (TEXT | {"seed": 2**64}, (200, 400)),
    (TEXT | {"max_tokens": True}, (400,)),
    (TEXT | {"seed": False}, (400,)),
    (TEXT | {"stream": "true"}, (400,)),
    (TEXT | {"logit_bias": {"1": True}}, (400,)),
    (TEXT | {"max_tokens": int("9" * 4000)}, (400,)),
    (TEXT | {"user": {"a": [1] * 1000}}, (400,)),
    (TEXT | {"prompt": [[[5]]]}, (400,)),
    (TEXT | {"prompt": {}}, (400,)),
]


@pytest.mark.parametrize(("body", "statuses"), ODD, ids=[str(place) for place in range(len(ODD))])
def test_odd_values_are_taken_or_refused_by_name(body: Any, statuses: tuple[int, ...], wire: RunningServer) -> None:
    answer = wire.post("/v1/completions", body)
    check(answer, *statuses)
    if answer.status == 400:
        changed = next(name for name in body if name not in TEXT or body[name] != TEXT[name])
        assert answer.error["param"] == changed


RAW: list[tuple[bytes, int]] = [
    (b'{"model": "random", "prompt": "\\u0000", "max_tokens": 1}', 200),
    (b'{"model": "random", "prompt": "\x00", "max_tokens": 1}', 400),
    (b'{"model": "random", "prompt": "\\ud83d\\udc0d", "max_tokens": 1}', 200),
    (b'{"model": "random", "prompt": "\\ud83d", "max_tokens": 1}', 400),
    (b'{"model": "random", "prompt": "\\udc0d\\ud83d", "max_tokens": 1}', 400),
    (b'{"model": "random", "prompt": "\xf0\x9f", "max_tokens": 1}', 400),
    (b'{"model": "random", "prompt": "\xed\xa0\x80", "max_tokens": 1}', 400),
    (b'{"model": "random", "prompt": "a", "n": -NaN}', 400),
    (b'{"model": "random", "prompt": "a", "n": 1' + b"0" * 5000 + b"}", 400),
    (b'{"model": "random", "prompt": "a", "temperature": 1' + b"0" * 5000 + b".0}", 400),
    (b'{"model": "random", "prompt": "a", "temperature": 0.' + b"0" * 5000 + b"1}", 200),
    (b'{"model": "random", "model": "random", "prompt": "a"}', 400),
    (b'{"model": "random", "prompt": "a", "user": {"a": 1, "a": 1}}', 400),
    (b'{"model": "random", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    (b'{"model": "random", "prompt": "a", "metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, 400),
    (b'{"model": "random", "prompt": "a"}{}', 400),
    (b"'model'", 400),
]


@pytest.mark.parametrize(("body", "status"), RAW, ids=[str(place) for place in range(len(RAW))])
def test_odd_bytes_are_taken_or_refused(body: bytes, status: int, wire: RunningServer) -> None:
    check(wire.post("/v1/completions", body), status)


def test_a_bomb_is_not_unpacked(wire: RunningServer) -> None:
    bomb = gzip.compress(json.dumps(TEXT | {"prompt": "a" * (64 << 20)}).encode())
    assert len(bomb) < 1 << 17
    for encoding in ("gzip", "deflate", "br", "gzip, gzip", "x"):
        answer = wire.post("/v1/completions", bomb, {"content-encoding": encoding})
        check(answer, 415)
        assert answer.error["code"] == "unsupported_content_encoding"
    check(wire.post("/v1/completions", bomb), 400)


def test_head_options_and_unknown_methods_at_every_route(wire: RunningServer) -> None:
    for route in (one for one in wire.app.routes if isinstance(one, Route)):
        path = route.path.replace("{model:path}", "random")
        for method in ("HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "BREW"):
            answer = wire.ask(method, path)
            if method in (route.methods or ()):
                assert answer.status == 200, (method, path)
            elif method == "HEAD" or path.startswith("/admin/"):
                assert answer.status in (404, 405), (method, path)
            else:
                check(answer, 405)
                assert set(answer.headers["allow"].split(", ")) == route.methods
            if method == "HEAD":
                assert answer.body == b""


@pytest.mark.parametrize(
    "head",
    [
        b"GET /live\0 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /live HTTP/1.1\r\nhost: a\r\nx: \0\r\n\r\n",
        b"GET /live HTTP/1.1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\nzz\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\nnot a size\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_odd_http_is_no_fault_of_the_server(head: bytes, wire: RunningServer) -> None:
    received = exchange_bytes(wire, head + b"\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 4"), received
    assert len(received) <= LONGEST_REFUSAL
    assert b'{"error": {"message"' in received


def test_odd_paths_are_not_found(wire: RunningServer) -> None:
    for path in (
        "/%00",
        "/v1/models/%00",
        "/v1/models/..%2f..%2fetc",
        "/v1/models/%ff%fe",
        "//live",
        "/v1",
        "/" + "a" * 9000,
    ):
        check(wire.get(path), 404)


def test_messages_of_odd_text_are_taken(wire: RunningServer) -> None:
    for content in ("\0", "\u2028", "<assistant>", "{{ 1 }}", "{% raw %}"):
        check(wire.post("/v1/chat/completions", TALK | {"messages": [{"role": "user", "content": content}]}), 200)
