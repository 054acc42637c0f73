"""A server under load for minutes, with clients that leave, requests that are refused and a worker that is killed.

python -m tests.tsched.serving.soak FOLDER [--minutes 30] [--at-once 100] [--model tiny]

Of the requests 5% are bad and a fifth of the others' clients leave amid their streams. Halfway the worker is killed.
Then nothing may be left: no request runs, no page is held, descriptors and memory are as before, and all requests that
were received were refused or ended for a reason. FOLDER keeps the server's log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from tests.tsched.serving.same_answers import draw_prompts
from tests.tsched.serving.tk_serve import Served, serving

BAD = (
    {"model": "another"},
    {"model": "served", "prompt": "x", "surprise": 1},
    {"model": "served", "prompt": "x", "temperature": -1},
    {"model": "served", "prompt": ""},
)
MOST_GROWTH = 1.0
"""MB a minute, of the front end, by the median slope between samples after the first fifth of the time."""

_SAMPLE_EVERY = 2.0


@dataclass
class Seen:
    """What the clients met. memory: (minutes, MB of the front end) while it ran."""

    ended: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, float]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    killed_at: float | None = None
    served_again_after: float | None = None


def resident_mb(pid: int) -> float:
    """Memory that a process holds."""
    (kilobytes,) = re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(kilobytes) / 1024


def count_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def find_worker(pid: int) -> int:
    """The process of the front end `pid` that has loaded torch."""
    children = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    for task in Path(f"/proc/{pid}/task").iterdir():  # a thread may have started it
        children += [int(one) for one in (task / "children").read_text().split()]
    return max(set(children), key=resident_mb)


async def ask(client: httpx2.AsyncClient, drawn: random.Random, prompts: list[str], seen: Seen) -> None:
    """One request of whatever kind is drawn."""
    if drawn.random() < 0.05:
        answer = await client.post("/v1/completions", json=drawn.choice(BAD))
        seen.ended[f"refused with {answer.status_code}"] += 1
        return
    leaves = drawn.random() < 0.2
    body = {
        "model": "served", "prompt": drawn.choice(prompts), "max_tokens": drawn.randint(2, 48), "stream": True,
        "temperature": drawn.choice([0.0, 1.0]), "seed": drawn.randint(0, 99), "n": drawn.choice([1, 1, 2]),
    }  # fmt: skip
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            await answer.aread()
            seen.ended[f"answered {answer.status_code}"] += 1
            return
        left, last, end = drawn.randint(1, 8), None, "cut off"
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                end = "whole"
            elif "error" in json.loads(line.removeprefix("data: ")):
                end = "ended with an error event"
            now = time.perf_counter()
            if last is not None:
                seen.gaps.append(now - last)
            last, left = now, left - 1
            if leaves and left == 0 and end == "cut off":
                seen.ended["left"] += 1
                return
        seen.ended[end] += 1
        if seen.killed_at is not None and seen.served_again_after is None and end == "whole":
            seen.served_again_after = time.perf_counter() - seen.killed_at


async def load(served: Served, minutes: float, at_once: int, seen: Seen) -> None:
    """`at_once` clients, each with one request after the other, until the time is over."""
    prompts, start = draw_prompts(200), time.perf_counter()
    deadline = start + 60 * minutes

    async def live(number: int) -> None:
        drawn = random.Random(number)
        while time.perf_counter() < deadline:
            try:
                await ask(client, drawn, prompts, seen)
            except httpx2.HTTPError as error:
                seen.ended[type(error).__name__] += 1

    async def watch() -> None:
        while (now := time.perf_counter()) < deadline:
            seen.memory.append(((now - start) / 60, resident_mb(served.pid)))
            if seen.killed_at is None and now > start + 30 * minutes:
                os.kill(find_worker(served.pid), signal.SIGKILL)
                seen.killed_at = time.perf_counter()
            await asyncio.sleep(_SAMPLE_EVERY)

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(base_url=served.base, timeout=120.0, limits=limits) as client:
        await asyncio.gather(watch(), *map(live, range(at_once)))


def growth_per_minute(memory: list[tuple[float, float]]) -> float:
    """MB a minute: the median of the slopes between any two samples (Theil and Sen), after the first fifth."""
    later = [one for one in memory if one[0] > memory[-1][0] / 5][:: max(1, len(memory) // 200)]
    slopes = [(b - a) / (y - x) for place, (x, a) in enumerate(later) for y, b in later[place + 1 :]]
    return statistics.median(slopes)


def read_gauges(served: Served) -> dict[str, float]:
    with urllib.request.urlopen(f"{served.base}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(
        r"^(vllm:num_requests_running|vllm:num_requests_waiting|vllm:kv_cache_usage_perc).* (\S+)$", text, re.M
    )
    return {name: float(value) for name, value in found}


def find_faults(served: Served, before: int, seen: Seen) -> list[str]:
    """What is wrong once all clients have gone; prints the figures."""
    deadline = time.monotonic() + 20
    while any(read_gauges(served).values()) and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1.0)  # connections that are closed on one side
    gauges, counted = read_gauges(served), served.count()
    received = counted["tkernels_requests_received_total"]
    refused = counted["tkernels_requests_refused_total"]
    finished = counted["vllm:request_success_total"]
    growth, after = growth_per_minute(seen.memory), count_descriptors(served.pid)
    half, most = (1e3 * sorted(seen.gaps)[len(seen.gaps) * share // 100] for share in (50, 99))
    print(f"clients saw: {dict(seen.ended)}")
    print(f"the server received {received:,}, refused {refused:,}, ended {finished:,}; left over: {gauges}")
    print(f"memory of the front end: {seen.memory[0][1]:.0f} to {seen.memory[-1][1]:.0f} MB, {growth:+.2f} MB a minute")
    print(f"descriptors: {before} before, {after} after; worker restarts: {counted['tkernels_worker_restarts_total']}")
    print(f"gaps between events: p50 {half:.1f} ms, p99 {most:.1f} ms")
    print(f"after the kill the first whole answer came in {seen.served_again_after or float('nan'):.1f} s")
    tests = {
        "requests or pages are left over": any(gauges.values()),
        "received is not refused + ended": received != refused + finished,
        "descriptors are left over": after > before + 2,
        f"memory grows by {growth:.2f} MB a minute": growth > MOST_GROWTH,
        "the worker was not replaced once": counted["tkernels_worker_restarts_total"] != 1,
        "streams were cut off without an error event": seen.ended["cut off"] > 0,
        "nothing was served after the kill": seen.served_again_after is None,
    }
    return [fault for fault, holds in tests.items() if holds]


def soak(model: str, folder: Path, minutes: float, at_once: int) -> list[str]:
    """What is wrong after so many minutes of load."""
    folder.mkdir(parents=True, exist_ok=True)
    seen = Seen()
    with serving(model, folder) as served:
        before = count_descriptors(served.pid)
        asyncio.run(load(served, minutes, at_once, seen))
        return find_faults(served, before, seen)


def main() -> int:
    """1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--at-once", type=int, default=100)
    parser.add_argument("--model", default="tiny")
    asked = parser.parse_args()
    faults = soak(asked.model, asked.folder, asked.minutes, asked.at_once)
    for fault in faults:
        print(f"FAULT: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
