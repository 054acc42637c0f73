"""Online serving: what iterators give, and that however a request ends, nothing is left (bug classes 12 and 16)."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tsched.test_llm import GREEDY, PROMPTS, crowded_bytes, make_llm, torch_kernels
from tsched import LLM, AsyncLLM, CompletionOutput, EngineError, RequestOutput, SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)


def make_async(directory: Path, **changes: Any) -> AsyncLLM:
    arguments: dict = {"dtype": "float64", "device": "cpu", "max_num_seqs": 8, "kernels": torch_kernels(directory)}
    return AsyncLLM(directory, **arguments | changes)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return make_llm(checkpoint)


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run `main` on a loop of its own, and look for what it left behind."""
    before, files = threading.active_count(), len(os.listdir("/proc/self/fd"))

    async def watched() -> None:
        await asyncio.wait_for(main(), 60)
        gc.collect()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(watched())
    assert threading.active_count() == before
    assert len(os.listdir("/proc/self/fd")) == files


def check_empty(served: AsyncLLM) -> None:
    pool, host_pool = served._engine.scheduler.pool, served._engine.scheduler.host_pool
    assert host_pool is None or host_pool.num_free == host_pool.num_blocks
    assert served.num_unfinished == 0
    assert not served._engine.has_unfinished
    assert pool.num_free + pool.num_cached == pool.num_blocks
    assert not served._session.streams


async def collect(outputs: AsyncIterator[RequestOutput], pause: float = 0.0) -> list[RequestOutput]:
    found = []
    async for output in outputs:
        found.append(output)
        if pause:
            await asyncio.sleep(pause)
    return found


def joined(parts: list[RequestOutput]) -> list[CompletionOutput]:
    """The completions that the parts add up to."""
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    found: dict[int, CompletionOutput] = {}
    for part in parts:
        for new in part.outputs:
            old = found.get(new.index, CompletionOutput(new.index, [], "", None, None if new.logprobs is None else []))
            assert old.finish_reason is None
            assert new.token_ids or new.finish_reason is not None
            found[new.index] = dataclasses.replace(
                new,
                token_ids=old.token_ids + new.token_ids,
                text=old.text + new.text,
                logprobs=None if new.logprobs is None else old.logprobs + new.logprobs,
            )
    return [found[index] for index in sorted(found)]


def test_deltas_add_up_to_what_generate_gives(checkpoint: Path, llm: LLM) -> None:
    (free,) = llm.generate([PROMPTS[3]], LONG)
    asked: list[tuple[Any, SamplingParams]] = [
        (PROMPTS[3], LONG),
        ("def scan(line): # ünïcode 🐍", dataclasses.replace(LONG, logprobs=2)),
        (PROMPTS[3], dataclasses.replace(LONG, stop=[free.outputs[0].text[9:14], "zz"])),
        (PROMPTS[3], dataclasses.replace(LONG, stop=free.outputs[0].text[9:14], min_tokens=40)),
        (PROMPTS[5], SamplingParams(n=3, seed=3, temperature=1.2, max_tokens=30, logprobs=0)),
        (PROMPTS[6], SamplingParams(seed=4, max_tokens=25, top_p=0.9)),
        (PROMPTS[7], dataclasses.replace(GREEDY, max_tokens=1)),
    ]

    async def main() -> None:
        async with make_async(checkpoint) as served:
            streams = [served.add_request(str(i), prompt, params) for i, (prompt, params) in enumerate(asked)]
            assert served.num_unfinished == len(asked)
            pauses = [0.0, 0.02, 0.0, 0.0, 0.005, 0.05, 0.0]
            everything = await asyncio.gather(*map(collect, streams, pauses))
            assert max(map(len, everything)) > 20
            for i, ((prompt, params), parts) in enumerate(zip(asked, everything, strict=True)):
                (whole,) = llm.generate(prompt, params)
                assert {part.request_id for part in parts} == {str(i)}
                assert all(part.prompt == whole.prompt for part in parts)
                assert all(part.prompt_token_ids == whole.prompt_token_ids for part in parts)
                streamed = joined(parts)
                assert [(c.token_ids, c.finish_reason) for c in streamed] == [
                    (c.token_ids, c.finish_reason) for c in whole.outputs
                ]
                for one, other in zip(streamed, whole.outputs, strict=True):
                    if "\ufffd" not in other.text:
                        assert one.text == other.text
                    if params.logprobs is not None:
                        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-9)
                        assert [list(place) for place in one.logprobs] == [list(place) for place in other.logprobs]
                metrics = parts[-1].metrics
                assert 0 < metrics.time_to_first_token <= metrics.latency
            assert served.is_running
        assert not served.is_running
        check_empty(served)

    run(main)


