"""A real worker: its streams are the engine's own, kernels are swapped in it, and its faults end its requests."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest

from tests.tsched.serving.tk_serve import find_worker
from tests.tsched.test_llm import PROMPTS
from tkernels.ranges import NVTX
from tsched import LLM, SamplingParams
from tsched.execution.engine_thread import EngineThread
from tsched.execution.news import News, Ticket
from tsched.execution.phase_times import PhaseTimes
from tsched.requests.outputs import RequestMetrics
from tsched.requests.prompts import PreparedRequest
from tsched.serving import link
from tsched.serving import worker as worker_room
from tsched.serving.engine_client import (
    Delta,
    DeltaStream,
    EngineFailedError,
    EngineRequest,
    KernelSwap,
    RequestRefusedError,
    RequestTimes,
    SampleDelta,
)
from tsched.serving.engine_records import make_delta
from tsched.serving.link import Message
from tsched.serving.local_client import LocalClient
from tsched.serving.supervisor import SupervisedClient
from tsched.serving.worker import Worker, _Engine

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "max_num_seqs": 8}
LONG = {"temperature": 0, "max_tokens": 80, "ignore_eos": True}

RAISING = """
import functools
from pathlib import Path
from tkernels import Variant
from tkernels.ops.rms_norm.contract import CONTRACT
calls = 0
@functools.wraps(CONTRACT.baseline)
def compute(*args, **kwargs):
    global calls
    if Path({trigger!r}).exists():
        calls += 1
        if calls == 40:
            Path({trigger!r}).unlink()
            raise RuntimeError("planted\\nbelow it a stack")
    return CONTRACT.baseline(*args, **kwargs)
VARIANT = Variant(wins="never: it fails", deterministic=True, batch_invariant=False, function=compute)
"""


async def collect(client: SupervisedClient, name: str, prompt: list[int], sampling: dict[str, Any]) -> list[Delta]:
    (stream,) = client.submit(EngineRequest(name, prompt, sampling))
    return [delta async for delta in stream]


def joined(deltas: list[Delta]) -> dict[int, tuple[list[int], str, str | None]]:
    """Completion -> its tokens, its text and why it ended."""
    assert [delta.is_last for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    found: dict[int, tuple[list[int], str, str | None]] = {}
    for sample in (sample for delta in deltas for sample in delta.samples):
        tokens, text, _ = found.get(sample.sample, ([], "", None))
        found[sample.sample] = (tokens + sample.token_ids, text + sample.text, sample.finish_reason)
    return found


def test_a_workers_streams_are_the_engines_own_and_a_step_is_one_message(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        *((prompt, LONG) for prompt in PROMPTS[:6]),
        (PROMPTS[5], {"n": 3, "seed": 3, "temperature": 1.2, "max_tokens": 30, "logprobs": 2}),
    ]
    llm = LLM(checkpoint, **OPTIONS)
    expected = [llm.generate([prompt], SamplingParams(**sampling))[0] for prompt, sampling in asked]
    messages: list[Message] = []
    receive = SupervisedClient._receive

    def hear(client: SupervisedClient, message: Message) -> None:
        messages.append(message)
        receive(client, message)

    monkeypatch.setattr(SupervisedClient, "_receive", hear)

    async def main() -> None:
        client = SupervisedClient(checkpoint, **OPTIONS)
        await client.start()
        assert client.facts.tokenizer_directory == str(checkpoint)
        assert client.stats().num_steps > 0, "it was warmed up before it was ready"
        streams = [collect(client, str(i), *one) for i, one in enumerate(asked)]
        everything = await asyncio.gather(*streams)
        for deltas, whole in zip(everything, expected, strict=True):
            assert joined(deltas) == {
                one.index: (list(one.token_ids), one.text, one.finish_reason) for one in whole.outputs
            }
        scores = [scores for delta in everything[-1] for s in delta.samples if s.sample == 1 for scores in s.logprobs]
        (_, one, _) = expected[-1].outputs
        assert [list(place) for place in one.logprobs] == [scores.token_ids for scores in scores]
        chosen = [place[scores.token_ids[0]].logprob for place, scores in zip(one.logprobs, scores, strict=True)]
        assert chosen == pytest.approx([scores.logprobs[0] for scores in scores], abs=1e-9)
        news = [len(one["tokens"]) + len(one["deltas"]) for one in messages if one["kind"] == "news"]
        assert len([count for count in news if count]) <= client.stats().num_steps
        assert max(news) == OPTIONS["max_num_seqs"]
        assert client.stats().phase_seconds["step"] > 0

        (going,) = client.submit(EngineRequest("going", PROMPTS[0], LONG | {"n": 2}))
        client.abort("going")  # at once: all of it may have come before this process wakes again
        assert {one.finish_reason for one in (await rest(going))[-1].samples} == {"abort"}
        assert (client.stats().num_running, client.stats().num_used_blocks) == (0, 0)

        with pytest.raises(RequestRefusedError, match="out of vocabulary"):
            await collect(client, "a", [300], {})
        with pytest.raises(RequestRefusedError, match="there is .*one_pass"):
            await client.swap_kernels({"paged_decode": "split"})
        going = asyncio.create_task(collect(client, "b", PROMPTS[0], LONG))
        await asyncio.sleep(0.01)
        swap = await client.swap_kernels({"paged_decode": "torch", "matmul": "torch"})
        assert isinstance(swap, KernelSwap)
        assert 0 < swap.first_step <= client.stats().num_steps + 80
        assert client.stats().arm == swap.arm == llm.arm
        assert joined(await going)[0][0] == list(expected[0].outputs[0].token_ids)
        await client.close()

    asyncio.run(main())


class Sink:
    """A link's writer that keeps the messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def write(self, frame: bytes) -> None:
        self.messages.append(msgpack.unpackb(frame[4:]))


