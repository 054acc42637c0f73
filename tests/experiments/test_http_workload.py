"""A workload over HTTP: what a server was sent and when, what its client notes of it, and the rows of a run."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml

from experiments.commands.requests import RunRequest
from experiments.commands.run import run as run_file
from experiments.document import ExperimentError, read_document
from experiments.planning.plan import make_sweep
from experiments.reporting.tables import tables_of
from experiments.runs.folder import RunFolder
from experiments.schema import HttpWorkload
from experiments.stages.http_server import HttpServer, HttpServerError, arrival_times, draw_round
from experiments.sweep.runner import failures

SYNTHETIC: dict[str, Any] = {"kind": "synthetic", "num_requests": 6, "input_len": {"uniform": [3, 9]}, "output_len": 5}
TRACE = Path(__file__).parent / "simulation" / "data" / "mooncake.jsonl"


class Scripted:
    """An OpenAI server that answers by `script`: a prompt's length -> what happens to it. bodies: what it was sent.

    A token takes a millisecond. script: "whole" tokens one by one; "pairs" two in a chunk; "refused" 429; "broken" an
    error frame after the first token; "cut" a stream that just ends; "slow" a first token after 80 ms; "silent" nothing
    more after the first token. Others are a chunk that comes after the first token, as JSON.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.script: Callable[[int], str] = lambda length: "whole"
        self.models = ["scripted"]
        self.running = self.peak_running = 0
        self.url = ""

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        self.keys.add(dict(scope["headers"]).get(b"authorization", b"").decode() or None)
        if scope["path"] == "/v1/models":
            await self._answer(send, 200, {"data": [{"id": name} for name in self.models]})
            return
        assert scope["path"] == "/v1/completions"
        parts = []
        while (part := await receive()).get("more_body"):
            parts.append(part["body"])
        body = json.loads(b"".join([*parts, part["body"]]))
        self.bodies.append(body)
        self.running += 1
        self.peak_running = max(self.peak_running, self.running)
        try:
            await self._complete(send, body, self.script(len(body["prompt"])))
        finally:
            self.running -= 1

    async def _complete(self, send: Any, body: dict[str, Any], how: str) -> None:
        if how == "refused":
            await self._answer(send, 429, {"error": {"message": "too many requests"}})
            return
        await self._begin(send, 200, b"text/event-stream")
        step = 2 if how == "pairs" else 1
        for number in range(step, body["max_tokens"] + step, step):
            await asyncio.sleep(0.08 if how == "slow" and number == 1 else 0.001)
            tokens = min(number, body["max_tokens"])
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
            await self._event(send, {"choices": [{"index": 0, "text": "x\u2028"}], "usage": usage})
            if how == "silent" and number == 1:
                await asyncio.sleep(0.5)
            if how.startswith("{"):
                await self._event(send, json.loads(how))
            if how == "broken":
                await self._event(send, {"error": {"message": "the worker died"}})
                break
        if how != "cut":
            await send({"type": "http.response.body", "body": b": ping\n\ndata: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _answer(self, send: Any, status: int, body: Any) -> None:
        await self._begin(send, status, b"application/json")
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    async def _begin(self, send: Any, status: int, kind: bytes) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})

    async def _event(self, send: Any, event: Any) -> None:
        line = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
        await send({"type": "http.response.body", "body": line, "more_body": True})


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    """A scripted server that runs in a thread, on a port of its own."""
    app = Scripted()
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    socket = config.bind_socket()
    app.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    yield app
    server.should_exit = True
    thread.join()


def workload(url: str, **fields: Any) -> HttpWorkload:
    given = {"kind": "http", "url": url, "requests": SYNTHETIC, "vocab_size": 50, **fields}
    return HttpWorkload.model_validate(given)


def test_a_round_is_what_the_server_was_sent_and_what_it_said(scripted: Scripted) -> None:
    with HttpServer(workload(scripted.url)) as server:
        first, second = server(), server()
    assert server.served_model == "scripted"
    assert first.lengths == second.lengths == (5,) * 6
    sent = [body["prompt"] for body in scripted.bodies]
    assert first.prompt_tokens == sum(map(len, sent[:6]))
    assert all(0 <= token < 50 for prompt in sent for token in prompt)
    assert sorted(map(str, sent[:6])) != sorted(map(str, sent[6:])), "the second round would find the first one's pages"
    assert first.moments is not None
    for moments in first.moments:
        assert len(moments) == 5
        assert list(moments) == sorted(moments)
        assert 0 < moments[0] < moments[-1] < first.seconds
    assert first.output_tokens == 30
    assert {body["ignore_eos"] for body in scripted.bodies} == {True}
    assert {body["temperature"] for body in scripted.bodies} == {0.0}
    assert first.num_good is None
    assert first.goodput is None


