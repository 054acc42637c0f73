"""Workers that die, hang and fail: what becomes of their requests, and when they are started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.tsched.serving.scripted_worker import (
    ANSWER,
    COUNTS,
    FACTS,
    HANG,
    LIE,
    RAISE,
    SILENT,
    SILENT_ONCE,
    SPEAK_AND_WAIT,
)  # fmt: skip
from tsched.serving import link, supervisor, worker_process
from tsched.serving.engine_client import (
    Delta,
    EngineFailedError,
    EngineRequest,
    EngineUnavailableError,
    RequestRefusedError,
    SampleDelta,
    TokenScores,
)
from tsched.serving.link import delta_of, join_deltas
from tsched.serving.supervisor import SupervisedClient
from tsched.serving.worker_lives import longest_load, restart_delay
from tsched.serving.worker_process import WorkerProcess
from tsched.serving.worker_stream import WorkerStream


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    program = worker_process._PROGRAM.replace("tsched.serving.worker", "tests.tsched.serving.scripted_worker")
    assert program != worker_process._PROGRAM
    monkeypatch.setattr(worker_process, "_PROGRAM", program)
    soon = [0.1, 0.1, None]  # a third death is the last, which saves the tests three starts
    monkeypatch.setattr(supervisor, "restart_delay", lambda deaths, now: soon[len(deaths) - 1])
    monkeypatch.setattr(supervisor, "longest_load", lambda first, stall_timeout: 20.0)


def serve(folder: Path, main: Callable[[SupervisedClient], Awaitable[None]], **options: Any) -> None:
    """Runs `main` with a client, and looks for what is left of it."""
    files = len(os.listdir("/proc/self/fd"))

    async def watched() -> None:
        client = SupervisedClient(folder, **options)
        await client.start()
        try:
            await asyncio.wait_for(main(client), 30)
        finally:
            await client.close()
        await asyncio.sleep(0.05)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        pids = [pid for life in folder.iterdir() if (pid := life.read_text())]  # one that was killed early wrote none
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    asyncio.run(watched())
    assert len(os.listdir("/proc/self/fd")) == files


def ask(client: SupervisedClient, name: str, token: int) -> WorkerStream:
    (stream,) = client.submit(EngineRequest(name, [token], {"max_tokens": 2}))
    return stream


async def until_ready(client: SupervisedClient) -> None:
    while client.state != "ready":
        await asyncio.sleep(0.01)


def test_the_log_says_how_far_the_recording_of_graphs_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main(client: SupervisedClient) -> None:
        await until_ready(client)

    with caplog.at_level("INFO", "tsched.serving"):
        serve(tmp_path, main, name="recording")
    said = [line for line in caplog.messages if "graphs" in line]
    assert said == [f"CUDA graphs of steps: {done} of 4 recorded" for done in (0, 4)]


def test_a_worker_that_was_started_before_the_loop_is_the_one_that_serves(tmp_path: Path) -> None:
    client = SupervisedClient(tmp_path)
    client.start_early()
    assert client._started is not None
    early = client._started.process.pid

    async def main() -> None:
        await client.start()
        assert client.worker_pid == early
        os.kill(early, signal.SIGKILL)
        while client.state != "restarting":
            await asyncio.sleep(0.01)
        await until_ready(client)
        assert client.worker_pid not in (None, early)
        await client.close()

    asyncio.run(main())


def test_a_worker_that_was_started_in_vain_ends_with_its_link(tmp_path: Path) -> None:
    client = SupervisedClient(tmp_path)
    client.start_early()
    started = client._started
    assert started is not None
    started.socket.close()
    assert started.process.wait(20) == 0


def test_what_waits_in_a_stream_is_counted() -> None:
    stream = WorkerStream(lambda: None)
    assert stream.num_unread == 0
    for sample in (0, 1, 0):
        scores = [TokenScores([5, 6, 7], [-1.0, -2.0, -3.0])] * 2
        stream.put(Delta([SampleDelta(sample, [5, 5], "ab", scores if sample else None)], False))
    assert stream.num_unread == 2 + (2 + 2 * 3) + 2
    asyncio.run(anext_of(stream))
    assert stream.num_unread == 0


def test_a_stream_that_failed_is_over() -> None:
    async def main() -> None:
        stream = WorkerStream(lambda: None)
        stream.fail(EngineFailedError("the worker was killed"))
        with pytest.raises(EngineFailedError, match="the worker was killed"):
            await anext(stream)
        assert [delta async for delta in stream] == []

    asyncio.run(main())


async def anext_of(stream: WorkerStream) -> Delta:
    return await anext(stream)


async def expect_the_end_of_a_killed_stream(client: SupervisedClient) -> None:
    """A stream that has spoken ends with an error when its worker dies; `stops` measures how soon."""
    spoken = ask(client, "a", SPEAK_AND_WAIT)
    assert (await anext(spoken)).samples[0].text == "a"
    assert client.worker_pid is not None
    os.kill(client.worker_pid, signal.SIGKILL)
    with pytest.raises(EngineFailedError, match=r"killed by signal 9 \(SIGKILL\)"):
        await asyncio.wait_for(anext(spoken), 10)


def test_after_a_kill_streams_that_spoke_end_and_the_others_are_served_by_the_next_worker(tmp_path: Path) -> None:
    async def main(client: SupervisedClient) -> None:
        silent, before = ask(client, "b", SILENT_ONCE), client.stats()
        await expect_the_end_of_a_killed_stream(client)
        with pytest.raises(EngineUnavailableError) as unavailable:
            client.check_open()
        assert 1 <= unavailable.value.retry_after < 60
        assert client.state == "restarting"
        late = ask(client, "c", ANSWER)  # let in before, and tokenized meanwhile
        deltas = [delta async for delta in silent]
        assert [delta.samples[0].token_ids for delta in deltas] in ([[7], [8]], [[7, 8]])
        assert deltas[-1].samples[0].finish_reason == "stop"
        assert [delta.is_last async for delta in late][-1]
        assert client.stats().num_restarts == 1
        assert client.stats().num_output_tokens == before.num_output_tokens + 5, "sums go on over a restart"
        assert [delta.is_last async for delta in ask(client, "d", ANSWER)][-1]

    serve(tmp_path, main)


@pytest.mark.parametrize("by_signal", [False, True])
def test_a_worker_that_takes_no_step_with_unfinished_requests_is_killed(tmp_path: Path, by_signal: bool) -> None:
    async def main(client: SupervisedClient) -> None:
        spoken = ask(client, "a", SPEAK_AND_WAIT)
        await anext(spoken)
        pid = client.worker_pid
        assert pid is not None
        if by_signal:
            os.kill(pid, signal.SIGSTOP)
        else:
            ask(client, "b", HANG)
        with pytest.raises(EngineFailedError, match="took no step for .* with . unfinished requests"):
            await anext(spoken)
        await until_ready(client)
        assert client.worker_pid != pid

    serve(tmp_path, main, stall_timeout=0.3)


def test_a_worker_that_is_started_again_has_the_kernels_of_the_last_swap(tmp_path: Path) -> None:
    async def main(client: SupervisedClient) -> None:
        given_up = asyncio.ensure_future(client.swap_kernels({"swiglu": "torch"}))
        await asyncio.sleep(0)
        given_up.cancel()  # its client has left, and the kernels are swapped all the same
        swap = await client.swap_kernels({"paged_decode": "split_kv"})
        expected = {"swiglu": "torch", "paged_decode": "split_kv"}
        assert client.stats().arm == swap.arm == expected
        assert client.worker_pid is not None
        os.kill(client.worker_pid, signal.SIGKILL)
        while client.state == "ready":
            await asyncio.sleep(0.01)
        await until_ready(client)
        assert client.stats().arm == expected

    serve(tmp_path, main, kernels={"swiglu": "fused"})


def test_swapped_kernels_with_which_no_worker_starts_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "restart_delay", lambda deaths, now: 0.05)

    async def main(client: SupervisedClient) -> None:
        await client.swap_kernels({"swiglu": "crashing"})
        assert client.worker_pid is not None
        os.kill(client.worker_pid, signal.SIGKILL)
        while client.state == "ready":
            await asyncio.sleep(0.01)
        await until_ready(client)
        assert client.stats().arm == {"swiglu": "fused"}
        assert client.stats().num_restarts == 3
        assert [delta.is_last async for delta in ask(client, "a", ANSWER)][-1]

    serve(tmp_path, main, kernels={"swiglu": "fused"})


def test_an_idle_worker_is_not_taken_for_a_hung_one(tmp_path: Path) -> None:
    async def main(client: SupervisedClient) -> None:
        assert client.worker_pid is not None
        os.kill(client.worker_pid, signal.SIGSTOP)
        await asyncio.sleep(0.5)
        os.kill(client.worker_pid, signal.SIGCONT)
        assert [delta.is_last async for delta in ask(client, "a", ANSWER)][-1]
        assert client.stats().num_restarts == 0

    serve(tmp_path, main, stall_timeout=0.3)


def test_a_step_that_raises_fails_all_requests_of_its_worker_with_the_reason(tmp_path: Path) -> None:
    async def main(client: SupervisedClient) -> None:
        waiting = [ask(client, "a", SPEAK_AND_WAIT), ask(client, "b", SILENT_ONCE), ask(client, "c", RAISE)]
        await anext(waiting[0])
        for stream in waiting:
            with pytest.raises(EngineFailedError, match="^the engine failed: RuntimeError: planted$"):
                await anext(stream)
        await until_ready(client)
        assert [delta.is_last async for delta in ask(client, "d", ANSWER)][-1]

    serve(tmp_path, main)


def test_a_worker_that_breaks_the_link_is_killed(tmp_path: Path) -> None:
    async def main(client: SupervisedClient) -> None:
        spoken = ask(client, "a", SPEAK_AND_WAIT)
        await anext(spoken)
        ask(client, "b", LIE)
        with pytest.raises(EngineFailedError, match="its link broke: a message of 2147483648 bytes is announced"):
            await anext(spoken)

    serve(tmp_path, main)


def test_a_request_that_two_workers_died_with_goes_to_no_third(tmp_path: Path) -> None:
    async def main(client: SupervisedClient) -> None:
        stream = ask(client, "a", SILENT)
        for life in range(2):
            while client.stats().num_restarts < life:  # the last one's death is noticed
                await asyncio.sleep(0.01)
            await until_ready(client)
            assert client.worker_pid is not None
            os.kill(client.worker_pid, signal.SIGKILL)
        with pytest.raises(EngineFailedError, match="SIGKILL"):
            await anext(stream)

    serve(tmp_path, main)


def test_after_the_last_death_nothing_is_started_and_requests_say_so(tmp_path: Path) -> None:
    async def main(client: SupervisedClient) -> None:
        for _ in range(3):
            await until_ready(client)
            with pytest.raises(EngineFailedError, match="planted"):
                await anext(ask(client, "a", RAISE))
            while client.state == "ready":
                await asyncio.sleep(0.01)
        assert client.state == "failed"
        with pytest.raises(EngineFailedError, match="failed 3 times in 600 s, at last: .*planted"):
            ask(client, "b", ANSWER)
        with pytest.raises(EngineFailedError, match="failed 3 times"):
            await client.swap_kernels({"paged_decode": None})
        assert len(os.listdir(tmp_path)) == 3

    serve(tmp_path, main)


def test_a_later_worker_has_more_time_to_load_than_the_first_took() -> None:
    assert longest_load(30.0, 120.0) == 240.0


def test_delays_double_up_to_half_a_minute_and_old_deaths_are_forgotten() -> None:
    now = 10_000.0
    assert [restart_delay([now] * count, now) for count in range(1, 7)] == [1, 2, 4, 8, 16, None]
    assert restart_delay([*[now - 601] * 5, now], now) == 1
    assert restart_delay([*[now - 599] * 5, now], now) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [("broken", "^ConfigError: no such model$"), ("killed", r"is no more: it was killed by signal 9 \(SIGKILL\)")],
)
def test_what_goes_wrong_at_the_start_is_raised_there(tmp_path: Path, name: str, reason: str) -> None:
    async def main() -> None:
        client = SupervisedClient(tmp_path, name=name)
        for early in (client.stats, partial(ask, client, "a", ANSWER)):
            with pytest.raises(EngineUnavailableError, match="^the model is being loaded$"):
                early()
        with pytest.raises(EngineFailedError, match=reason):
            await client.start()
        assert client.state == "failed"
        await client.close()

    asyncio.run(main())


def test_a_restart_that_cannot_load_is_tried_again_until_given_up(tmp_path: Path) -> None:
    async def main(client: SupervisedClient) -> None:
        stream = ask(client, "a", SILENT)
        assert client.worker_pid is not None
        os.kill(client.worker_pid, signal.SIGKILL)
        with pytest.raises(EngineFailedError, match="failed 3 times .* ConfigError: no such model"):
            await anext(stream)

    serve(tmp_path, main, name="broken later")


def test_a_restart_that_hangs_while_it_loads_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "longest_load", lambda first, stall_timeout: 1.0)
    monkeypatch.setattr(supervisor, "restart_delay", lambda deaths, now: 0.05)

    async def main(client: SupervisedClient) -> None:
        assert client.worker_pid is not None
        os.kill(client.worker_pid, signal.SIGKILL)
        while client.state == "ready":
            await asyncio.sleep(0.01)
        await until_ready(client)
        assert client.stats().num_restarts >= 2
        assert [delta.is_last async for delta in ask(client, "a", ANSWER)][-1]

    serve(tmp_path, main, name="slow", stall_timeout=1.0)


def test_a_restart_without_a_process_left_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts = [OSError(24, "Too many open files"), None]

    def start_or_fail(real: Callable[[], Any] = supervisor.start_process) -> Any:
        error = starts.pop(0)
        if error is not None:
            raise error
        return real()

    async def main(client: SupervisedClient) -> None:
        monkeypatch.setattr(supervisor, "start_process", start_or_fail)
        waiting = ask(client, "a", SILENT_ONCE)
        assert client.worker_pid is not None
        os.kill(client.worker_pid, signal.SIGKILL)
        assert [delta.is_last async for delta in waiting][-1]
        assert client.stats().num_restarts == 2

    serve(tmp_path, main)
    assert "could not be started: [Errno 24] Too many open files" in caplog.text


def test_a_hung_worker_keeps_no_swap_waiting(tmp_path: Path) -> None:
    async def main(client: SupervisedClient) -> None:
        pid = client.worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineUnavailableError, match="took no step for .* s with kernels to swap"):
            await client.swap_kernels({"swiglu": "torch"})
        await until_ready(client)
        assert client.worker_pid != pid
        assert client.stats().arm == {}

    serve(tmp_path, main, stall_timeout=0.3)


def test_aborts_reach_requests_in_a_worker_and_between_two(tmp_path: Path) -> None:
    async def main(client: SupervisedClient) -> None:
        one, other, third = ask(client, "a", SILENT), ask(client, "b", SILENT), ask(client, "c", SILENT)
        client.abort("a")
        assert [delta.samples[0].finish_reason async for delta in one] == ["abort"]
        assert client.worker_pid is not None
        os.kill(client.worker_pid, signal.SIGKILL)
        while client.state == "ready":
            await asyncio.sleep(0.01)
        client.abort("b")
        assert [delta.samples[0].finish_reason async for delta in other] == ["abort"]
        waiting = asyncio.ensure_future(anext(third))
        await asyncio.sleep(0)
        waiting.cancel()  # a cancelled consumer aborts
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(client.close(), 5)

    serve(tmp_path, main)


def test_a_request_goes_to_a_worker_when_that_is_ready_and_once(tmp_path: Path) -> None:
    sent: list[link.Message] = []

    async def main() -> None:
        client = SupervisedClient(tmp_path)
        client._state, client._worker = "restarting", cast("WorkerProcess", SimpleNamespace(send=sent.append))
        ask(client, "a", ANSWER)
        assert sent == []
        client._receive({"kind": "ready", "facts": FACTS | {"name": "a"}, "stats": COUNTS})
        ask(client, "b", ANSWER)

    asyncio.run(main())
    assert [[one["request_id"] for one in message["requests"]] for message in sent] == [["a"], ["b"]]


def test_what_was_aborted_in_a_hung_worker_goes_to_no_other(tmp_path: Path) -> None:
    async def main(client: SupervisedClient) -> None:
        left, awaited = ask(client, "a", SILENT), ask(client, "b", SILENT)
        pid = client.worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await left.aclose()
        client.abort("b")
        os.kill(pid, signal.SIGKILL)
        while client.worker_pid is not None:
            await asyncio.sleep(0.01)
        assert client._served == {}
        assert [delta.samples[0].finish_reason async for delta in awaited] == ["abort"]
        await until_ready(client)
        assert [delta.is_last async for delta in ask(client, "a", ANSWER)][-1], "its name is free"

    serve(tmp_path, main)


def test_what_the_front_end_can_refuse_reaches_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_FRAME_BYTES", 10_000)
    with pytest.raises(TypeError):
        SupervisedClient(tmp_path, blocksize=3)

    async def main(client: SupervisedClient) -> None:
        with pytest.raises(RequestRefusedError, match="top_p"):
            client.submit(EngineRequest("a", [ANSWER], {"top_p": 7.0}))
        with pytest.raises(RequestRefusedError, match="at most"):
            client.submit(EngineRequest("a", [10**9] * 2_000, {}))
        with pytest.raises(RequestRefusedError, match="at most") as refused:
            await client.swap_kernels({"swiglu": "x" * 10_000})
        assert refused.value.param == "kernels"
        ask(client, "b", SILENT)
        with pytest.raises(ValueError, match="not finished"):
            ask(client, "b", SILENT)

    serve(tmp_path, main)


def test_a_message_arrives_as_it_was_sent_or_is_refused() -> None:
    async def read(frame: bytes) -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(frame)
        reader.feed_eof()
        return await link.read_message(reader)

    def send(message: dict[str, Any]) -> Any:
        return asyncio.run(read(link.encode_message(message)))

    texts = ["\ud83d", "half \udc00 of a pair", "a\0b", "\U0001f40d"]
    message = {"kind": "a", "texts": texts, "most": 2**64 - 1, "bias": {7: -1.5}, "none": [None, True, float("-inf")]}
    assert send(message) == message
    for end in (3, 9):  # within its length, and within its body
        with pytest.raises(link.LinkError, match="^the link ends in the middle of a message$"):
            asyncio.run(read(link.encode_message(message)[:end]))
    score = 0.1 + 2**-55
    assert send({"kind": "a", "values": (score, 1)}) == {"kind": "a", "values": [score, 1]}
    nested: list[Any] = []
    for _ in range(2000):
        nested = [nested]
    for wrong in (2**64, nested):
        with pytest.raises(link.LinkError, match="'a' message cannot be sent"):
            link.encode_message({"kind": "a", "wrong": wrong})
    with pytest.raises(TypeError, match="Path"):
        link.encode_message({"kind": "a", "wrong": Path()})
    for body in (b"", b"\xc1", b"\x81", b"\x01\x02", b"\x93\x01\x02\x03", b"\x81\xa4kind\x01"):
        with pytest.raises(link.LinkError):
            asyncio.run(read(len(body).to_bytes(4, "big") + body))


def test_joined_deltas_say_what_both_say() -> None:
    one = Delta([SampleDelta(0, [1], "a", None), SampleDelta(1, [2], "b", [])], False, num_cached_tokens=3)
    other = Delta([SampleDelta(1, [4], "c", [], "stop", "x")], True, error="e", at_fault="n")
    both = join_deltas(one, other)
    assert both == Delta(
        [SampleDelta(0, [1], "a", None), SampleDelta(1, [2, 4], "bc", [], "stop", "x")], True, "e", 3, at_fault="n"
    )
    assert delta_of(json.loads(json.dumps(both))) == both
