"""Overload, cancels and slow connections at the sizes that a server promises, in the slow set."""

import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.tsched.serving.conftest import RunningServer
from tests.tsched.serving.test_operations import TEXT, Start, at_rest, open_request, start, wait_for  # noqa: F401

pytestmark = pytest.mark.slow


def test_640_requests_at_64_admitted(start: Start) -> None:  # noqa: F811
    server, client = start(limits={"max_in_flight": 64, "max_waiting_tokens": 10**6}, first=1.0)
    with ThreadPoolExecutor(128) as pool:
        answers = list(pool.map(lambda _: server.post("/v1/completions", TEXT), range(640)))
    counts = {status: sum(one.status == status for one in answers) for status in (200, 429)}
    assert sum(counts.values()) == 640
    assert counts[200] == len(client.submitted) >= 64
    assert counts[429] > 0
    assert all(one.headers["retry-after"] for one in answers if one.status == 429)
    wait_for(lambda: at_rest(server))


def test_300_cancels_leave_nothing(server: RunningServer) -> None:
    drawn = random.Random(0)
    body = {"model": "random", "max_tokens": 110, "ignore_eos": True}
    for _ in range(300):
        prompt = drawn.choice(["a", [5, 6, 7], ["a", "b"]])
        asked = body | {"prompt": prompt, "n": drawn.choice([1, 4]), "stream": drawn.random() < 0.5}
        connection = open_request(server, asked)
        time.sleep(drawn.choice([0.0, 0.001, 0.01]))
        connection.close()
    wait_for(lambda: at_rest(server))
    wait_for(lambda: server.front.client.stats().num_used_blocks == 0)
    assert server.post("/v1/completions", body | {"prompt": "a", "max_tokens": 2}).status == 200


def test_300_slow_connections_keep_nobody_out(start: Start) -> None:  # noqa: F811
    server, _ = start(limits={"header_timeout": 30.0})
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
    for connection in slow:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost")
    for _ in range(20):
        assert server.post("/v1/completions", TEXT).status == 200
    for connection in slow:
        connection.close()
    wait_for(lambda: at_rest(server))
