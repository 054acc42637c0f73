"""A client that leaves: wherever its request is, the engine gives back what it held with the step that is running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tsched.serving import cancels
from tests.tsched.serving.conftest import OPTIONS, RunningServer
from tests.tsched.serving.test_operations import at_rest, open_request, wait_for
from tsched.execution.request import Request
from tsched.serving.app import create_api_server

NUM_PROMPT = 40
STEPS = {"queued": 0, "mid-chunk": 2, "decoding": -4, "before [DONE]": -1}
"""Place -> the steps that a request has had there, where below 0 those that are left; its prompt takes three or more,
and it makes ten tokens.
"""

ONE: dict[str, Any] = {"prompt": [5] * NUM_PROMPT}
BODIES: dict[str, dict[str, Any]] = {
    "text": {"prompt": "a" * NUM_PROMPT},
    "n = 4": ONE | {"n": 4, "temperature": 1.0},
    "prompt list": {"prompt": [[5] * NUM_PROMPT, [6] * (NUM_PROMPT // 2)]},
    "chat": {"messages": [{"role": "user", "content": "a" * NUM_PROMPT}]},
}


class StepGate:
    """Lets an engine take the steps that a test allows."""

    def __init__(self, engine: Any) -> None:
        self.num_begun = 0  # steps that the engine wants to take or has taken
        self._step, self._allowed = engine.step, threading.Semaphore(0)
        engine.step = self._wait_and_step

    def _wait_and_step(self) -> list[Request]:
        self.num_begun += 1
        self._allowed.acquire()
        return self._step()

    def allow(self, steps: int) -> None:
        for _ in range(steps):
            self._allowed.release()


@pytest.fixture(scope="module")
def slow_prefill(chat_checkpoint: Path) -> Iterator[RunningServer]:
    """A server whose prompts are computed sixteen tokens a step."""
    options = OPTIONS | {"max_num_batched_tokens": 16, "prefix_cache": "none"}
    running = RunningServer(create_api_server(chat_checkpoint, **options)).wait_until_ready()
    yield running
    running.stop()


@contextmanager
def gated(engine: Any) -> Iterator[StepGate]:
    """An engine that takes the allowed steps only, until the block ends."""
    gate = StepGate(engine)
    try:
        yield gate
    finally:
        del engine.step  # the class's own is left
        gate.allow(1000)


def count_tasks(server: RunningServer) -> int:
    """Of the server's event loop; one of them counts."""

    async def count() -> int:
        return len(asyncio.all_tasks())

    assert server.loop is not None
    return asyncio.run_coroutine_threadsafe(count(), server.loop).result()


def find_held(client: Any) -> tuple[int, int, int]:
    """(sequences that run, that wait, blocks in use)."""
    stats = client.stats()
    return stats.num_running, stats.num_waiting, stats.num_used_blocks


def count_steps(server: RunningServer, path: str, body: dict[str, Any]) -> int:
    """Those of a request that runs to its end."""
    stats = server.front.client.stats
    before = stats().num_steps
    assert server.post(path, body).status == 200
    return stats().num_steps - before


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_a_cancelled_requests_blocks_are_free_after_the_step_that_runs(
    name: str, stream: bool, slow_prefill: RunningServer
) -> None:
    body = {"model": "random", "max_tokens": 10, "ignore_eos": True, "stream": stream} | BODIES[name]
    path = "/v1/chat/completions" if name == "chat" else "/v1/completions"
    num_steps = count_steps(slow_prefill, path, body)
    client, num_tasks = slow_prefill.front.client, count_tasks(slow_prefill)
    with gated(client._llm._engine) as gate:
        for place, steps in STEPS.items():
            first, taken = gate.num_begun, steps % num_steps
            connection = open_request(slow_prefill, body, path)
            wait_for(lambda first=first: gate.num_begun == first + 1)
            gate.allow(taken)
            wait_for(lambda last=first + taken + 1: gate.num_begun == last)
            assert (client.stats().num_used_blocks > 0) == (place != "queued")
            connection.close()
            wait_for(lambda: at_rest(slow_prefill))
            gate.allow(1)
            wait_for(lambda: find_held(client) == (0, 0, 0))
            assert gate.num_begun == first + taken + 1, f"{place}: a step was taken for nobody"
    wait_for(lambda: count_tasks(slow_prefill) == num_tasks)


@pytest.mark.slow
def test_200_cancels_leave_nothing(tmp_path: Path) -> None:
    assert cancels.run("tiny", tmp_path, 200) == []
