"""What a server does when things go wrong: too much is asked, clients leave or stall, times are over, it is stopped."""

import asyncio
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.routing import Route

from tests.tsched.serving.conftest import Answer, RunningServer
from tests.tsched.serving.scripted_client import ScriptedClient, ScriptedStream
from tsched.requests.errors import ArgumentTypeError
from tsched.requests.prompts import check_priority
from tsched.serving import app, exchange, http
from tsched.serving.app import create_api_server, create_app
from tsched.serving.auth import MAX_PART, OPEN_PATHS, KeyFileError, Keys, Tenant, read_keys
from tsched.serving.engine_client import Delta, ModelFacts, SampleDelta
from tsched.serving.exchange import Exchange
from tsched.serving.front_end import FrontEnd
from tsched.serving.limits import ServerLimits
from tsched.serving.metrics import RequestMeter
from tsched.serving.responses import Answer as WireAnswer

TEXT: dict[str, Any] = {"model": "random", "prompt": "def", "max_tokens": 3}
TALK: dict[str, Any] = {"model": "random", "messages": [{"role": "user", "content": "def"}], "max_tokens": 3}
ALICE, BOB, ADMIN = "alice-0123456789", "bob-0123456789abc", "admin-0123456789"
KEYS = Keys({ALICE: Tenant("alice"), BOB: Tenant("bob", priority=5), ADMIN: Tenant("root", is_admin=True)})

Start = Callable[..., tuple[RunningServer, ScriptedClient]]


@pytest.fixture
def start(chat_checkpoint: Path) -> Iterator[Start]:
    running: list[RunningServer] = []

    def begin(
        *, limits: dict[str, Any] | None = None, keys: Keys | None = None, is_loaded: bool = True, **script: Any
    ) -> tuple[RunningServer, ScriptedClient]:
        client = ScriptedClient(chat_checkpoint, **script)
        if not is_loaded:
            client.may_load.clear()
        server = RunningServer(create_app(client, ServerLimits(**limits or {}), keys=keys))
        running.append(server)
        while server.get("/ready").status != 200 if is_loaded else server.loop is None:
            time.sleep(0.005)
        return server, client

    yield begin
    for server in running:
        server.stop()


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.002)


def at_rest(server: RunningServer) -> bool:
    door = server.front.open_door()
    return not server.front.exchanges and (door.num_in_flight, door.num_waiting_tokens) == (0, 0)


def go_on(server: RunningServer, client: ScriptedClient) -> None:
    """Lets the streams that hold go on."""
    assert server.loop is not None
    server.loop.call_soon_threadsafe(client.may_go_on.set)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def open_request(
    server: RunningServer, body: Any, path: str = "/v1/completions", headers: Mapping[str, str] | None = None
) -> socket.socket:
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    head = "".join(
        [head.removesuffix("\r\n"), *(f"{name}: {one}\r\n" for name, one in (headers or {}).items()), "\r\n"]
    )
    connection.sendall(head.encode() + data)
    return connection


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    return received


# Too much is asked.


def test_overload_is_refused_at_the_door_untokenized_and_the_admitted_finish(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = start(limits={"max_in_flight": 4}, holds_after=0)
    encoded: list[Any] = []
    for one in (server.front.codec, server.front.chats):  # the second renders, too

        def encode(asked: Any, real: Callable[..., Any] = one.encode, **options: Any) -> Any:
            encoded.append(asked)
            return real(asked, **options)

        monkeypatch.setattr(one, "encode", encode)
    asked = [("/v1/completions", TEXT), ("/v1/chat/completions", TALK)] * 8
    with ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(server.post, *one) for one in asked]
        try:
            wait_for(lambda: sum(one.done() for one in waiting) == 12)
        finally:  # the pool waits for all
            go_on(server, client)
        answers = [one.result() for one in waiting]
    admitted = [one for one in answers if one.status == 200]
    refused = [one for one in answers if one.status == 429]
    assert (len(admitted), len(refused)) == (4, 12)
    choices = [one.json["choices"][0] for one in admitted]
    assert all((one["text"] if "text" in one else one["message"]["content"]) == "xxx" for one in choices)
    for one in refused:
        assert (one.error["code"], one.error["type"]) == ("in_flight", "rate_limit_error")
        assert int(one.headers["retry-after"]) >= 1
    assert len(encoded) == len(client.submitted) == 4
    wait_for(lambda: at_rest(server))
    assert server.post("/v1/completions", TEXT | {"n": 4}).status == 200
    too_many = server.post("/v1/completions", TEXT | {"n": 5})
    assert (too_many.status, too_many.error["param"]) == (400, "n"), "it will never fit: not to be asked again"


