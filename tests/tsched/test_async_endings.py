"""However a request ends, nothing of it is left (bug classes 12 and 16)."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import threading
import time
import weakref
from pathlib import Path

import pytest

from tests.tsched.async_serving import LONG, check_empty, collect, hold_up, joined, make_async, run
from tests.tsched.test_llm import GREEDY, PROMPTS, crowded_bytes, make_llm
from tsched import LLM, SamplingParams
from tsched.execution import engine_thread


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return make_llm(checkpoint)


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
def test_who_stops_consuming_aborts(checkpoint: Path, how: str) -> None:  # noqa: C901  what `main` has
    async def main() -> None:  # noqa: C901  a way of leaving each
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


@pytest.mark.parametrize("how", ["closing", "a closed generator", "cancelling", "aborting", "dropping"])
def test_a_name_is_free_as_soon_as_its_request_was_ended(checkpoint: Path, how: str) -> None:
    """Nobody waits for the engine's thread to hear of it."""

    async def main() -> None:
        async with make_async(checkpoint) as served:
            for _ in range(5):
                if how == "a closed generator":
                    outputs = served.generate(PROMPTS[3], LONG, "a")
                    await anext(outputs)
                    await outputs.aclose()
                    continue
                stream = served.add_request("a", PROMPTS[3], LONG)
                if how == "closing":
                    await stream.aclose()
                elif how == "cancelling":
                    task = asyncio.create_task(collect(stream))
                    await asyncio.sleep(0)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                elif how == "aborting":
                    await served.abort(["a", "nobody"])
                del stream
            last = joined(await collect(served.add_request("a", PROMPTS[3], LONG)))
            assert len(last[0].token_ids) == 80, "an earlier request's end is not taken for its own"
            running = served.add_request("a", PROMPTS[3], LONG)
            with pytest.raises(ValueError, match="'a' is not finished yet"):
                served.add_request("a", PROMPTS[3], LONG)
            served.abort("a")
            assert joined(await collect(running))[0].finish_reason == "abort"
            await served.drain()
        check_empty(served)

    run(main)


def test_a_timeout_around_an_output_aborts(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with make_async(checkpoint) as served:
            gate = hold_up(served, monkeypatch)
            stream = served.add_request("a", PROMPTS[3], LONG)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.01)
            gate.release(1000)
            assert joined(await collect(stream))[0].finish_reason == "abort"

    run(main)


def test_who_waits_for_a_task_may_look_at_the_clock(
    checkpoint: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As RequestStream tells it."""
    (free,) = llm.generate([PROMPTS[3]], LONG)

    async def main() -> None:
        async with make_async(checkpoint, overlap=False) as served:
            gate, parts = hold_up(served, monkeypatch), []
            stream = served.add_request("a", PROMPTS[3], LONG)
            while not parts or not parts[-1].finished:
                following = asyncio.ensure_future(anext(stream))
                if len(parts) < 3:
                    assert not (await asyncio.wait({following}, timeout=0.01))[0]
                gate.release(1 if len(parts) < 3 else 200)
                while not (await asyncio.wait({following}, timeout=0.01))[0]:
                    pass
                parts.append(await following)
            assert joined(parts)[0].token_ids == free.outputs[0].token_ids
            while gate.acquire(blocking=False):
                pass
            given_up = served.add_request("b", PROMPTS[3], LONG)
            following = asyncio.ensure_future(anext(given_up))
            assert not (await asyncio.wait({following}, timeout=0.01))[0]
            following.cancel()
            with pytest.raises(asyncio.CancelledError):
                await following
            gate.release(200)
            assert joined(await collect(given_up))[0].finish_reason == "abort"
        check_empty(served)

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


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": False, "prefix_cache": "radix"},
        {"overlap": True, "prefix_cache": "hash", "preemption": "swap", "swap_bytes": 50_000},
    ],
    ids=["recompute", "overlap-swap"],
)
def test_a_thousand_random_aborts_leave_nothing(checkpoint: Path, llm: LLM, options: dict) -> None:  # noqa: C901  what `one` has
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

    async def main() -> None:  # noqa: C901  what `one` has
        async with make_async(checkpoint, **small, **options, max_num_seqs=16) as served:

            async def one(number: int) -> None:  # noqa: C901  a way of leaving each
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


@pytest.mark.parametrize("when", ["idle", "busy", "never asked"])
@pytest.mark.parametrize("what", ["the loop is closed", "the loop goes on"])
def test_what_nobody_closes_ends_by_itself(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, when: str, what: str
) -> None:
    monkeypatch.setattr(engine_thread, "_IDLE_S", 0.01)
    before = threading.active_count()

    async def forgets() -> weakref.ref:
        served = make_async(checkpoint)
        if when == "never asked":
            await served.__aenter__()
        else:
            stream = served.add_request("a", PROMPTS[3], LONG)
            if when == "idle":
                await collect(stream)
            else:
                await anext(stream)
        assert threading.active_count() == before + 1
        if what == "the loop is closed":
            kept.append(served)
        return weakref.ref(served._engine)

    async def goes_on() -> None:
        engine = await forgets()
        await wait_for_the_end()
        assert engine() is None, "with the thread goes the model"

    async def wait_for_the_end() -> None:
        deadline = time.monotonic() + 10
        while threading.active_count() > before and time.monotonic() < deadline:
            gc.collect()
            await asyncio.sleep(0.01)
        assert threading.active_count() == before
        await asyncio.sleep(0)  # the thread's last word is heard
        gc.collect()

    kept: list = []
    if what == "the loop goes on":
        asyncio.run(goes_on())
        return
    engine = asyncio.run(forgets())
    asyncio.run(wait_for_the_end())
    (served,) = kept
    assert not served._engine.has_unfinished
    assert not served.is_running
    kept.clear()
    del served
    gc.collect()
    assert engine() is None
