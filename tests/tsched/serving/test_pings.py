"""Comments in streams that are silent for long: proxies do not cut them, and every client skips them."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

from experiments.schema import HttpWorkload
from experiments.stages.http_server import HttpServer
from tests.tsched.serving.conftest import RunningServer
from tests.tsched.serving.scripted_client import ScriptedClient
from tsched.serving.app import create_app
from tsched.serving.limits import ServerLimits

BODY: dict[str, Any] = {"model": "random", "prompt": "def", "max_tokens": 3}


@pytest.fixture(scope="module")
def slow(chat_checkpoint: Path) -> Iterator[RunningServer]:
    """A server whose first token takes 0.3 s and each other 0.1 s; after 0.05 s of silence there is a comment."""
    client = ScriptedClient(chat_checkpoint, first=0.3, pace=0.1)
    running = RunningServer(create_app(client, ServerLimits(ping_interval=0.05, queue_timeout=1.0)))
    yield running.wait_until_ready()
    running.stop()


def test_a_silent_stream_has_comments_before_its_first_chunk_and_between_chunks(slow: RunningServer) -> None:
    body = slow.post("/v1/completions", BODY | {"stream": True}).body.decode()
    events = body.removesuffix("\n\n").split("\n\n")
    places = [place for place, event in enumerate(events) if event != ": ping"]
    assert places[0] >= 3
    assert all(after - before >= 2 for before, after in pairwise(places[:3]))
    chunks = [json.loads(events[place].removeprefix("data: ")) for place in places[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "xxx"
    assert events[-1] == "data: [DONE]", "nothing follows the end"


def test_a_whole_answer_and_a_stream_that_is_never_silent_have_none(slow: RunningServer) -> None:
    assert slow.post("/v1/completions", BODY).json["choices"][0]["text"] == "xxx"
    client = slow.front.client
    client.first = client.pace = 0.0
    try:
        body = slow.post("/v1/completions", BODY | {"stream": True, "max_tokens": 100}).body
    finally:
        client.first, client.pace = 0.3, 0.1
    assert b": ping" not in body
    assert body.count(b"data: ") == 101


def test_openais_client_and_ours_skip_them(slow: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{slow.base}/v1", api_key="none", max_retries=0) as client:
        chunks = list(client.completions.create(stream=True, **BODY))
        talk = client.chat.completions.create(
            model="random", messages=[{"role": "user", "content": "def"}], max_tokens=3, stream=True
        )
        spoken = "".join(chunk.choices[0].delta.content or "" for chunk in talk)
    assert [chunk.choices[0].text for chunk in chunks] == ["x"] * 3
    assert spoken == "xxx"
    requests = {"kind": "synthetic", "num_requests": 2, "input_len": 4, "output_len": 3}
    workload = HttpWorkload.model_validate({"kind": "http", "url": slow.base, "vocab_size": 50, "requests": requests})
    with HttpServer(workload) as server:
        served = server()
    assert served.lengths == (3, 3)
    assert served.moments is not None
    assert all(moments[0] >= 0.3 for moments in served.moments), "the first token is not the first comment"


def test_a_time_that_is_over_after_a_comment_is_an_event(slow: RunningServer) -> None:
    slow.front.client.first = 60.0
    try:
        answer = slow.post("/v1/completions", BODY | {"stream": True})
    finally:
        slow.front.client.first = 0.3
    events = answer.body.decode().removesuffix("\n\n").split("\n\n")
    assert answer.status == 200
    assert {*events[:-1]} == {": ping"}
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "queue_timeout"