def test_text_before_a_stop_string_is_never_taken_back(checkpoint: Path, llm: LLM) -> None:
    (free,) = llm.generate([PROMPTS[4]], LONG)
    text = free.outputs[0].text
    stop = text[20:26]
    expected = text[: text.index(stop)]

    async def main() -> None:
        async with make_async(checkpoint) as served:
            params = dataclasses.replace(LONG, stop=[stop, stop[0] + "never" * 9])
            parts = await collect(served.add_request("a", PROMPTS[4], params))
            assert joined(parts)[0].text == expected
            assert joined(parts)[0].finish_reason == "stop"

    run(main)


def test_requests_that_cannot_be_served_say_why(checkpoint: Path, checkpoint_without_tokenizer: Path) -> None:
    async def main() -> None:
        async with make_async(checkpoint) as served:
            bad: list[tuple[Any, SamplingParams, str]] = [
                ([], GREEDY, "empty"),
                ([5, 300], GREEDY, "out of vocabulary"),
                ([1] * 128, GREEDY, "max_model_len is 128"),
                (None, GREEDY, "NoneType"),
                ([1], SamplingParams(stop_token_ids=[300], n=2), "stop_token_ids holds 300"),
            ]
            good = served.add_request("good", PROMPTS[2], GREEDY)
            for i, (prompt, params, message) in enumerate(bad):
                (output,) = await collect(served.add_request(str(i), prompt, params))
                assert message in output.error
                assert [c.finish_reason for c in output.outputs] == ["error"] * params.n
            assert (await collect(good))[-1].error is None
            for arguments, error in (
                ((5, [1]), TypeError),
                (("a", [1], {"n": 1}), TypeError),
            ):
                with pytest.raises(error):
                    served.add_request(*arguments)
            with pytest.raises(TypeError, match="cache_salt"):
                served.add_request("a", [1], cache_salt=5)
        check_empty(served)
        async with make_async(checkpoint_without_tokenizer) as bare:
            (output,) = await collect(bare.add_request("a", "text"))
            assert "has no tokenizer" in output.error
            assert "".join(p.outputs[0].text for p in await collect(bare.add_request("b", [5, 6]))) == ""

    run(main)


def test_a_name_is_taken_until_its_request_is_over(checkpoint: Path) -> None:
    async def main() -> None:
        async with make_async(checkpoint) as served:
            first = served.add_request("a", PROMPTS[2], LONG)
            with pytest.raises(ValueError, match="'a' is not finished"):
                served.add_request("a", PROMPTS[2], LONG)
            await collect(first)
            await collect(served.add_request("a", PROMPTS[2], LONG))

    run(main)


def test_abort_ends_an_iterator_with_what_it_had(checkpoint: Path, llm: LLM) -> None:
    (free,) = llm.generate([PROMPTS[3]], LONG)

    async def main() -> None:
        async with make_async(checkpoint) as served:
            stream = served.add_request("a", PROMPTS[3], LONG)
            waiting = served.add_request("b", PROMPTS[4], dataclasses.replace(LONG, temperature=1.0, n=2))
            parts = [await anext(stream)]
            served.abort("a")
            served.abort("b")
            served.abort("unknown")
            parts += await collect(stream)
            served.abort("a")
            (completion,) = joined(parts)
            assert completion.finish_reason == "abort"
            assert completion.token_ids == free.outputs[0].token_ids[: len(completion.token_ids)]
            assert len(completion.token_ids) < 80
            assert [c.finish_reason for c in joined(await collect(waiting))] == ["abort"] * 2
            check_empty(served)

    run(main)


