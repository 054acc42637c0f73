"""Clients that are slow, and requests that are as large as they may be: what do others notice of them?

python -m tests.tsched.serving.slow_and_large FOLDER [--model tiny] [--slow 500] [--rounds 3] [--requests 200]

Asked: with 500 connections whose headers or bodies do not come, 99 of 100 normal requests take at most twice as long as
without, in turns; such connections end after the server's own 10 s and 30 s. Readers that do not read hold at most 1 MB
each and no place in the engine. With 8 of the largest prompts in work 99 of 100 GET /live take at most 50 ms; the same
at rest is printed beside it. FOLDER keeps the server's log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.tsched.serving.raw_http import Answer, ask, encode_request, read_answer
from tests.tsched.serving.tk_serve import Served, memory, serving
from tsched.serving.limits import ServerLimits

LIMITS = ServerLimits()
LARGEST_HELD = 10**6
"""Bytes of the front end's memory that a reader who does not read may hold."""

LIVE = encode_request("GET", "/live")
NORMAL = encode_request(
    "POST", "/v1/completions", {"model": "served", "prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}
)
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
_STARTS = (_HEAD, _HEAD + b'content-length: 100\r\n\r\n{"model"')
"""Half of a request's headers, and half of its body."""


async def hold(port: int, start: bytes) -> tuple[Answer, float]:
    """Sends the start of a request, and no more: (the answer, seconds to the connection's end)."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(start)
    received = await reader.read()
    writer.close()
    return read_answer(received), time.perf_counter() - began


async def measure(port: int, request: bytes, count: int) -> list[float]:
    """Milliseconds of so many requests, one after another."""
    answers = [await ask(port, request) for _ in range(count)]
    assert {one.status for one in answers} == {200}, answers
    return [1e3 * one.seconds[1] for one in answers]


def describe(times: Sequence[float]) -> str:
    return f"p50 {np.percentile(times, 50):.1f} ms, p99 {np.percentile(times, 99):.1f} ms"


async def compare_with_slow(served: Served, num_slow: int, rounds: int, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds of normal requests alone, and beside slow connections, in turns."""
    alone, beside = [], []
    for _ in range(rounds):
        alone += await measure(served.port, NORMAL, count)
        slow = [asyncio.create_task(hold(served.port, _STARTS[place % 2])) for place in range(num_slow)]
        await asyncio.sleep(0.5)
        beside += await measure(served.port, NORMAL, count)
        for one in slow:
            one.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
    return alone, beside


async def find_late(served: Served, num_slow: int) -> list[str]:
    """What is wrong with the ends of slow connections, at the server's own deadlines."""
    ends = await asyncio.gather(*(hold(served.port, _STARTS[place % 2]) for place in range(num_slow)))
    wrong = []
    for (answer, seconds), deadline, status in zip(
        ends, [LIMITS.header_timeout, LIMITS.body_timeout] * num_slow, [0, 408] * num_slow, strict=False
    ):
        if not deadline - 0.1 <= seconds <= deadline + 5.0 or answer.status != status:
            wrong.append(f"a slow connection ended after {seconds:.1f} s with {answer.status}, asked {deadline} s")
    return wrong


def open_unread(port: int) -> socket.socket:
    """A stream of about ten megabytes that nobody reads."""
    body = {"model": "served", "prompt": [5], "n": 8, "max_tokens": 900, "ignore_eos": True, "logprobs": 20}
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.sendall(encode_request("POST", "/v1/completions", body | {"stream": True}))
    return connection


def hold_unread(served: Served, count: int) -> tuple[float, float]:
    """(megabytes of the front end a reader, seconds until the engine has no sequence) of readers that do not read.

    As many of them are there before: the first streams of a server also fill what it allocates once, 3 MB in all.
    """
    connections = [open_unread(served.port) for _ in range(count)]
    time.sleep(1.0)
    wait_until_idle(served)
    before, began = memory(served.pid), time.perf_counter()
    connections += [open_unread(served.port) for _ in range(count)]
    time.sleep(1.0)
    wait_until_idle(served)
    seconds, held = time.perf_counter() - began, memory(served.pid) - before
    for one in connections:
        one.close()
    return held / count / 1e6, seconds


def wait_until_idle(served: Served) -> None:
    """Waits until the engine has no sequence."""
    while any(served.measure()[f"vllm:num_requests_{state}"] for state in ("running", "waiting")):
        time.sleep(0.1)


def make_largest(served: Served) -> list[tuple[str, bytes]]:
    """The largest requests: a prompt that fills the model, the longest text that is tokenized, the longest body."""
    config = json.loads((served.directory / "config.json").read_text())
    most = config["max_position_embeddings"]
    vocabulary = json.loads((served.directory / "tokenizer.json").read_text())["model"]["vocab"]
    text = "ab1 " * (most * max(map(len, vocabulary)) // 4)
    ids = [[5] * (LIMITS.max_body_bytes // 3 // 128 - 10) for _ in range(128)]
    bodies = {
        "prompts that fill the model": {"prompt": [5] * (most - 1)},
        "the longest text": {"prompt": text},
        "the longest body": {"prompt": ids},
    }
    base = {"model": "served", "max_tokens": 1}
    return [(name, encode_request("POST", "/v1/completions", base | body)) for name, body in bodies.items()]


async def probe_beside(served: Served, request: bytes, seconds: float) -> tuple[list[float], set[int]]:
    """(milliseconds of GET /live, the statuses of the others) while 8 clients send one such request after another."""
    over, statuses, times = asyncio.Event(), set(), []

    async def send() -> None:
        while not over.is_set():
            statuses.add((await ask(served.port, request)).status)

    senders = [asyncio.create_task(send()) for _ in range(8)]
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        times += await measure(served.port, LIVE, 1)
        await asyncio.sleep(0.01)
    over.set()
    await asyncio.gather(*senders)
    return times, statuses


def main() -> int:
    """1 where a connection ends otherwise than it should, or a reader holds too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--slow", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    with serving(asked.model, asked.folder) as served:
        asyncio.run(measure(served.port, NORMAL, 20))
        alone, beside = asyncio.run(compare_with_slow(served, asked.slow, asked.rounds, asked.requests))
        ratio = np.percentile(beside, 99) / np.percentile(alone, 99)
        print(f"a normal request alone: {describe(alone)}")
        print(f"beside {asked.slow} slow connections: {describe(beside)}; {ratio:.2f} of the p99 alone", flush=True)
        wrong = asyncio.run(find_late(served, asked.slow))
        print(f"{asked.slow} slow connections: {len(wrong)} end otherwise than the deadlines say", flush=True)
        held, seconds = hold_unread(served, 4)
        print(f"a reader that does not read holds {held:.2f} MB, the engine was free after {seconds:.1f} s", flush=True)
        wrong += [f"{held:.2f} MB held"] if held * 1e6 > LARGEST_HELD else []
        for name, request in make_largest(served):
            rest = asyncio.run(measure(served.port, LIVE, 200))
            times, statuses = asyncio.run(probe_beside(served, request, 5.0))
            print(
                f"GET /live at rest: {describe(rest)}; beside 8 times {name} ({statuses}): {describe(times)}",
                flush=True,
            )
    print(f"load average: {os.getloadavg()[0]:.1f}")
    print("\n".join(wrong[:10]) or "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