def test_waiting_prompts_are_bounded_by_their_tokens(start: Start) -> None:
    server, client = start(limits={"max_waiting_tokens": 60}, holds_after=0)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.post, "/v1/completions", TEXT | {"prompt": [5] * 50})
        wait_for(lambda: server.front.open_door().num_waiting_tokens == 50)
        second = server.post("/v1/completions", TEXT | {"prompt": [5] * 50})
        assert (second.status, second.error["code"]) == (429, "waiting_tokens")
        go_on(server, client)
        assert first.result().status == 200
    wait_for(lambda: at_rest(server))


def test_tokens_of_a_minute_add_up_over_a_tenants_keys(start: Start) -> None:
    keys = Keys({ALICE: Tenant("alice"), ADMIN: Tenant("alice"), BOB: Tenant("bob")})
    server, client = start(limits={"tokens_per_minute": 1000}, keys=keys)
    body = TEXT | {"n": 4, "max_tokens": 100}
    answers = [server.post("/v1/completions", body, bearer(key)) for key in (ALICE, ADMIN, ALICE)]
    assert [one.status for one in answers] == [200, 200, 429]
    assert (answers[2].error["code"], answers[2].error["type"]) == ("tokens_per_minute", "rate_limit_error")
    assert 1 <= int(answers[2].headers["retry-after"]) <= 61
    assert server.post("/v1/completions", TEXT, bearer(ALICE)).status == 200, "a refused one has used up nothing"
    assert server.post("/v1/completions", body, bearer(BOB)).status == 200
    assert len(client.submitted) == 4
    wait_for(lambda: at_rest(server))


def test_rates_are_of_each_tenant(start: Start) -> None:
    server, client = start(limits={"requests_per_minute": 2, "tokens_per_minute": 1000}, keys=KEYS)
    answers = [server.post("/v1/completions", TEXT, bearer(ALICE)) for _ in range(3)]
    assert [one.status for one in answers] == [200, 200, 429]
    assert answers[2].error["code"] == "requests_per_minute"
    assert 1 <= int(answers[2].headers["retry-after"]) <= 61
    assert server.post("/v1/completions", TEXT, bearer(BOB)).status == 200
    large = TEXT | {"n": 40, "max_tokens": 100}
    refused = server.post("/v1/completions", large, bearer(BOB))
    assert (refused.status, refused.error["code"]) == (400, "invalid_value")
    assert len(client.submitted) == 3
    wait_for(lambda: at_rest(server))


# Clients leave.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [TEXT, TEXT | {"n": 2, "prompt": ["a", "b"]}, TALK], ids=["text", "list", "chat"])
@pytest.mark.parametrize("first", [60.0, 0.0], ids=["queued", "decoding"])
def test_a_request_whose_client_left_is_aborted(first: float, body: Any, stream: bool, start: Start) -> None:
    server, client = start(first=first, pace=0.02)
    path = "/v1/chat/completions" if body is TALK else "/v1/completions"
    connection = open_request(server, body | {"stream": stream, "max_tokens": 100}, path)
    wait_for(lambda: bool(client.running))
    if not first:
        time.sleep(0.05)
    connection.close()
    wait_for(lambda: at_rest(server))
    assert not client.running
    assert sorted(client.aborted) == sorted(one.request_id for one in client.submitted)


def test_a_client_that_leaves_amid_its_body_leaves_nothing(start: Start) -> None:
    server, client = start()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n")
    connection.sendall(b'content-length: 100\r\n\r\n{"model"')
    wait_for(lambda: len(server.front.exchanges) == 1)
    connection.close()
    wait_for(lambda: at_rest(server))
    assert client.submitted == []


def test_the_engine_frees_a_cancelled_requests_blocks(server: RunningServer) -> None:
    for stream in (False, True):
        body = {"model": "random", "prompt": "a", "n": 4, "max_tokens": 120, "ignore_eos": True, "stream": stream}
        connections = [open_request(server, body) for _ in range(3)]
        wait_for(lambda: server.front.client.stats().num_running > 0)
        for connection in connections:
            connection.close()
        wait_for(lambda: server.front.client.stats().num_used_blocks == 0)
        wait_for(lambda: at_rest(server))


