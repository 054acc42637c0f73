"""500 connections that do not say what they want, at the server's own deadlines; a reader that does not read."""

import asyncio
import os
from pathlib import Path

import pytest

from tests.tsched.serving.slow_and_large import LARGEST_HELD, NORMAL, find_late, hold_unread, measure
from tests.tsched.serving.tk_serve import count_files, serving

pytestmark = pytest.mark.slow


def test_500_slow_connections_end_at_their_deadlines_and_keep_nobody_out(tmp_path: Path) -> None:
    with serving("tiny", tmp_path) as served:
        asyncio.run(measure(served.port, NORMAL, 1))
        files, threads = count_files(served.pid), len(os.listdir(f"/proc/{served.pid}/task"))

        async def serve_others() -> list[str]:
            ends = asyncio.create_task(find_late(served, 500))
            while not ends.done():
                await measure(served.port, NORMAL, 1)  # each is answered with 200
                await asyncio.sleep(0.5)
            return ends.result()

        assert asyncio.run(serve_others()) == []
        assert count_files(served.pid) <= files + 1
        assert len(os.listdir(f"/proc/{served.pid}/task")) <= threads
        counted = served.count()
        ended = counted["tkernels_requests_refused_total"] + counted["vllm:request_success_total"]
        assert counted["tkernels_requests_received_total"] == ended


def test_a_reader_that_does_not_read_holds_little_and_no_place_in_the_engine(tmp_path: Path) -> None:
    with serving("tiny", tmp_path) as served:
        held, _ = hold_unread(served, 4)
        assert held * 1e6 <= LARGEST_HELD