def test_news_too_long_for_one_message_are_several_and_a_request_too_long_for_one_is_told(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "MAX_FRAME_BYTES", 4000)
    sink, thread, aborted = Sink(), SimpleNamespace(failure=None), []
    thread.abort = aborted.append
    engine = _Engine(LLM(checkpoint, **OPTIONS), PhaseTimes(NVTX), thread)
    worker = Worker(cast("asyncio.StreamReader", None), cast("link.LinkWriter", sink))
    worker._tickets["long"] = ticket = cast("Ticket", object())
    sizes = {"a": 100, "b": 900, "long": 5000, "c": 900, "d": 1}
    deltas = [(name, Delta([SampleDelta(0, [1], "x" * size, None)], False)) for name, size in sizes.items()]
    worker._send_news(engine, [("t", 0, [5], "y", None)], deltas, [("r", "no", None)])
    assert {message["kind"] for message in sink.messages} == {"news"}
    assert [one for message in sink.messages for one in message["tokens"]] == [["t", 0, [5], "y", None]]
    sent = [name for message in sink.messages for name, _ in message["deltas"]]
    assert sent == ["a", "b", "c", "d"]
    refused = [one for message in sink.messages for one in message["refusals"]]
    assert [name for name, _, _ in refused] == ["long", "r"]
    assert "its answer is too long" in refused[0][1]
    assert aborted == [ticket]


def test_what_the_front_end_says_of_a_request_reaches_the_engine(checkpoint: Path) -> None:
    """Its priority and salt, and that nobody waits for it any more."""
    submitted: list[Ticket] = []
    aborted: list[Ticket] = []
    thread = SimpleNamespace(failure=None, submit=lambda *tickets: submitted.extend(tickets), abort=aborted.append)

    async def main() -> None:
        reader = asyncio.StreamReader()
        worker = Worker(reader, cast("link.LinkWriter", Sink()))
        worker._engine = _Engine(LLM(checkpoint, **OPTIONS), PhaseTimes(NVTX), cast("EngineThread", thread))
        requests = [asdict(EngineRequest(name, [5], {}, priority=rank)) for name, rank in (("a", 3), ("b", -2))]
        requests.append(asdict(EngineRequest("c", [5], {}, cache_salt="s")))
        for message in (
            {"kind": "submit", "requests": requests},
            {"kind": "abort", "id": "b"},
            {"kind": "abort", "id": "d"},
        ):
            reader.feed_data(link.encode_message(message))
        reader.feed_eof()
        await worker._follow()

    asyncio.run(main())
    told = [(one.prepared.request_id, one.prepared.priority, one.prepared.cache_salt) for one in submitted]
    assert told == [("a", 3, b""), ("b", -2, b""), ("c", 0, b"s")]
    assert aborted == [submitted[1]], "nobody knows d"


