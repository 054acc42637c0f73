"""Clients that leave a running server, one at a time, at five places: how soon is what they held free, what is left?

python -m tests.tsched.serving.cancels FOLDER [--model tiny] [--cancels 1000]

Amid the body, queued behind a full batch, amid a prompt's chunks, while tokens come, and before the last of them; as a
stream and whole, for text, token ids, four completions, a list of prompts. Printed: seconds from the client's end of
the connection to a /load that has nothing of it, and an engine's step beside it (asked: a step and 0.05 s for 99 of
100). Afterwards nothing may be left: sequences, blocks, tickets, open files, threads. FOLDER keeps the server's log.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.tsched.serving.raw_http import ask, encode_request, read_answer
from tests.tsched.serving.soak import find_grown, find_sizes
from tests.tsched.serving.tk_serve import Served, serving

PLACES = ("amid its body", "queued", "amid its chunks", "decoding", "before [DONE]")
ROWS, CHUNK, MANY_TOKENS = 4, 32, 400
OPTIONS = ("--max-num-seqs", str(ROWS), "--max-num-batched-tokens", str(CHUNK), "--prefix-cache", "none")
_PATH = "/v1/completions"


def draw_body(draw: random.Random, place: str) -> dict[str, Any]:
    """A request that is long enough to be at its place when its client leaves."""
    length = 12 * CHUNK if place == "amid its chunks" else 8
    ids = [draw.randrange(5, 250) for _ in range(length)]
    kind = draw.choice([{"prompt": ids}, {"prompt": "def " * (length // 2)}, {"prompt": [ids, ids[: length // 2]]},
                        {"prompt": ids, "n": 4, "temperature": 1.0}])  # fmt: skip
    stream = place == "before [DONE]" or draw.random() < 0.5
    many = 6 if place == "before [DONE]" else MANY_TOKENS
    return {"model": "served", "max_tokens": many, "ignore_eos": True, "stream": stream, **kind}


async def find_load(served: Served) -> tuple[int, ...]:
    """(completions in work at the door, prompt tokens that wait, sequences that run, that wait)."""
    answer = await ask(served.port, encode_request("GET", "/load"))
    return tuple(answer.json[name] for name in ("in_flight", "waiting_tokens", "running", "waiting"))


async def until_load(served: Served, condition: Any, seconds: float = 30.0) -> None:
    """Waits until /load is so; TimeoutError where it does not come to be."""
    async with asyncio.timeout(seconds):
        while not condition(await find_load(served)):
            pass


async def leave(served: Served, place: str, body: dict[str, Any], rest: tuple[int, ...]) -> float:
    """Leaves a request at its place; the seconds after which /load is at rest again."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    request = encode_request("POST", _PATH, body)
    writer.write(request[: -len(request) // 4] if place == "amid its body" else request)
    if place == "amid its body":
        await asyncio.sleep(0.002)
    elif place == "queued":
        await until_load(served, lambda load: load[3] > rest[3])
    elif body["stream"] and place != "amid its chunks":
        received = b""
        most = body["max_tokens"] - 1 if place == "before [DONE]" else 1
        while len(read_answer(received).events) < most and (part := await reader.read(1 << 16)):
            received += part
    else:
        await until_load(served, lambda load: load[2] > rest[2])
    start = time.perf_counter()
    writer.close()
    await until_load(served, lambda load: load == rest)
    return time.perf_counter() - start


async def hold_batch(served: Served) -> list[asyncio.Task[Any]]:
    """Fills every row of the batch for as long as the model's length lets it."""
    body = {"model": "served", "prompt": [5], "max_tokens": 1000, "ignore_eos": True}
    held = [asyncio.create_task(ask(served.port, encode_request("POST", _PATH, body))) for _ in range(ROWS)]
    await until_load(served, lambda load: load[1:] == (0, ROWS, 0))
    return held


async def leave_many(served: Served, num_cancels: int) -> dict[str, list[float]]:
    """Place -> the seconds of each cancel there."""
    draw, found = random.Random(0), defaultdict(list)
    each = -(-num_cancels // len(PLACES))
    for place in PLACES:
        held: list[asyncio.Task[Any]] = []
        for index in range(each):
            if place == "queued" and index % 5 == 0:
                await release(served, held)
                held = await hold_batch(served)
            rest = (ROWS, 0, ROWS, 0) if held else (0, 0, 0, 0)
            found[place].append(await leave(served, place, draw_body(draw, place), rest))
        await release(served, held)
    return found


async def release(served: Served, held: Sequence[asyncio.Task[Any]]) -> None:
    """Leaves the requests that fill the batch."""
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    await until_load(served, lambda load: load == (0, 0, 0, 0))


def check_counts(served: Served, num_cancels: int) -> list[str]:
    """What does not add up afterwards."""
    found = served.measure()
    received, refused = found["tkernels_requests_received_total"], found["tkernels_requests_refused_total"]
    finished = found["vllm:request_success_total"]
    wrong = [] if received == refused + finished else [f"received {received}, refused {refused}, finished {finished}"]
    wrong += [] if received >= num_cancels else [f"{num_cancels} requests were sent and {received:.0f} received"]
    return wrong + (["blocks are in use"] if found["vllm:kv_cache_usage_perc"] else [])


def run(model: str, folder: Path, num_cancels: int) -> list[str]:
    """What is wrong; the figures are printed."""
    with serving(model, folder, OPTIONS) as served:
        asyncio.run(leave_many(served, len(PLACES)))  # threads and pools are there now
        before = find_sizes(served)
        found = asyncio.run(leave_many(served, num_cancels))
        wrong = check_counts(served, num_cancels) + find_grown(served, before)
        step = served.find_step_seconds()
    everything = [one for seconds in found.values() for one in seconds]
    print(f"{len(everything)} cancels; a step took {1e3 * step:.1f} ms on average")
    for place, seconds in [*found.items(), ("anywhere", everything)]:
        p50, p99 = np.percentile(seconds, [50, 99])
        print(f"{place}: free after {1e3 * p50:.1f} ms (p50), {1e3 * p99:.1f} (p99), {1e3 * max(seconds):.1f} at most")
    return wrong


def main() -> int:
    """1 where something is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--cancels", type=int, default=1000)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    wrong = run(asked.model, asked.folder, asked.cancels)
    print("\n".join(wrong) or "nothing is left")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
