"""Overload, crowds, stops and slow connections at the sizes that a server promises, in the slow set."""

import socket
from pathlib import Path

import pytest

from tests.tsched.serving import many_streams, overload, stops
from tests.tsched.serving.test_operations import TEXT, Start, at_rest, start, wait_for  # noqa: F401

pytestmark = pytest.mark.slow


def test_640_requests_at_64_admitted(tmp_path: Path) -> None:
    assert overload.run("tiny", tmp_path, num_requests=640, admitted=64, times=4.0) == []


def test_100_streams_at_once(tmp_path: Path) -> None:
    assert many_streams.run("tiny", tmp_path, num_streams=100, seconds=10.0, rows=64) == []


def test_32_streams_of_a_server_that_is_stopped_and_of_one_whose_worker_dies_or_hangs(tmp_path: Path) -> None:
    assert stops.run("tiny", tmp_path, num_streams=32) == []


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
