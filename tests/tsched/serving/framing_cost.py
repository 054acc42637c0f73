"""What a worker spends a step on its link, beside its scheduler in the same run.

python -m tests.tsched.serving.framing_cost [--streams 256] [--tokens 160] [--logprobs N]

The trained model "tiny" serves `streams` requests at once in a worker whose link ends in nothing. Of the steps in which
all of them decode it prints, in the processor's time of the thread that spends it:

    scheduler   schedule and commit
    report      the engine's thread makes the news of the step
    framing     it makes one message of them and writes it
"""

from __future__ import annotations

import argparse
import asyncio
import threading
from typing import Any, cast

import torch

from tests.tsched.report_cost import _WARM_UP, Clocks
from tmodel.presets import preset_path
from tsched.execution.engine_thread import EngineThread
from tsched.serving.engine_client import EngineRequest
from tsched.serving.worker import Worker, _Engine, _load_model


class Sink:
    """A writer that counts bytes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def write(self, frame: bytes) -> None:
        self.sizes.append(len(frame))


async def serve(clocks: Clocks, sink: Sink, streams: int, tokens: int, logprobs: int | None) -> None:
    options = {"device": "cpu", "max_num_seqs": streams, "kv_cache_bytes": 1 << 28}
    served, times = _load_model(str(preset_path("tiny")), options, [])
    scheduler = served._engine.scheduler
    for name in ("schedule", "commit"):
        setattr(scheduler, name, clocks.timed("scheduler", getattr(scheduler, name)))
    report = clocks.timed("report", EngineThread._report)

    def noted(thread: EngineThread) -> None:
        report(thread)
        if scheduler.num_running == streams:
            clocks.note_step()

    EngineThread._report = noted  # type: ignore[method-assign]
    worker = Worker(asyncio.StreamReader(), cast(Any, sink))
    tell = clocks.timed("framing", worker._tell)
    thread = served.start_thread(tell, lambda failure: None, label_logprobs=False)
    worker._engine = engine = _Engine(served, times, thread)
    sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "logprobs": logprobs}
    for number in range(streams):
        worker._submit(engine, [EngineRequest(str(number), [3 + number % 500, 5, 7], sampling)])
    while worker._tickets:
        await asyncio.sleep(0.05)
    thread.close()
    thread.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--logprobs", type=int)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    clocks, sink = Clocks(threading.main_thread().ident or 0), Sink()
    clocks.spent["framing"] = 0.0
    asyncio.run(serve(clocks, sink, asked.streams, asked.tokens, asked.logprobs))
    first, last = clocks.steps[_WARM_UP], clocks.steps[-1]
    num_steps = len(clocks.steps) - 1 - _WARM_UP
    each = {part: (last[part] - first[part]) / num_steps for part in ("scheduler", "report", "framing")}
    each["report"] -= each["framing"]  # which is done in it
    each["report + framing"] = each["report"] + each["framing"]
    print(f"{asked.streams} streams, {num_steps} steps; microseconds of the processor a step, and as a share")
    for part, seconds in each.items():
        print(f"{part:20}{seconds * 1e6:8.0f}{seconds / each['scheduler']:8.1f} x the scheduler's")
    print(f"{sorted(sink.sizes)[len(sink.sizes) // 2]} bytes in the median message, {len(sink.sizes)} messages")


if __name__ == "__main__":
    main()
