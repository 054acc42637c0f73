"""Online serving: what iterators give, to consumers of every kind."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.tsched.async_serving import LONG, check_empty, collect, hold_up, joined, make_async, run
from tests.tsched.test_llm import GREEDY, PROMPTS, make_llm
from tsched import LLM, RequestOutput, SamplingParams
from tsched.execution.engine_thread import EngineThread


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return make_llm(checkpoint)


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


def test_a_name_is_taken_until_its_request_is_over(checkpoint: Path) -> None:
    async def main() -> None:
        async with make_async(checkpoint) as served:
            first = served.add_request("a", PROMPTS[2], LONG)
            with pytest.raises(ValueError, match="'a' is not finished"):
                served.add_request("a", PROMPTS[2], LONG)
            await collect(first)
            await collect(served.add_request("a", PROMPTS[2], LONG))

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


def test_a_name_is_free_as_soon_as_its_last_output_is_there(checkpoint: Path) -> None:
    async def main() -> None:
        async with make_async(checkpoint) as served:
            for _ in range(5):
                stream = served.add_request("a", PROMPTS[2], GREEDY)
                while stream._ticket.num_going or not stream._ticket.requests:
                    time.sleep(0.001)  # the loop does not come to the end's news before the consumer asks
                assert (await anext(stream)).finished

            async def uses_a_name_again_and_again(name: str) -> None:
                for length in (1, 2, 3) * 10:
                    await collect(served.add_request(name, PROMPTS[2], dataclasses.replace(LONG, max_tokens=length)))

            await asyncio.gather(*(uses_a_name_again_and_again(f"user {i}") for i in range(8)))
        check_empty(served)

    run(main)


def test_no_output_is_empty(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with make_async(checkpoint, overlap=False) as served:
            gate = hold_up(served, monkeypatch)
            stream = served.add_request("a", PROMPTS[3], LONG)
            gate.release(2)
            while len(stream._news) < 2:  # both wait for the consumer
                await asyncio.sleep(0.001)
            assert len((await anext(stream)).outputs[0].token_ids) == 2
            following = asyncio.ensure_future(anext(stream))
            done, _ = await asyncio.wait({following}, timeout=0.05)
            assert not done
            gate.release()
            assert len((await following).outputs[0].token_ids) == 1
            gate.release(100)

    run(main)


def test_a_step_looks_at_those_that_run_and_not_at_those_that_wait(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    tell = EngineThread._tell
    monkeypatch.setattr(EngineThread, "_tell", lambda *args, **named: [looks.append(1), tell(*args, **named)][1])

    async def main() -> None:
        async with make_async(checkpoint, max_num_seqs=2) as served:
            params = dataclasses.replace(LONG, max_tokens=5)
            streams = [served.add_request(str(i), [1 + i], params) for i in range(60)]
            for stream in streams[10:30]:
                await stream.aclose()
            for stream in streams[:10] + streams[30:]:
                assert len(joined(await collect(stream))[0].token_ids) == 5
            assert len(looks) <= 2 * served.stats().num_steps + 60
        check_empty(served)

    run(main)