@pytest.mark.parametrize("stream", [False, True])
def test_a_reader_that_does_not_read_is_given_up(stream: bool, start: Start) -> None:
    server, client = start(limits={"write_timeout": 0.4}, width=1 << 18)
    connection = open_request(server, TEXT | {"stream": stream, "max_tokens": 120})
    wait_for(lambda: bool(client.submitted))
    wait_for(lambda: at_rest(server))
    assert bool(client.aborted) == stream, "the whole answer was ready"
    wait_for(lambda: not server.server.server_state.connections)
    connection.close()


def test_a_slow_reader_has_all(start: Start) -> None:
    server, _ = start(limits={"write_timeout": 0.3}, width=1 << 18)
    connection = open_request(server, TEXT | {"max_tokens": 60})
    began, received = time.monotonic(), 0
    while received < 60 << 18:
        time.sleep(0.05)
        part = connection.recv(1 << 20, socket.MSG_WAITALL if received < 59 << 18 else 0)
        assert part, "it was given up"
        received += len(part)
    assert time.monotonic() - began > 0.6
    connection.close()


def test_a_reader_that_leaves_much_unread_is_given_up_before_its_time(start: Start) -> None:
    server, client = start(limits={"max_unread_bytes": 1000}, width=1 << 18, num_unread=500)
    connection = open_request(server, TEXT | {"stream": True, "max_tokens": 120, "prompt": ["a", "b"]})
    wait_for(lambda: len(client.aborted) == 2)
    wait_for(lambda: at_rest(server))
    connection.close()
    answer = server.post("/v1/completions", TEXT | {"stream": True})
    assert len(answer.events) == 3, "one who reads has all"


# Times are over.