@pytest.mark.parametrize(
    "how", ["awaiting the output", "awaiting something else", "timing out", "closing", "dropping", "breaking"]
)
def test_who_stops_consuming_aborts(checkpoint: Path, how: str) -> None:
    async def main() -> None:
        async with make_async(checkpoint) as served:
            begun = asyncio.Event()
            held = []  # elsewhere, so that it is not the stream's end that ends the request

            async def consume() -> None:
                stream = served.add_request("a", PROMPTS[3], LONG)
                if how == "dropping":
                    begun.set()
                    return
                if how != "breaking":
                    held.append(stream)
                if how == "timing out":
                    begun.set()
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0):
                            await anext(stream)
                    assert joined(await collect(stream))[0].finish_reason == "abort"
                async for _ in stream:
                    begun.set()
                    if how == "awaiting something else":
                        await asyncio.Event().wait()
                    if how == "closing":
                        await stream.aclose()
                        assert [output async for output in stream] == []
                    if how == "breaking":
                        break

            task = asyncio.create_task(consume())
            await begun.wait()
            if how.startswith("awaiting"):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                await task
            while served.num_unfinished:
                await asyncio.sleep(0.001)
            check_empty(served)
            counters = served._engine.scheduler.counters
            assert counters.num_output_tokens < 80

    run(main)


