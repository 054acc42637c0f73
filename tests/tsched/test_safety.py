"""An engine that is used in a wrong way, hangs or dies says so, and others can see how it is."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.tsched.async_serving import LONG, collect, make_async, run
from tests.tsched.test_llm import GREEDY, PROMPTS, completion, make_llm
from tsched import BeamSearchParams, EngineError, SamplingParams


def test_a_second_thread_is_refused_and_the_first_goes_on(checkpoint: Path) -> None:
    llm = make_llm(checkpoint)
    expected = llm.generate(PROMPTS[3:6], GREEDY)
    entered, may_go_on, refused = threading.Event(), threading.Event(), []

    def wait(prompt: Any, output: Any, logits: Any) -> Any:
        entered.set()
        may_go_on.wait(30)
        return logits

    held = SamplingParams(temperature=0, max_tokens=3, logits_processors=[wait])
    first = threading.Thread(target=llm.generate, args=([PROMPTS[3]], held))
    first.start()
    assert entered.wait(30)
    for call in (
        lambda: llm.generate(PROMPTS[3], GREEDY),
        lambda: llm.beam_search(PROMPTS[3], BeamSearchParams(beam_width=2, max_tokens=2)),
        lambda: llm.swap_kernels({}),
    ):
        with pytest.raises(RuntimeError, match="in use, so it cannot .* for thread 'MainThread' now"):
            call()
        refused.append(call)
    may_go_on.set()
    first.join()
    assert len(refused) == 3
    assert list(map(completion, llm.generate(PROMPTS[3:6], GREEDY))) == list(map(completion, expected))
    assert llm.stats().num_used_blocks == 0


def test_a_request_cannot_use_the_engine_that_serves_it(checkpoint: Path) -> None:
    llm = make_llm(checkpoint)

    def call_again(prompt: Any, output: Any, logits: Any) -> Any:
        llm.generate(PROMPTS[3], GREEDY)

    (output,) = llm.generate(PROMPTS[3], SamplingParams(max_tokens=3, logits_processors=[call_again]))
    assert "this LLM is in use" in str(output.error)
    assert llm.generate(PROMPTS[3], GREEDY)[0].error is None


def test_a_step_that_hangs_ends_the_streams_after_the_timeout(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, is_stepping = threading.Event(), threading.Event()

    async def main() -> None:
        served = make_async(checkpoint)
        stream = served.add_request("a", PROMPTS[3], LONG)
        await anext(stream)
        step = served._engine.step

        def hang() -> list[Any]:
            is_stepping.set()
            may_go_on.wait(30)
            return step()

        monkeypatch.setattr(served._engine, "step", hang)
        while not is_stepping.is_set():
            await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError, match=r"the engine's step did not end in 0\.05 s"):
            await served.close(timeout=0.05)
        with pytest.raises(EngineError, match="did not end"):
            await collect(stream)
        assert served.num_unfinished == 0
        assert not served.is_running
        may_go_on.set()
        await served.close()
        assert served.stats().num_used_blocks == 0

    run(main)


def test_death_is_told_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        told: list[BaseException] = []
        async with make_async(checkpoint) as well:
            well.add_death_callback(told.append)
            await collect(well.add_request("a", PROMPTS[3], GREEDY))
        assert not told
        async with make_async(checkpoint) as served:
            served.add_death_callback(told.append)
            stream = served.add_request("a", PROMPTS[3], LONG)
            await anext(stream)

            def fail() -> None:
                raise MemoryError("the device is full")

            monkeypatch.setattr(served._engine, "step", fail)
            with pytest.raises(EngineError):
                await collect(stream)
            while not told:
                await asyncio.sleep(0.001)
            served.add_death_callback(told.append)  # it comes late
            await asyncio.sleep(0.01)
        assert [str(death) for death in told] == ["the device is full"] * 2
        assert told[0] is told[1]

    run(main)


def test_stats_are_whole_and_those_of_a_steps_end(checkpoint: Path) -> None:
    """From another thread, while the engine runs: every snapshot adds up."""
    seen, is_over = [], threading.Event()

    async def main() -> None:
        async with make_async(checkpoint, prefix_cache="hash", block_size=4) as served:

            def watch() -> None:
                while not is_over.is_set():
                    seen.append(served.stats())

            watcher = threading.Thread(target=watch)
            watcher.start()
            streams = [served.add_request(str(i), PROMPTS[3 + i % 3], LONG) for i in range(6)]
            await asyncio.gather(*map(collect, streams))
            running = served.add_request("b", PROMPTS[3], LONG)
            await anext(running)
            await running.aclose()
            while served.stats().num_running:
                await asyncio.sleep(0.001)
            is_over.set()
            watcher.join()
            assert served.stats().num_used_blocks == 0
            assert served.stats().num_finished == 7

    run(main)
    assert max(one.num_running for one in seen) == 6
    assert len({id(one) for one in seen}) > 10
    for one in seen:
        assert one.num_used_blocks >= one.num_running or one.num_running == 0
        assert 0 <= one.num_used_blocks <= one.num_blocks
    steps = [one.num_steps for one in seen]
    assert steps == sorted(steps)
