"""What HTTP costs: the same 64 streams over it and by `LLM.generate`, in turns in one run, each with one torch thread.

python -m tests.tsched.serving.cost_over_http FOLDER [--model tiny] [--rounds 5] [--streams 64] [--tokens 128]

The client is raw sockets in this process, which has its share of the machine. Asked: over HTTP at least 0.6 of the
tokens a second, and at most 1.05 of the CPU time a step of the engine's process. FOLDER keeps the server's log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.tsched.serving.same_answers import draw_prompts
from tests.tsched.serving.tk_serve import Served, serving
from tsched import LLM, SamplingParams

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Round:
    """tokens: of all streams; cpu_s: of the process with the engine; steps: of the engine."""

    tokens: int
    seconds: float
    cpu_s: float
    steps: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_ms_a_step(self) -> float:
        return 1e3 * self.cpu_s / self.steps


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has taken, all its threads, to a hundredth of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def follow(host: str, port: int, body: bytes) -> None:
    """Sends one request and reads its stream to the end."""
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    tail = b""
    while part := await reader.read(65536):
        tail = (tail + part)[-200:]
    writer.close()
    if b"[DONE]" not in tail:
        raise SystemExit(f"a stream did not end well: {tail!r}")


async def follow_all(served: Served, bodies: list[bytes]) -> None:
    host, _, port = served.base.removeprefix("http://").partition(":")
    await asyncio.gather(*(follow(host, int(port), body) for body in bodies))


def run_over_http(served: Served, bodies: list[bytes], tokens: int, worker: int) -> Round:
    before, steps, start = cpu_seconds(worker), served.count()["tkernels_engine_steps_total"], time.perf_counter()
    asyncio.run(follow_all(served, bodies))
    seconds = time.perf_counter() - start
    return Round(tokens, seconds, cpu_seconds(worker) - before, served.count()["tkernels_engine_steps_total"] - steps)


def run_offline(llm: LLM, prompts: list[str], params: SamplingParams, tokens: int) -> Round:
    before, steps, start = cpu_seconds(os.getpid()), llm.stats().num_steps, time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return Round(tokens, seconds, cpu_seconds(os.getpid()) - before, llm.stats().num_steps - steps)


def main() -> int:
    """1 where HTTP costs more than is asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # the server's too
    prompts = draw_prompts(asked.streams)
    told = {"temperature": 0.0, "max_tokens": asked.tokens, "ignore_eos": True}
    bodies = [json.dumps({"model": "served", "prompt": one, "stream": True, **told}).encode() for one in prompts]
    num_tokens = asked.streams * asked.tokens
    over_http, offline = [], []
    with serving(asked.model, asked.folder) as served:
        llm, worker = LLM(served.directory), served.find_worker()
        for number in range(asked.rounds + 1):
            one = run_over_http(served, bodies, num_tokens, worker)
            other = run_offline(llm, prompts, SamplingParams(**told), num_tokens)
            if number:  # the first warms up
                over_http.append(one)
                offline.append(other)
                print(
                    f"round {number}: {one.tokens_per_s:,.0f} tokens/s over HTTP, {other.tokens_per_s:,.0f} offline; "
                    f"CPU a step {one.cpu_ms_a_step:.2f} and {other.cpu_ms_a_step:.2f} ms "
                    f"({one.steps} and {other.steps} steps)"
                )
    pairs = list(zip(over_http, offline, strict=True))
    speed = statistics.median(one.tokens_per_s / other.tokens_per_s for one, other in pairs)
    cost = statistics.median(one.cpu_ms_a_step / other.cpu_ms_a_step for one, other in pairs)
    print(f"over HTTP {speed:.2f} of LLM.generate's tokens a second (0.6 asked), {cost:.2f} of its CPU a step (1.05)")
    return 0 if speed >= 0.6 and cost <= 1.05 else 1


if __name__ == "__main__":
    sys.exit(main())