def test_several_tokens_of_a_chunk_are_as_many_as_its_usage_says(scripted: Scripted) -> None:
    scripted.script = lambda length: "pairs"
    with HttpServer(workload(scripted.url)) as server:
        served = server()
    assert served.lengths == (5,) * 6
    assert served.moments is not None
    assert all(moments[0] == moments[1] < moments[2] == moments[3] < moments[4] for moments in served.moments)


def test_what_fails_is_counted_and_named_and_harms_no_other(scripted: Scripted) -> None:
    faults = ("refused", "broken", "cut", "whole")
    scripted.script = lambda length: faults[length - 1]
    said = {"refused": "429: .*too many requests", "broken": "the worker died", "cut": r"ended without \[DONE\]"}
    for place, fault in enumerate(faults):
        requests = {**SYNTHETIC, "input_len": place + 1, "num_requests": 2}
        with HttpServer(workload(scripted.url, requests=requests, slo={"ttft_ms": 1e5})) as server:
            served = server()
        if fault == "whole":
            assert served.error is None
            assert served.num_good == 2
            continue
        assert served.tokens == (None, None)
        assert served.output_tokens == served.num_good == 0
        assert served.ttft_s == []
        assert served.error is not None
        with pytest.raises(AssertionError, match=said[fault]):
            raise AssertionError(served.error)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("silent", "ReadTimeout"),
        ('{"usage": {"completion_tokens": null}}', "no chunk of a completion"),
        ('{"usage": {"completion_tokens": 1000000000000}}', "counts 1000000000000 tokens where 5 were asked for"),
        ('{"usage": [1]}', "no chunk of a completion"),
        ('{"choices": ["x"]}', "no chunk of a completion"),
        ('{"choices": 5}', "no chunk of a completion"),
    ],
)
def test_an_answer_that_is_none_fails_its_request_alone(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, how: str, said: str
) -> None:
    monkeypatch.setattr("experiments.stages.http_server._SILENCE_S", 0.2)
    scripted.script = lambda length: how if length == 3 else "whole"
    requests = {**SYNTHETIC, "input_len": {"uniform": [3, 4]}, "num_requests": 8}
    with HttpServer(workload(scripted.url, requests=requests)) as server:
        served = server()
    assert served.error is not None
    assert said in served.error
    assert sorted(set(served.lengths)) == [0, 5], "the others are whole"


def test_requests_in_flight_are_bounded_and_waiting_here_counts(scripted: Scripted) -> None:
    scripted.script = lambda length: "slow"
    with HttpServer(workload(scripted.url, in_flight=2)) as server:
        served = server()
    assert scripted.peak_running == 2
    waits = sorted(served.ttft_s)
    assert waits[0] < waits[-1] - 2 * 0.08, "the last to begin waited until four had ended"


def test_goodput_counts_the_requests_that_met_the_objective(scripted: Scripted) -> None:
    scripted.script = lambda length: "slow" if length == 4 else "whole"
    requests = {**SYNTHETIC, "input_len": {"uniform": [3, 4]}, "num_requests": 12}
    with HttpServer(workload(scripted.url, requests=requests, slo={"ttft_ms": 80})) as server:
        served = server()
    waits = dict(zip(map(len, (body["prompt"] for body in scripted.bodies)), served.ttft_s, strict=False))
    assert set(waits) == {3, 4}
    assert served.num_good == sum(wait <= 0.08 for wait in served.ttft_s)
    assert served.num_good <= sum(len(body["prompt"]) == 3 for body in scripted.bodies)
    assert served.goodput == pytest.approx(served.num_good / served.seconds)


def test_requests_come_at_once_by_rate_or_when_their_trace_says() -> None:
    assert arrival_times(workload("http://x"), 3, 0) == [0.0] * 3
    times = arrival_times(workload("http://x", rate=50), 2000, 0)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(2000 / 50, rel=0.1)  # four standard deviations of a sum of 2,000
    assert times != arrival_times(workload("http://x", rate=50), 2000, 1)
    trace = {"kind": "trace", "file": TRACE, "num_requests": 5, "block_tokens": 2}
    given = workload("http://x", requests=trace, speed=2.0)
    assert len(draw_round(given, 0)) == 5
    stamps = [json.loads(line)["timestamp"] for line in TRACE.read_text().splitlines()[:5]]
    assert arrival_times(given, 5, 0) == pytest.approx([(stamp - stamps[0]) / 2000 for stamp in stamps])


