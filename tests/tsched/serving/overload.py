"""More is asked than a server takes: how soon are the others refused, and what does it cost the admitted?

python -m tests.tsched.serving.overload FOLDER [--model tiny] [--requests 640] [--admitted 64] [--times 4]

First as many clients as are admitted ask one request after another: so much the server can do. Then the requests come
at times drawn beforehand, whatever the server does, `--times` as many a second; beside them somebody asks for /health.
Asked: every refusal is a 429 with a body and Retry-After, 99 of 100 come within 0.1 s or 20 times /health's; every
admitted request ends whole; their tokens a second are at least 0.9 of those before. FOLDER keeps the server's log.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path

import numpy as np

from tests.tsched.serving.raw_http import Answer, ask, encode_request
from tests.tsched.serving.tk_serve import Served, serving

NUM_PROMPT = 16
NUM_TOKENS = (32, 96)  # drawn: equal ones would go through the batch in step
_PATH = "/v1/completions"


def make_request(draw: random.Random) -> bytes:
    prompt = [draw.randrange(5, 250) for _ in range(NUM_PROMPT)]
    body = {
        "model": "served",
        "prompt": prompt,
        "max_tokens": draw.randint(*NUM_TOKENS),
        "ignore_eos": True,
        "stream": True,
    }
    body["stream_options"] = {"include_usage": True}
    return encode_request("POST", _PATH, body)


async def ask_openly(served: Served, requests: list[bytes], seconds: float) -> tuple[list[Answer], list[float], float]:
    """(the answers, /health's seconds beside them, seconds in all) of requests that come by themselves."""
    draw, health, over = random.Random(1), [], asyncio.Event()

    async def come(request: bytes, after: float) -> Answer:
        await asyncio.sleep(after)
        return await ask(served.port, request)

    async def probe() -> None:
        while not over.is_set():
            health.append((await ask(served.port, encode_request("GET", "/health"))).seconds[1])
            await asyncio.sleep(0.02)

    start, probing = time.perf_counter(), asyncio.create_task(probe())
    answers = await asyncio.gather(*(come(one, draw.random() * seconds) for one in requests))
    took = time.perf_counter() - start
    over.set()
    await probing
    return answers, health, took


async def ask_in_turn(served: Served, requests: list[bytes], at_once: int) -> float:
    """Seconds in all of so many clients, each with one request after another."""
    left = iter(requests)

    async def client() -> None:
        for request in left:
            answer = await ask(served.port, request)
            if not answer.is_done:
                raise SystemExit(f"nobody else is there, and it has {answer.status} {answer.body[-500:]!r}")

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(at_once)))
    return time.perf_counter() - start


def find_faults(answers: list[Answer]) -> list[str]:
    """What is wrong with the answers."""
    wrong = []
    for one in answers:
        if one.status == 200 and (not one.is_done or one.events[-2]["choices"][0]["finish_reason"] != "length"):
            wrong.append(f"an admitted stream ended as {one.body[-200:]!r}")
        is_said = one.status == 200 or (one.status == 429 and one.is_whole and one.error["code"] == "in_flight")
        if not is_said or (one.status == 429 and int(one.headers.get("retry-after", 0)) < 1):
            wrong.append(f"{one.status} {dict(one.headers)} {one.body!r}")
    return wrong


async def overload(served: Served, num_requests: int, admitted: int, times: float) -> list[str]:
    """What is wrong; the figures are printed."""
    draw = random.Random(0)
    await ask_in_turn(served, [make_request(draw) for _ in range(admitted)], admitted)  # warm
    num_closed = 4 * admitted
    before = served.count()
    seconds = await ask_in_turn(served, [make_request(draw) for _ in range(num_closed)], admitted)
    able, able_tokens = num_closed / seconds, (served.count() - before)["vllm:generation_tokens_total"] / seconds
    before = served.count()
    requests = [make_request(draw) for _ in range(num_requests)]
    answers, health, took = await ask_openly(served, requests, num_requests / (times * able))
    counted = served.count() - before
    whole, refused = [one for one in answers if one.status == 200], [one for one in answers if one.status == 429]
    wrong = find_faults(answers)
    if counted["tkernels_requests_refused_total"] != len(refused) or not refused:
        wrong.append(f"{len(refused)} were refused, and counted {counted['tkernels_requests_refused_total']}")
    if counted["vllm:prompt_tokens_total"] != NUM_PROMPT * len(whole):
        wrong.append(f"{counted['vllm:prompt_tokens_total']} prompt tokens were computed for {len(whole)} admitted")
    figures = {
        "requests": num_requests,
        "admitted": len(whole),
        "refused": len(refused),
        "refusal p50 ms": 1e3 * np.percentile([one.seconds[1] for one in refused], 50),
        "refusal p99 ms": 1e3 * np.percentile([one.seconds[1] for one in refused], 99),
        "/health p50 ms": 1e3 * np.percentile(health, 50),
        "/health p99 ms": 1e3 * np.percentile(health, 99),
        "requests a second before": able,
        "goodput": counted["vllm:generation_tokens_total"] / took / able_tokens,
    }
    print(", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
    return wrong


def run(model: str, folder: Path, num_requests: int, admitted: int, times: float) -> list[str]:
    """What is wrong with a server that admits so many."""
    options = ["--max-in-flight", str(admitted), "--max-num-seqs", str(admitted), "--prefix-cache", "none"]
    with serving(model, folder, options) as served:
        return asyncio.run(overload(served, num_requests, admitted, times))


def main() -> int:
    """1 where a request is treated wrongly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--requests", type=int, default=640)
    parser.add_argument("--admitted", type=int, default=64)
    parser.add_argument("--times", type=float, default=4.0)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    wrong = run(asked.model, asked.folder, asked.requests, asked.admitted, asked.times)
    print("\n".join(wrong[:10]) or "nothing is wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