def test_a_request_before_the_engine_is_ready_ends_the_link() -> None:
    async def main() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(link.encode_message({"kind": "submit", "requests": []}))
        worker = Worker(reader, cast("link.LinkWriter", Sink()))
        with pytest.raises(link.LinkError, match="'submit' came before the engine was ready"):
            await worker._follow()

    asyncio.run(main())


def test_the_end_of_a_request_that_never_ran_tells_that_it_waited_all_along() -> None:
    """And no log-probabilities, which it did not ask for."""
    ticket = Ticket(PreparedRequest("a", None, [5], SamplingParams(), 1.0))
    news = News(ticket, 0, [], "", RequestMetrics(1.0, None, 4.0), finish_reason="abort", is_last=True)
    delta = make_delta(news)
    assert delta.times == RequestTimes(queue=3.0, prefill=0.0, decode=0.0)
    assert delta.samples[0].logprobs is None


def test_frames_that_the_link_does_not_take_at_once_arrive_whole_and_in_order() -> None:
    """Two threads write faster than the other end reads; when that is gone, writing goes on into nothing."""
    ours, theirs = socket.socketpair()

    def write(writer: link.LinkWriter, name: str) -> None:
        for number in range(300):
            writer.write(link.encode_message({"kind": name, "number": number, "text": name * 3000}))

    async def main() -> None:
        writer = link.LinkWriter(theirs, asyncio.get_running_loop())
        threads = [threading.Thread(target=write, args=(writer, name)) for name in "ab"]
        for thread in threads:
            thread.start()
        await asyncio.sleep(0.05)
        assert writer._left, "the socket holds less"
        reader, _kept = await asyncio.open_connection(sock=ours)
        found: dict[str, list[int]] = {"a": [], "b": []}
        while sum(map(len, found.values())) < 600:
            message = await link.read_message(reader)
            assert message is not None
            assert message["text"] == message["kind"] * 3000
            found[message["kind"]].append(message["number"])
        assert found == {"a": [*range(300)], "b": [*range(300)]}
        await asyncio.wait_for(writer.flush(), 1)
        for thread in threads:
            thread.join()
        write(writer, "a")
        assert writer._left
        _kept.close()
        await asyncio.wait_for(writer.flush(), 5)
        write(writer, "a")
        assert not writer._left

    asyncio.run(main())


def test_a_swap_that_runs_out_of_memory_is_answered(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(checkpoint, **OPTIONS)

    def fail(choices: object) -> None:
        raise RuntimeError("out of memory\nbelow it a stack")

    monkeypatch.setattr(llm, "plan_swap", fail)
    sink = Sink()

    async def main() -> None:
        worker = Worker(cast("asyncio.StreamReader", None), cast("link.LinkWriter", sink))
        await worker._swap(_Engine(llm, PhaseTimes(NVTX), cast("EngineThread", None)), 3, {})

    asyncio.run(main())
    (answer,) = sink.messages
    assert answer == {
        "kind": "swap_refused", "id": 3, "reason": "RuntimeError: out of memory", "param": "kernels",
    }  # fmt: skip


def test_a_worker_collects_rarely_and_leaves_the_model_out(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, int]] = []
    collector = SimpleNamespace(
        collect=lambda: called.append(("collect", 0)),
        freeze=lambda: called.append(("freeze", 0)),
        set_threshold=lambda count: called.append(("set_threshold", count)),
    )
    monkeypatch.setattr(worker_room, "gc", collector)
    served, times = worker_room._load_model(str(checkpoint), OPTIONS, [], lambda done, every: None)
    assert served.stats().num_steps > 0, "it is warm"
    assert sum(times.seconds.values()) > 0
    assert [name for name, _ in called] == ["collect", "freeze", "set_threshold"]
    assert called[-1][1] > gc.get_threshold()[0]


