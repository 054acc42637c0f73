"""What news cost an online engine, a step, beside its scheduler in the same run.

python -m tests.tsched.report_cost [--streams 256] [--tokens 160] [--logprobs N] [--stop TEXT]

The trained model "tiny" serves `streams` requests at once, each with a consumer of its own on one event loop. Of the
steps in which all of them decode it prints, in the processor's time of the thread that spends it:

    scheduler   schedule and commit
    report      the engine's thread makes the news of the step: new tokens, their text, log-probabilities, ends
    consumers   the event loop: it hands the news to the streams, and each consumer takes its output
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from tmodel.presets import preset_path
from tsched import AsyncLLM, SamplingParams
from tsched.execution.engine_thread import EngineThread

_WARM_UP = 16  # steps


class Clocks:
    """The processor's time that has gone to each part, up to any step."""

    def __init__(self, loop_thread: int) -> None:
        self.spent = {"scheduler": 0.0, "report": 0.0}
        self.steps: list[dict[str, float]] = []  # after each report, what has been spent so far
        self._loop_clock = time.pthread_getcpuclockid(loop_thread)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*arguments, **named)
            finally:
                self.spent[part] += time.thread_time() - began

        return timed

    def note_step(self) -> None:
        self.steps.append({**self.spent, "consumers": time.clock_gettime(self._loop_clock)})


async def serve(clocks: Clocks, streams: int, params: SamplingParams) -> None:
    llm = AsyncLLM(preset_path("tiny"), device="cpu", max_num_seqs=streams, kv_cache_bytes=1 << 28)
    scheduler = llm._engine.scheduler
    for name in ("schedule", "commit"):
        setattr(scheduler, name, clocks.timed("scheduler", getattr(scheduler, name)))
    report = clocks.timed("report", EngineThread._report)

    def noted(thread: EngineThread) -> None:
        report(thread)
        if scheduler.num_running == streams:
            clocks.note_step()

    EngineThread._report = noted  # type: ignore[method-assign]

    async def consume(number: int) -> None:
        async for _ in llm.add_request(str(number), [3 + number % 500, 5, 7], params):
            pass

    gc.collect()  # as a server's worker does when it has loaded
    gc.freeze()
    async with llm:
        await asyncio.gather(*map(consume, range(streams)))


def measure(streams: int, params: SamplingParams) -> str:
    clocks = Clocks(threading.main_thread().ident or 0)
    asyncio.run(serve(clocks, streams, params))
    first, last = clocks.steps[_WARM_UP], clocks.steps[-1]
    num_steps = len(clocks.steps) - 1 - _WARM_UP
    each = {part: (last[part] - first[part]) / num_steps for part in first}
    lines = [f"{streams} streams, {num_steps} steps; microseconds of the processor a step, and as a share"]
    for part, seconds in {**each, "report + consumers": each["report"] + each["consumers"]}.items():
        lines.append(f"{part:20}{seconds * 1e6:8.0f}{seconds / each['scheduler']:8.1f} x the scheduler's")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--logprobs", type=int)
    parser.add_argument("--stop", help="a string that ends an output, which the outputs need not have")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    params = SamplingParams(
        temperature=0, max_tokens=asked.tokens, ignore_eos=True, logprobs=asked.logprobs, stop=asked.stop
    )
    print(measure(asked.streams, params))


if __name__ == "__main__":
    main()