def test_what_a_request_asks_for_is_sent_by_the_wires_names(scripted: Scripted, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    requests = {**SYNTHETIC, "sampling": {"temperature": 0.7, "top_p": 0.9}, "tenants": 2, "priority": 3}
    with HttpServer(workload(scripted.url, requests=requests, key_file=tmp_path / "key")) as server:
        server()
    assert scripted.keys == {"Bearer secret"}
    assert {body["cache_salt"] for body in scripted.bodies} == {"tenant 0", "tenant 1"}
    assert {(body["temperature"], body["top_p"], body["priority"]) for body in scripted.bodies} == {(0.7, 0.9, 3)}
    assert len({body["seed"] for body in scripted.bodies}) == 6


def test_a_server_that_is_not_there_or_has_several_models_is_named(scripted: Scripted) -> None:
    with pytest.raises(HttpServerError, match=r"no OpenAI server answers at http://127\.0\.0\.1:1: "):
        HttpServer(workload("http://127.0.0.1:1"))
    scripted.models = ["one", "two"]
    with pytest.raises(HttpServerError, match="serves one, two: name one, served_model"):
        HttpServer(workload(scripted.url))
    assert HttpServer(workload(scripted.url, served_model="two")).served_model == "two"


@pytest.mark.parametrize("end", ["/", "/v1", "/v1/"])
def test_the_url_that_a_server_says_for_clients_is_taken_too(end: str, scripted: Scripted) -> None:
    with HttpServer(workload(scripted.url + end)) as server:
        assert server.served_model == "scripted"
        assert server.workload.url == scripted.url


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "the url of a server is http://HOST:PORT, or https, with or without /v1; got '127"),
        ({"url": "http:///v1"}, "the url of a server is"),
        ({"url": "http://x/v1?key=a"}, "the url of a server is"),
        ({"vocab_size": None}, "vocab_size is needed"),
        ({"rate": 0}, "rate"),
        ({"rate": 1, "speed": 1}, "give one"),
        ({"speed": 1}, "speed is a trace's"),
        ({"slo": {}}, "an slo has ttft_ms, tpot_ms or both"),
        ({"requests": {**SYNTHETIC, "n": 2, "sampling": {"temperature": 1.0}}}, "requests of n completions"),
        ({"requests": {**SYNTHETIC, "kind": "http"}}, "requests"),
    ],
)
def test_what_cannot_be_sent_is_refused_with_its_place(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"kind": "http", "url": "http://x", "requests": SYNTHETIC, "vocab_size": 50, **fields}
    (tmp_path / "live.yaml").write_text(yaml.safe_dump({"name": "live", "workload": given}))
    with pytest.raises(ExperimentError, match=message) as caught:
        make_sweep(read_document(tmp_path / "live.yaml"))
    assert "workload" in str(caught.value)


@pytest.mark.parametrize("kind", ["http", "synthetic"])
def test_a_run_says_that_it_loads_a_model_where_it_serves_one_itself(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop() -> None:
        raise ExperimentError(["stopped"])

    monkeypatch.setattr("experiments.commands.run.import_torch", stop)
    served = {"kind": "http", "url": "http://x", "requests": SYNTHETIC, "vocab_size": 50}
    given = {"workload": served} if kind == "http" else {"model": {"preset": "tiny"}, "workload": SYNTHETIC}
    (tmp_path / "live.yaml").write_text(yaml.safe_dump({"name": "live", **given}))
    with pytest.raises(ExperimentError, match="stopped"):
        run_file(RunRequest(tmp_path / "live.yaml"))
    said = capsys.readouterr().err
    assert "loading torch" in said
    assert ("model" in said) == (kind == "synthetic")


def test_without_the_extra_the_command_that_installs_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.planning.written_checks.find_spec", lambda name: None)
    given = {"kind": "http", "url": "http://x", "requests": SYNTHETIC, "vocab_size": 50}
    (tmp_path / "live.yaml").write_text(yaml.safe_dump({"name": "live", "workload": given}))
    with pytest.raises(ExperimentError, match=r"pip install 'tkernels\[serve\]'"):
        make_sweep(read_document(tmp_path / "live.yaml"))


def test_a_run_has_a_row_for_each_server_and_rate_and_says_what_it_saw(
    scripted: Scripted, run: Callable[..., RunFolder]
) -> None:
    given = {
        "kind": "http", "url": [scripted.url, "http://127.0.0.1:1"], "rate": [500, 1000], "vocab_size": 50,
        "requests": SYNTHETIC, "slo": {"ttft_ms": 1e5},
    }  # fmt: skip
    folder = run(workload=given, repeats=2)
    rows = folder.rows
    assert [(row.stage, row.status, row.url, row.settings["workload.rate"]) for row in rows] == [
        ("http", status, url, rate)
        for url, status in ((scripted.url, "ok"), ("http://127.0.0.1:1", "failed"))
        for rate in (500, 1000)
    ]
    assert {row.slo_met for row in rows[:2]} == {1.0}
    assert all(row.output_tokens == 30 and row.goodput is not None and row.ttft_s is not None for row in rows[:2])
    assert len(failures(folder)) == 2
    assert len(scripted.bodies) == 2 * 3 * 6, "a round that warms up, and two that count"
    tables = tables_of(rows)
    assert list(tables) == ["http", "waiting"]