def test_the_front_end_of_a_worker_loads_no_torch() -> None:
    rooms = "experiments.commands.serve, tsched.serving.app, tsched.serving.http, tsched.serving.supervisor"
    program = f"import sys, json, {rooms}; print(json.dumps([*sys.modules]))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "triton", "transformers"} & set(json.loads(out))


async def rest(stream: DeltaStream) -> list[Delta]:
    return [delta async for delta in stream]


async def until_ready(client: SupervisedClient) -> None:
    while client.state != "ready":
        await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_real_worker_killed_or_stopped_is_replaced(checkpoint: Path, sent: signal.Signals) -> None:
    (whole,) = LLM(checkpoint, **OPTIONS).generate([PROMPTS[3]], SamplingParams(**LONG))

    async def main() -> None:
        client = SupervisedClient(checkpoint, stall_timeout=1.0, **OPTIONS)
        await client.start()
        arm = (await client.swap_kernels({"qk_norm_rope_scatter": "torch"})).arm
        assert arm != client.facts.arm
        streams = client.submit(*(EngineRequest(str(i), PROMPTS[i], LONG) for i in range(8)))
        for stream in streams:
            await anext(stream)
        silent = asyncio.create_task(collect(client, "silent", PROMPTS[3], LONG))  # a ninth: it waits
        await asyncio.sleep(0)
        assert client.worker_pid is not None
        os.kill(client.worker_pid, sent)
        for stream in streams:
            with pytest.raises(EngineFailedError):
                await rest(stream)
        assert joined(await silent)[0][0] == list(whole.outputs[0].token_ids)
        assert client.stats().num_restarts == 1
        assert client.stats().arm == client.facts.arm == arm
        assert (await client.swap_kernels({})).arm == arm, "it is what runs, too"
        await client.close()

    asyncio.run(main())


@pytest.mark.slow
def test_a_kernel_that_raises_in_a_real_worker_is_told_without_a_stack(checkpoint: Path, tmp_path: Path) -> None:
    trigger = tmp_path / "trigger"
    (tmp_path / "variants" / "rms_norm").mkdir(parents=True)
    (tmp_path / "variants" / "rms_norm" / "raising.py").write_text(RAISING.format(trigger=str(trigger)))

    async def main() -> None:
        kernels = {"rms_norm": "raising"}
        client = SupervisedClient(checkpoint, variants_from=[tmp_path / "variants"], kernels=kernels, **OPTIONS)
        await client.start()
        trigger.touch()  # the kernel counts its calls from here, and raises within these requests
        streams = client.submit(*(EngineRequest(str(i), PROMPTS[i], LONG) for i in range(4)))
        await anext(streams[0])
        for stream in streams:
            with pytest.raises(EngineFailedError, match="^the engine failed: RuntimeError: planted$"):
                await rest(stream)
        await until_ready(client)
        assert joined(await collect(client, "again", PROMPTS[0], LONG))[0][2] == "length"
        await client.close()

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("is_stopped", [False, True], ids=["loading", "stopped"])
def test_a_worker_ends_with_its_front_end(checkpoint: Path, is_stopped: bool) -> None:
    command = [
        sys.executable,
        "-c",
        "from experiments.cli import main; main()",
        "serve",
        str(checkpoint),
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as front:
        assert front.stdout is not None
        front.stdout.readline()
        while (worker := find_worker(front.pid)) is None:
            time.sleep(0.02)
        if is_stopped:
            assert front.stdout.readline().startswith("ready after ")
            os.kill(worker, signal.SIGSTOP)
        front.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < deadline, "it serves nobody"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_model_that_cannot_be_served_is_told_at_the_start(tmp_path: Path) -> None:
    """The same words as in this process."""

    async def main() -> None:
        with pytest.raises(Exception, match="config.json") as here:
            await LocalClient(tmp_path).start()
        client = SupervisedClient(tmp_path)
        with pytest.raises(EngineFailedError) as there:
            await client.start()
        assert str(there.value) == f"{type(here.value).__name__}: {here.value}"
        await client.close()

    asyncio.run(main())
