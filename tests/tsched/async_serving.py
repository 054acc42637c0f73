"""An AsyncLLM on a loop of its own, what its iterators give put together, and a look at what is left."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tsched.serving.tk_serve import count_files
from tests.tsched.test_llm import torch_kernels
from tsched import AsyncLLM, CompletionOutput, RequestOutput, SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)


def make_async(directory: Path, **changes: Any) -> AsyncLLM:
    arguments: dict = {"dtype": "float64", "device": "cpu", "max_num_seqs": 8, "kernels": torch_kernels(directory)}
    return AsyncLLM(directory, **arguments | changes)


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run `main` on a loop of its own, and look for what it left behind."""
    gc.collect()  # what earlier tests left in cycles would close its files within this one
    before, files = threading.active_count(), count_files(os.getpid())

    async def watched() -> None:
        await asyncio.wait_for(main(), 60)
        gc.collect()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(watched())
    assert threading.active_count() == before
    assert count_files(os.getpid()) == files


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


def hold_up(served: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """The engine steps once for each release."""
    engine, gate = served._engine, threading.Semaphore(0)
    step = engine.step

    def gated() -> list:
        gate.acquire()
        return step()

    monkeypatch.setattr(engine, "step", gated)
    return gate
