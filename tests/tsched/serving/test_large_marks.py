"""Overload, crowds and stops at the sizes that a server promises, in the slow set."""

from pathlib import Path

import pytest

from tests.tsched.serving import many_streams, overload, stops

pytestmark = pytest.mark.slow


def test_640_requests_at_64_admitted(tmp_path: Path) -> None:
    assert overload.run("tiny", tmp_path, num_requests=640, admitted=64, times=4.0) == []


def test_100_streams_at_once(tmp_path: Path) -> None:
    assert many_streams.run("tiny", tmp_path, num_streams=100, seconds=10.0, rows=64) == []


def test_32_streams_of_a_server_that_is_stopped_and_of_one_whose_worker_dies_or_hangs(tmp_path: Path) -> None:
    assert stops.run("tiny", tmp_path, num_streams=32) == []