def test_no_token_in_time_is_504(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server, client = start(limits={"queue_timeout": 0.1}, first=60.0)
    for stream in (False, True):
        answer = server.post("/v1/completions", TEXT | {"stream": stream})
        assert (answer.status, answer.error["code"]) == (504, "queue_timeout")
    wait_for(lambda: at_rest(server))
    assert len(client.aborted) == 2
    monkeypatch.setattr(server.front, "read_form", lambda _: asyncio.sleep(60))  # it waits for its form to be read
    answer = server.post("/v1/completions", TEXT | {"structured_outputs": {"regex": "a"}})
    assert (answer.status, answer.error["code"]) == (504, "queue_timeout")
    wait_for(lambda: at_rest(server))


def test_a_requests_time_is_504_before_the_first_byte_and_an_error_event_after(start: Start) -> None:
    server, client = start(limits={"request_timeout": 0.3}, holds_after=1)
    body = TEXT | {"max_tokens": 100}
    answer = server.post("/v1/completions", body)
    assert (answer.status, answer.error["code"]) == (504, "request_timeout")
    streamed = server.post("/v1/completions", body | {"stream": True})
    events = streamed.body.decode().split("\n\n")
    assert streamed.status == 200
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "request_timeout"
    assert "[DONE]" not in streamed.body.decode()
    asked = server.post("/v1/completions", body, {"x-request-timeout": "0.05"})
    assert (asked.status, "(0.05 s)" in asked.error["message"]) == (504, True)
    longer = server.post("/v1/completions", body, {"x-request-timeout": "60"})
    assert (longer.status, "(0.3 s)" in longer.error["message"]) == (504, True), "the server's own is the longest"
    wait_for(lambda: at_rest(server))
    assert len(client.aborted) == 4


def test_an_idle_connection_is_closed(start: Start) -> None:
    server, _ = start(limits={"keep_alive_timeout": 0.4})
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as idle:
        idle.sendall(b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n")
        began = time.monotonic()
        assert read_all(idle).startswith(b"HTTP/1.1 200")
        assert time.monotonic() - began >= 0.4


def test_a_request_that_comes_while_another_is_answered_has_no_deadline_until_its_turn(start: Start) -> None:
    server, client = start(limits={"header_timeout": 0.3}, first=0.7)
    connection = open_request(server, TEXT)
    wait_for(lambda: bool(client.running))
    connection.sendall(b"GET /live HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    with connection:
        received = read_all(connection)
    assert received.count(b"HTTP/1.1 200") == 2
    assert received.endswith(b'{"status":"live"}')


def test_headers_and_bodies_have_deadlines(start: Start) -> None:
    server, _ = start(limits={"header_timeout": 0.2})
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as silent:
        assert read_all(silent) == b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as half:
        half.sendall(b"GET /live HTTP/1.1\r\nhost")
        assert read_all(half) == b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as second:
        second.sendall(b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n")
        answer = HTTPResponse(second)
        answer.begin()
        assert json.loads(answer.read()) == {"status": "live"}
        second.sendall(b"GET /live HTTP/1.1\r\nhost")
        assert read_all(second) == b"", "another request of the connection has a deadline too"
    server, _ = start(limits={"body_timeout": 0.2})
    for path in (b"/tokenize", b"/v1/completions"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as slow:
            slow.sendall(b"POST " + path + b" HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n")
            slow.sendall(b"content-length: 9\r\n\r\n{")
            received = read_all(slow)
        assert received.startswith(b"HTTP/1.1 408")
        assert b"body_timeout" in received


# The server, or its engine, stops.


def test_a_drain_lets_streams_end_and_refuses_new_requests(start: Start) -> None:
    server, client = start(holds_after=3)
    with ThreadPoolExecutor(4) as pool:
        body = TEXT | {"stream": True, "max_tokens": 10}
        streams = [pool.submit(server.post, "/v1/completions", body) for _ in range(4)]
        wait_for(lambda: len(client.running) == 4)
        assert server.loop is not None
        server.loop.call_soon_threadsafe(server.server.stop)
        try:
            wait_for(lambda: server.front.is_draining)
            assert server.get("/live").status == 200
            for path in ("/ready", "/health"):
                assert server.get(path).status == 503
            refused = server.post("/v1/completions", TEXT)
            assert (refused.status, refused.error["code"]) == (503, "unavailable")
            assert int(refused.headers["retry-after"]) >= 1
            assert not any(stream.done() for stream in streams)
        finally:  # else the pool waits for streams that no one lets end
            go_on(server, client)
        ends = [stream.result() for stream in streams]
    for one in ends:
        assert "".join(event["choices"][0]["text"] for event in one.events) == "x" * 10
    server._thread.join(10)
    assert not server._thread.is_alive(), "it ends with the last of them, not at the end of the drain's time"
    assert not client.aborted


@pytest.mark.parametrize("how", ["drain_timeout", "second_signal"])
def test_past_the_drain_a_stream_ends_with_an_error(how: str, start: Start) -> None:
    server, client = start(limits={"drain_timeout": 0.1 if how == "drain_timeout" else 30.0}, pace=0.05)
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(server.post, "/v1/completions", TEXT | {"stream": True, "max_tokens": 100})
        wait_for(lambda: bool(client.running))
        time.sleep(0.1)
        assert server.loop is not None
        for _ in range(1 if how == "drain_timeout" else 2):
            server.loop.call_soon_threadsafe(server.server.stop)
        body = stream.result(5).body.decode()
    assert json.loads(body.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert "[DONE]" not in body
    assert len(client.aborted) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["drain_timeout", "second_signal"])
def test_a_reader_that_does_not_read_keeps_no_server_from_its_end(
    how: str, stream: bool, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_LAST_WORDS_S", 0.1)
    limits = {"drain_timeout": 0.1 if how == "drain_timeout" else 3600.0, "write_timeout": 3600.0}
    server, client = start(limits=limits, width=1 << 18)
    connection = open_request(server, TEXT | {"stream": stream, "max_tokens": 120})
    wait_for(lambda: bool(client.submitted))
    wait_for(lambda: any(one.flow.write_paused for one in server.server.server_state.connections))
    assert server.loop is not None
    for _ in range(1 if how == "drain_timeout" else 2):
        server.loop.call_soon_threadsafe(server.server.stop)
    server._thread.join(20)
    assert not server._thread.is_alive()
    connection.close()


@pytest.mark.parametrize("fails_after", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_engine_is_said_and_no_stream_ends_as_if_it_were_whole(
    stream: bool, fails_after: int, start: Start
) -> None:
    server, client = start(fails_after=fails_after, pace=0.01)
    answer = server.post("/v1/completions", TEXT | {"stream": stream, "prompt": ["a", "b"]})
    if stream and fails_after:
        assert answer.status == 200
        assert b"[DONE]" not in answer.body
        last = answer.body.decode().split("\n\n")[-2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_error"
    else:
        assert (answer.status, answer.error["code"]) == (500, "engine_error")
    assert b"Traceback" not in answer.body
    wait_for(lambda: at_rest(server))
    assert not client.running


def test_a_route_that_fails_is_said_too_and_logged(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, _ = start()

    def fail(_: ScriptedClient) -> ModelFacts:
        raise KeyError("a secret of the server")

    monkeypatch.setattr(ScriptedClient, "facts", property(fail))
    answer = server.get("/v1/models")
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert b"secret" not in answer.body
    assert "a secret of the server" in caplog.text


def test_a_tokenizer_is_described_where_there_is_no_chat_template(checkpoint: Path) -> None:
    server = RunningServer(create_app(ScriptedClient(checkpoint))).wait_until_ready()
    try:
        answer = server.get("/tokenizer_info")
    finally:
        server.stop()
    assert (answer.status, answer.json["chat_template"], answer.json["eos_token"]) == (200, None, "<end>")


def test_what_the_engine_aborts_is_to_be_asked_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server, _ = start()

    async def abort(_: ScriptedStream) -> Delta:
        return Delta([SampleDelta(0, [], "", None, "abort")], True)

    monkeypatch.setattr(ScriptedStream, "__anext__", abort)
    answer = server.post("/v1/completions", TEXT)
    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "unavailable", "1")
    assert answer.error["message"] == "the request was aborted by the server"


@pytest.mark.parametrize("stream", [False, True])
def test_the_servers_own_failure_is_said_too_and_logged(
    stream: bool, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = start(pace=0.01)
    name, calls = "write_chunks" if stream else "write_choices", 0
    real = getattr(WireAnswer, name)

    def fail(answer: WireAnswer, place: int, delta: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyError("a secret of the server")
        return real(answer, place, delta)

    close, num_readers = ScriptedStream.aclose, []

    async def close_unread(one: ScriptedStream) -> None:
        num_readers.append(sum("_merge.<locals>.read" in repr(task) for task in asyncio.all_tasks()))
        await close(one)

    monkeypatch.setattr(ScriptedStream, "aclose", close_unread)
    monkeypatch.setattr(WireAnswer, name, fail)
    answer = server.post("/v1/completions", TEXT | {"stream": stream, "prompt": ["a", "b"]})
    last = answer.body.decode().removesuffix("\n\n").rpartition("data: ")[2]
    error = json.loads(last)["error"]
    assert (answer.status, error["code"], error["type"]) == (200 if stream else 500, "internal_error", "server_error")
    assert error["message"] == "the server failed at this request"
    assert b"[DONE]" not in answer.body
    assert b"secret" not in answer.body
    wait_for(lambda: at_rest(server))
    assert not client.running, "its prompts are aborted"
    assert "a secret of the server" in caplog.text
    assert [one.name for one in caplog.records if one.exc_info] == ["tsched.serving"]
    assert num_readers == [0, 0], "nobody reads a stream that is closed"


def test_a_meter_that_fails_leaves_no_request_behind(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server, _ = start()

    def fail(*_: Any) -> None:
        raise KeyError("meter")

    with monkeypatch.context() as patched:
        patched.setattr(RequestMeter, "end", fail)
        server.post("/v1/completions", TEXT)
        wait_for(lambda: at_rest(server), 5.0)


def test_no_comment_comes_after_an_error(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that fails while its last event waits for the connection."""
    server, _ = start(fails_after=1, limits={"ping_interval": 0.02})
    real = Exchange._write

    async def slow(exchange: Exchange, body: bytes, *, more: bool = True) -> None:
        if not more:
            await asyncio.sleep(0.1)
        await real(exchange, body, more=more)

    monkeypatch.setattr(Exchange, "_write", slow)
    events = server.post("/v1/completions", TEXT | {"stream": True}).body.split(b"\n\n")
    assert b"engine_error" in events[-2]
    assert b": ping" not in events


def test_a_loading_restarting_or_dead_engine_is_not_ready(start: Start) -> None:
    server, client = start(is_loaded=False)
    assert server.get("/live").status == 200
    for ask in (lambda: server.get("/ready"), lambda: server.get("/health"), lambda: server.get("/v1/models")):
        assert ask().status == 503
    loading = server.post("/v1/completions", TEXT)
    assert (loading.status, loading.headers["retry-after"]) == (503, "1")
    assert server.loop is not None
    server.loop.call_soon_threadsafe(client.may_load.set)
    wait_for(lambda: server.get("/ready").status == 200)
    client.state = "restarting"
    assert server.get("/health").json == {"status": "restarting"}
    with pytest.MonkeyPatch.context() as patched:  # refused at the door
        patched.setattr(server.front, "codec", None)
        again = server.post("/v1/completions", TEXT)
    assert (again.status, again.headers["retry-after"]) == (503, "3")
    assert not client.submitted
    client.state = "failed"
    assert server.get("/health").status == 503
    dead = server.post("/v1/completions", TEXT)
    assert (dead.status, dead.error["code"]) == (503, "engine_failed")
    for answer in (dead, server.get("/ready")):
        assert "retry-after" not in answer.headers, "it will not be back"
    client.state = "ready"
    assert server.post("/v1/completions", TEXT).status == 200


# Who asks.


@pytest.mark.parametrize(("root", "prefix"), [("", ""), ("/llm", "/llm"), ("/llm", "")])
def test_the_key_guards_every_route_but_three(root: str, prefix: str, start: Start) -> None:
    server, client = start(keys=KEYS)
    server.app.root_path = root
    routes = [route for route in server.app.routes if isinstance(route, Route)]
    assert len(routes) > 12
    for route in routes:
        for method in sorted(route.methods or ()):
            path = prefix + route.path.replace("{model:path}", "random")
            body = b"{}" if method == "POST" else None
            for headers in ({}, bearer("wrong-0123456789"), {"authorization": f"Basic {ALICE}"}):
                answer = server.ask(method, path, body, headers)
                if route.path in OPEN_PATHS:
                    assert answer.status == 200, path
                else:
                    assert answer.status == 401, path
    refused = server.get(f"{prefix}/no/such/route")
    assert (refused.status, refused.headers["content-length"]) == (401, str(len(refused.body)))
    assert server.get(f"{prefix}/v1/models", bearer(ALICE)).status == 200
    assert server.get(f"{prefix}/v1/models", bearer(ADMIN)).status == 401
    swap = {"kernels": {"paged_decode": "torch"}}
    assert server.post(f"{prefix}/admin/kernels", swap, bearer(ALICE)).status == 401
    assert server.post(f"{prefix}/admin/kernels", swap, bearer(ADMIN)).status == 200
    assert client.submitted == []


def test_limits_that_are_no_record_are_refused_in_words() -> None:
    with pytest.raises(ArgumentTypeError, match=r"limits must be a ServerLimits, .* got {'max_in_flight': 3}"):
        create_api_server("tiny", limits={"max_in_flight": 3})  # type: ignore[arg-type]


def test_a_programs_own_server_may_have_keys_and_limits(checkpoint: Path) -> None:
    """None of these requests comes to the model, which is not loaded."""
    app = create_api_server(checkpoint, keys=KEYS, limits=ServerLimits(max_body_bytes=100), max_num_seqs=2)

    async def ask() -> None:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
            assert (await client.get("/v1/models")).status_code == 401
            assert (await client.get("/v1/models", headers=bearer(ALICE))).status_code == 503
            headers = bearer(ALICE) | {"content-type": "application/json"}
            long = await client.post("/tokenize", content=b"x" * 101, headers=headers)
            assert long.status_code == 413

    asyncio.run(ask())


def test_without_keys_nobody_swaps_kernels(start: Start) -> None:
    server, _ = start()
    for root in ("", "/llm"):
        server.app.root_path = root
        for prefix in {"", root}:
            assert server.post(f"{prefix}/admin/kernels", {"kernels": {"paged_decode": "torch"}}).status == 404


def test_tenants_have_salts_and_priorities_of_their_own(start: Start) -> None:
    server, client = start(keys=KEYS)
    for key in (ALICE, BOB):
        for salt in ({}, {"cache_salt": "s"}):
            assert server.post("/v1/completions", TEXT | salt | {"priority": 1}, bearer(key)).status == 200
    assert len({one.cache_salt for one in client.submitted}) == 4
    assert [one.priority for one in client.submitted] == [1, 1, 6, 6]
    hurried = server.post("/v1/completions", TEXT | {"priority": -6}, bearer(BOB))
    assert (hurried.status, hurried.error["param"]) == (400, "priority"), "Bob would go before Alice"
    server.post("/v1/completions", TEXT, bearer(ALICE) | {"x-request-id": "mine"})
    assert "mine" not in client.submitted[-1].request_id, "nobody else can name it"


def test_without_keys_a_request_may_hurry_and_the_engine_takes_the_highest_sum(start: Start) -> None:
    server, client = start()
    for priority in (-MAX_PART, MAX_PART):
        assert server.post("/v1/completions", TEXT | {"priority": priority}).status == 200
        assert check_priority(client.submitted[-1].priority + priority) == 2 * priority
    assert server.post("/v1/completions", TEXT | {"priority": -MAX_PART - 1}).error["param"] == "priority"


def test_a_request_of_the_same_name_is_not_anothers(start: Start) -> None:
    """Bob names his request as Alice's is, and as her answer's id says, and leaves: hers goes on."""
    server, client = start(keys=KEYS, pace=0.02)
    with ThreadPoolExecutor(1) as pool:
        body = TEXT | {"stream": True, "max_tokens": 40}
        hers = pool.submit(server.post, "/v1/completions", body, bearer(ALICE) | {"x-request-id": "mine"})
        wait_for(lambda: len(client.running) == 1)
        (name,) = client.running
        for given in ("mine", name, name.rpartition("-")[0]):
            headers = {**bearer(BOB), "x-request-id": given}
            connection = open_request(server, TEXT | {"max_tokens": 100}, headers=headers)
            wait_for(lambda: len(client.running) == 2)
            connection.close()
            wait_for(lambda: len(client.running) == 1)
        answer = hers.result()
    assert len(answer.events) == 40
    assert name not in client.aborted
    assert len(client.aborted) == 3
    ids = {one.request_id for one in client.submitted}
    assert len(ids) == 4
    assert all(re.fullmatch("cmpl-[0-9a-f]{32}-0", one) for one in ids), (
        "128 bits, most of them random, are not guessed"
    )


def test_no_route_aborts_or_reads_by_a_requests_name(start: Start) -> None:
    server, _ = start()
    taking = {route.path for route in server.app.routes if isinstance(route, Route) and "{" in route.path}
    assert taking == {"/v1/models/{model:path}"}


def test_a_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"- {{key: {ALICE}, tenant: alice}}\n- {{key: {ADMIN}, admin: true, priority: -1}}\n")
    keys = read_keys(file)
    assert keys.find(f"bearer {ALICE}".encode()) == Tenant("alice")
    assert keys.find(f"Bearer {ADMIN}".encode()) == Tenant("1", -1, True)
    for text, said in (
        ("", "a YAML list"),
        ("- {tenant: a}", "with a `key`"),
        ("- {key: short}", "16 ASCII characters"),
        (f"- {{key: {ALICE}, tenent: a}}", "tenant"),
        (f"- {{key: {ALICE}, priority: high}}", "must be a int"),
        (f"- {{key: {ALICE}}}\n- {{key: {ALICE}}}", "the key of another"),
        (f"- {{key: {ALICE}, key: {BOB}}}", "line 1: an entry has a field twice"),
        (f"- {{key: {ALICE}}}\n- {{key: {BOB}", "line 2: not YAML$"),
        (f"- {{key: !!python/name:{ALICE} {ALICE}}}", "line 1: not YAML$"),
        ("- {key: 1234567890123456}", "key must be a str"),
        (f"- {{key: {ALICE}, priority: {-MAX_PART - 1}}}", f"entry 0: priority must be from {-MAX_PART}"),
        (f"- {{key: {ALICE}, tenant: ''}}", "entry 0: tenant must not be empty"),
        (f"- {{key: {ALICE}, tenant: '1'}}\n- {{key: {BOB}}}", "entry 0: tenant '1' is entry 1, which has no name"),
    ):
        file.write_text(text)
        with pytest.raises(KeyFileError, match=said) as caught:
            read_keys(file)
        assert ALICE not in str(caught.value)
    file.write_bytes(b"\xff\xfe\x00")
    for wrong in (file, tmp_path, tmp_path / "missing.yaml"):
        with pytest.raises(KeyFileError, match=wrong.name):
            read_keys(wrong)


def test_request_ids_and_a_log_without_prompts(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tsched.serving.access")
    server, _ = start(keys=KEYS)
    answer = server.post("/v1/completions", TEXT | {"prompt": "secret"}, bearer(ALICE) | {"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    ids = {server.get("/live").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert len(server.get("/live", {"x-request-id": "a" * 999}).headers["x-request-id"]) == 32
    assert server.get("/nowhere").headers["x-request-id"]
    wait_for(lambda: "nowhere" in caplog.text)
    lines = [json.loads(record.message) for record in caplog.records if record.name == "tsched.serving.access"]
    (line,) = [one for one in lines if one["id"] == "mine"]
    assert (line["tenant"], line["status"], line["completion_tokens"]) == ("alice", 200, 3)
    assert line["finish_reasons"] == ["length"]
    assert "secret" not in caplog.text
    assert ALICE not in caplog.text
    assert "xxx" not in caplog.text


def test_live_answers_while_long_prompts_are_tokenized(start: Start) -> None:
    server, _ = start()
    begun, may_end = threading.Event(), threading.Event()
    encode = server.front.codec.encode

    def slow(text: str, **options: Any) -> list[int]:
        begun.set()
        may_end.wait(10)
        return encode(text, **options)

    server.front.codec.encode = slow
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/v1/completions", TEXT | {"prompt": ["a" * 100] * 12})
        assert begun.wait(5)
        assert server.get("/live").status == 200
        assert not answer.done()
        may_end.set()
        assert answer.result().status == 200


ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", TEXT | {"prompt": [5] * 600}),
    ("/v1/completions", TEXT | {"allowed_token_ids": [5] * 600}),
    ("/tokenize", {"prompt": "a b " * 300, "return_token_strs": True}),
    ("/detokenize", {"tokens": [5] * 600}),
    ("/admin/kernels", {"kernels": {"a" * place: None for place in range(1, 60)}}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_large_bodies_are_read_and_checked_off_the_loop(
    path: str, body: Any, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = start(keys=KEYS)
    threads: list[tuple[str, str]] = []

    def note(name: str, real: Callable[..., Any], *parts: Any, **more: Any) -> Any:
        threads.append((name, threading.current_thread().name.partition("_")[0]))
        return real(*parts, **more)

    for room, names in (
        (exchange, ("parse_request", "check_request", "make_job")),
        (app, ("parse_request", "tokenize_request", "check_ids")),
    ):
        for name in names:
            monkeypatch.setattr(room, name, partial(note, name, getattr(room, name)))
    codec = server.front.codec
    monkeypatch.setattr(codec, "token_name", partial(note, "token_name", codec.token_name))
    assert server.post(path, body, bearer(ADMIN if path.startswith("/admin") else ALICE)).status in (200, 400)
    assert threads[0] == ("parse_request", "tokenize")
    assert {thread for _, thread in threads} == {"tokenize"}


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})])
def test_the_tokenizers_routes_are_let_in_as_others_and_have_an_end(path: str, body: Any, start: Start) -> None:
    server, _ = start(limits={"max_in_flight": 1})
    may_end, codec = threading.Event(), server.front.codec
    real = codec.encode, codec.decode

    def wait(*parts: Any, is_text: bool, **options: Any) -> Any:
        may_end.wait(10)
        return real[is_text](*parts, **options)

    codec.encode, codec.decode = partial(wait, is_text=False), partial(wait, is_text=True)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.post, path, body)
        try:
            wait_for(lambda: server.front.open_door().num_in_flight == 1)
            refused = server.post(path, body)
        finally:
            may_end.set()
        assert (refused.status, refused.error["code"]) == (429, "in_flight")
        assert first.result().status == 200
        may_end.clear()
        try:
            late = server.post(path, body, {"x-request-timeout": "0.05"})
        finally:
            may_end.set()
    assert (late.status, late.error["code"]) == (504, "request_timeout")
    wait_for(lambda: at_rest(server))


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/admin/kernels"])
def test_a_client_that_leaves_amid_any_body_is_no_failure(
    path: str, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tsched.serving")
    server, _ = start(keys=KEYS)
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {ADMIN if 'admin' in path else ALICE}\r\n"
    connection.sendall(f'{head}content-type: application/json\r\ncontent-length: 100\r\n\r\n{{"'.encode())
    time.sleep(0.05)
    connection.close()
    wait_for(lambda: f'"path": "{path}"' in caplog.text)
    assert '"status": 499' in caplog.text
    assert "Traceback" not in caplog.text
    assert "ERROR" not in caplog.text


def test_limits_are_checked() -> None:
    for wrong in (
        {"max_in_flight": 0},
        {"body_timeout": float("inf")},
        {"max_body_bytes": 1.5},
        {"tokenizer_threads": None},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ServerLimits(**wrong)


def test_as_many_threads_tokenize_as_the_limits_say(tmp_path: Path) -> None:
    front = FrontEnd(ScriptedClient(tmp_path), ServerLimits(tokenizer_threads=3))
    before, may_end = {*threading.enumerate()}, threading.Event()
    for _ in range(5):
        front.pool.submit(may_end.wait)
    names = [one.name for one in {*threading.enumerate()} - before]
    may_end.set()
    front.pool.shutdown()
    assert sorted(names) == ["tokenize_0", "tokenize_1", "tokenize_2"]


def test_no_other_origins_scripts_are_answered(start: Start) -> None:
    server, _ = start()
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    answers: list[Answer] = [server.ask("OPTIONS", "/v1/completions", None, headers), server.get("/v1/models", headers)]
    assert all("access-control-allow-origin" not in one.headers for one in answers)