def test_a_stream_may_be_passed_on(checkpoint: Path, llm: LLM) -> None:
    (free,) = llm.generate([PROMPTS[3]], LONG)

    async def main() -> None:
        async with make_async(checkpoint) as served:
            stream = served.add_request("a", PROMPTS[3], LONG)
            first = await asyncio.create_task(stream.__anext__())
            rest = await asyncio.create_task(collect(stream))
            assert joined([first, *rest])[0].token_ids == free.outputs[0].token_ids
            second = served.add_request("b", PROMPTS[3], LONG)
            waiting = asyncio.create_task(stream_next(second))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="two tasks"):
                await anext(second)
            await waiting

    async def stream_next(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
        return await anext(stream)

    run(main)


def test_a_slow_consumer_holds_nobody_up_and_loses_nothing(checkpoint: Path, llm: LLM) -> None:
    (free,) = llm.generate([PROMPTS[3]], LONG)

    async def main() -> None:
        async with make_async(checkpoint) as served:
            slow = served.add_request("slow", PROMPTS[3], LONG)
            time.sleep(0.05)  # the loop itself is blocked; the engine is not
            fast = await collect(served.add_request("fast", PROMPTS[3], LONG))
            while served.num_unfinished:
                await asyncio.sleep(0.001)
            check_empty(served)
            parts = await collect(slow)
            assert len(parts) == 1
            assert joined(parts)[0].token_ids == joined(fast)[0].token_ids == free.outputs[0].token_ids

    run(main)


def test_drain_lets_all_finish_and_takes_no_more(checkpoint: Path) -> None:
    async def main() -> None:
        served = make_async(checkpoint)
        streams = [served.add_request(str(i), prompt, LONG) for i, prompt in enumerate(PROMPTS)]
        draining = asyncio.create_task(served.drain())
        await asyncio.sleep(0)
        assert not served.is_running
        with pytest.raises(RuntimeError, match="no more requests"):
            served.add_request("late", PROMPTS[0], LONG)
        await draining
        check_empty(served)
        for stream in streams:
            (completion,) = joined(await collect(stream))
            assert completion.finish_reason == "length"
        await served.drain()
        await served.close()

    run(main)


def test_leaving_aborts_what_runs(checkpoint: Path) -> None:
    async def main() -> None:
        async with make_async(checkpoint) as served:
            streams = [served.add_request(str(i), prompt, LONG) for i, prompt in enumerate(PROMPTS)]
            await anext(streams[0])
        check_empty(served)
        for stream in streams[1:]:
            assert joined(await collect(stream))[0].finish_reason == "abort"
        untouched = make_async(checkpoint)
        await untouched.close()
        await untouched.drain()
        with pytest.raises(RuntimeError, match="drained or closed"):
            untouched.add_request("a", PROMPTS[0])

    run(main)


def test_an_engine_error_reaches_every_iterator(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with make_async(checkpoint) as served:
            model, steps = served._engine._model, iter(range(5))

            def failing(*inputs: Any) -> torch.Tensor:
                if next(steps, None) is None:
                    raise MemoryError("the device is full")
                return model(*inputs)

            monkeypatch.setattr(served._engine, "_model", failing)
            streams = [served.add_request(str(i), prompt, LONG) for i, prompt in enumerate(PROMPTS)]
            results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
            for result in results:
                assert isinstance(result, EngineError)
                assert str(result) == "the engine failed and serves no more: MemoryError: the device is full"
                assert isinstance(result.__cause__, MemoryError)
            assert len(set(map(id, results))) == len(PROMPTS)
            assert not served.is_running
            assert served.num_unfinished == 0
            with pytest.raises(EngineError, match="the device is full"):
                served.add_request("late", PROMPTS[0])
            with pytest.raises(EngineError, match="the device is full"):
                await served.drain()
            check_empty(served)

    run(main)


def test_a_request_that_comes_while_the_engine_fails_is_told_too(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with make_async(checkpoint) as served:
            is_stepping, may_fail = threading.Event(), threading.Event()

            def failing() -> list:
                is_stepping.set()
                may_fail.wait()
                raise ValueError("a kernel refused")

            monkeypatch.setattr(served._engine, "step", failing)
            first = served.add_request("first", PROMPTS[0], LONG)
            while not is_stepping.is_set():
                await asyncio.sleep(0.001)
            second = served.add_request("second", PROMPTS[1], LONG)
            served.abort("second")
            may_fail.set()
            for stream in (first, second):
                with pytest.raises(EngineError, match="ValueError: a kernel refused"):
                    await asyncio.wait_for(anext(stream), 10)
                assert [output async for output in stream] == []
            assert served.num_unfinished == 0

    run(main)


def test_one_loop_and_no_other(checkpoint: Path) -> None:
    served = make_async(checkpoint)
    with pytest.raises(RuntimeError, match="no running event loop"):
        served.add_request("a", PROMPTS[0])

    async def forgets_to_close() -> None:
        served.add_request("a", PROMPTS[0], LONG)

    async def comes_later() -> None:
        with pytest.raises(RuntimeError, match="another than its first"):
            served.add_request("b", PROMPTS[0])

    asyncio.run(forgets_to_close())
    asyncio.run(comes_later())
    served._session.thread.close()
    served._session.thread.join()
    assert not served._engine.has_unfinished


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": False, "prefix_cache": "radix"},
        {"overlap": True, "prefix_cache": "hash", "preemption": "swap", "swap_bytes": 50_000},
    ],
    ids=["recompute", "overlap-swap"],
)
def test_a_thousand_random_aborts_leave_nothing(checkpoint: Path, llm: LLM, options: dict) -> None:
    """Bug classes 12 and 16: aborts, cancellations, closings and drops at random moments, under pool pressure."""
    rng = random.Random(0)
    small = {"block_size": 4, "kv_cache_bytes": crowded_bytes(checkpoint, 32), "max_num_batched_tokens": 24}
    params = [
        SamplingParams(seed=1, max_tokens=12, ignore_eos=True),
        SamplingParams(seed=2, n=3, max_tokens=6),
        dataclasses.replace(GREEDY, stop=["zz"], max_tokens=9),
        SamplingParams(seed=5, max_tokens=30, logprobs=1),
    ]
    prompts = PROMPTS[:4]
    expected = {
        (i, j): [c.token_ids for c in output.outputs]
        for j, one in enumerate(params)
        for i, output in enumerate(llm.generate(prompts, one))
    }
    ends = dict.fromkeys(("finished", "abort", "cancel", "close", "drop"), 0)

    async def main() -> None:
        async with make_async(checkpoint, **small, **options, max_num_seqs=16) as served:

            async def one(number: int) -> None:
                i, j = rng.randrange(len(prompts)), rng.randrange(len(params))
                how = rng.choice(["abort", "cancel", "close", "drop", "finished"])
                stream = served.add_request(str(number), prompts[i], params[j])
                consumer = asyncio.create_task(collect(stream))
                for _ in range(rng.randrange(12)):
                    await asyncio.sleep(0)
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() * 0.02)
                if how == "abort":
                    served.abort(str(number))
                elif how == "cancel":
                    consumer.cancel()
                elif how == "close":
                    await stream.aclose()
                elif how == "drop":
                    consumer.cancel()
                    del stream
                try:
                    parts = await asyncio.wait_for(consumer, 30) if how != "close" else None
                except asyncio.CancelledError:
                    ends[how] += 1
                    return
                if parts is None:
                    consumer.cancel()
                    ends[how] += 1
                    return
                completions = joined(parts)
                for completion, tokens in zip(completions, expected[(i, j)], strict=True):
                    if completion.finish_reason == "abort":
                        assert completion.token_ids == tokens[: len(completion.token_ids)]
                    else:
                        assert completion.token_ids == tokens
                ends["abort" if completions[-1].finish_reason == "abort" else "finished"] += 1

            for start in range(0, 750, 50):
                await asyncio.gather(*(one(number) for number in range(start, start + 50)))
            while served.num_unfinished:
                await asyncio.sleep(0.001)
            check_empty(served)

    run(main)
    assert sum(ends.values()) - ends["finished"] >= 500  # a thousand in the two runs
    assert min(ends.values()) > 25
