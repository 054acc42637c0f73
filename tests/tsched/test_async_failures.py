"""What cannot be served, what fails, and whom it concerns."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tsched.async_serving import LONG, check_empty, collect, joined, make_async, run
from tests.tsched.test_callback_faults import Raises
from tests.tsched.test_llm import GREEDY, PROMPTS
from tsched import EngineError, SamplingParams


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


def test_an_engine_error_reaches_every_iterator(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with make_async(checkpoint) as served:
            model, steps = served._engine._runner._model, iter(range(5))

            def failing(*inputs: Any) -> torch.Tensor:
                if next(steps, None) is None:
                    raise MemoryError("the device is full")
                return model(*inputs)

            monkeypatch.setattr(served._engine._runner, "_model", failing)
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


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration()])
@pytest.mark.parametrize("kind", ["logits_processors", "stopping_criteria"])
def test_whatever_a_callback_raises_ends_its_request_alone(checkpoint: Path, kind: str, error: BaseException) -> None:
    """KeyboardInterrupt too: the user's does not come to the engine's thread."""

    async def main() -> None:
        async with make_async(checkpoint) as served:
            good = served.add_request("good", PROMPTS[3], LONG)
            bad = served.add_request("bad", PROMPTS[4], dataclasses.replace(LONG, **{kind: [Raises(error)]}))
            parts = await collect(bad)
            assert f"raised {type(error).__name__}: " in parts[-1].error
            assert joined(parts)[0].finish_reason == "error"
            assert joined(await collect(good))[0].finish_reason == "length"
            assert served.is_running

    run(main)


def test_what_one_request_asks_for_ends_no_other(checkpoint: Path) -> None:
    """Bug class 18: the largest and smallest that each field takes."""
    extremes: list[dict[str, Any]] = [
        {"top_k": 2**31 - 1},
        {"min_tokens": 2**31 - 1, "max_tokens": None},
        {"max_tokens": 2**31 - 1, "min_tokens": 2**31 - 1, "stop_token_ids": range(1, 300)},
        {"temperature": 5e-324},
        {"temperature": 1e308, "min_p": 1.0},
        {"repetition_penalty": 2.0**-126, "presence_penalty": -2, "frequency_penalty": -2},
        {"repetition_penalty": 2.0**126, "presence_penalty": 2, "frequency_penalty": 2},
        {"top_p": 5e-324, "top_k": 1, "min_p": 1.0, "seed": 2**64 - 1},
        {"logprobs": 1000, "n": 128, "seed": 2**64 - 1, "max_tokens": 1},
        {"stop": ["x" * 1000] * 1000, "stop_token_ids": [2**31 - 1]},
    ]

    async def main() -> None:
        async with make_async(checkpoint) as served:
            good = served.add_request("good", PROMPTS[3], LONG)
            streams = [
                served.add_request(
                    str(i), PROMPTS[4], SamplingParams(**{"max_tokens": 6, **one}), priority=(-1) ** i * 2**31
                )
                for i, one in enumerate(extremes)
            ]
            errors = [(await collect(stream))[-1].error for stream in streams]
            assert [i for i, error in enumerate(errors) if error] == [2, 9]
            assert errors[2] == "min_tokens beside stop_token_ids leaves the output no token to begin with"
            assert "stop_token_ids holds 2147483647" in errors[9]
            assert joined(await collect(good))[0].finish_reason == "length"
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


def test_an_engine_that_fails_while_a_request_comes_says_why(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with make_async(checkpoint) as served:
            thread = served._open().thread

            def end(*_: object) -> None:
                thread.failure = MemoryError("the device is full")
                raise RuntimeError("the engine's thread has ended")

            monkeypatch.setattr(thread, "submit", end)
            with pytest.raises(EngineError, match="MemoryError: the device is full"):
                served.add_request("a", PROMPTS[0])
            thread.failure = None

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
