"""A server that is stopped, and one whose engine dies or hangs, under 32 streams: what do their clients have?

python -m tests.tsched.serving.stops FOLDER [--model tiny] [--streams 32]

SIGTERM: every running stream has its whole text, new requests have 503 and Retry-After, the process ends with 0. A
second signal, and a drain whose time is over: every stream ends with an error. The worker killed with SIGKILL, or
stopped with SIGSTOP for longer than --stall-timeout: streams that began end with an error (asked: in 0.5 s), those that
waited are served whole by the next worker. Texts are compared with LLM.generate's. FOLDER keeps the servers' logs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from tests.tsched.serving.raw_http import Answer, ask, encode_request
from tests.tsched.serving.tk_serve import Served, serving
from tsched import LLM, SamplingParams

NUM_TOKENS, STALL_S = 400, 2.0
PARAMS = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
_TTFT = "vllm:time_to_first_token_seconds_count"


@dataclass(frozen=True)
class Ended:
    """A stream's answer, and when it ended."""

    answer: Answer
    at: float

    @property
    def is_error(self) -> bool:
        """Whether it ended as a failed stream does: with an error's event and without [DONE]."""
        return self.answer.status == 200 and self.answer.error is not None and not self.answer.is_done


def make_prompts(count: int) -> list[list[int]]:
    return [[5 + index, 7, 9 + index] for index in range(count)]


def post(prompt: list[int], **changes: object) -> bytes:
    body = {"model": "served", "prompt": prompt, "stream": True, **PARAMS, **changes}
    return encode_request("POST", "/v1/completions", body)


async def follow(served: Served, prompt: list[int]) -> Ended:
    return Ended(await ask(served.port, post(prompt)), time.perf_counter())


async def begin(served: Served, count: int, num_begun: int) -> list[asyncio.Task[Ended]]:
    """So many streams, of which so many have begun."""
    before = served.measure()[_TTFT]
    tasks = [asyncio.create_task(follow(served, prompt)) for prompt in make_prompts(count)]
    while served.measure()[_TTFT] < before + num_begun:
        await asyncio.sleep(0.02)
    return tasks


async def until_exit(served: Served) -> tuple[int, float]:
    """(exit status, when it ended)."""
    while (status := served.process.poll()) is None:
        await asyncio.sleep(0.005)
    return status, time.perf_counter()


async def drain(served: Served, texts: list[str]) -> list[str]:
    """SIGTERM, and all that was begun ends whole."""
    tasks = await begin(served, len(texts), len(texts))
    served.process.send_signal(signal.SIGTERM)
    ready = Answer()
    while ready.status != 503:
        ready = await ask(served.port, encode_request("GET", "/ready"))
    live = await ask(served.port, encode_request("GET", "/live"))
    refused = await ask(served.port, post([5]))
    wrong = [] if live.status == 200 else [f"/live is {live.status}"]
    if refused.status != 503 or int(refused.headers.get("retry-after", 0)) < 1:
        wrong.append(f"a new request has {refused.status} {dict(refused.headers)}")
    ended = await asyncio.gather(*tasks)
    status, at = await until_exit(served)
    print(f"drain: exit status {status}, {at - max(one.at for one in ended):.3f} s after the last stream's end")
    wrong += [] if status == 0 else [f"exit status {status}"]
    return wrong + find_cut(ended, texts)


async def signal_twice(served: Served, texts: list[str]) -> list[str]:
    """Two signals, and all ends with errors."""
    tasks = await begin(served, len(texts), len(texts))
    for _ in range(2):
        served.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
    return await expect_errors(served, tasks, "second signal")


async def overrun_drain(served: Served, texts: list[str]) -> list[str]:
    """A drain whose time is over."""
    tasks = await begin(served, len(texts), len(texts))
    served.process.send_signal(signal.SIGTERM)
    return await expect_errors(served, tasks, "drain's time over")


async def expect_errors(served: Served, tasks: list[asyncio.Task[Ended]], what: str) -> list[str]:
    start = time.perf_counter()
    ended = await asyncio.gather(*tasks)
    status, at = await until_exit(served)
    print(f"{what}: exit status {status} after {at - start:.2f} s")
    wrong = [] if status == 0 else [f"exit status {status}"]
    return wrong + [f"{what}: {one.answer.body[-200:]!r}" for one in ended if not one.is_error]


def find_cut(ended: list[Ended], texts: list[str]) -> list[str]:
    """The streams that are not whole, or have another text."""
    pairs = [(one.answer, text) for one, text in zip(ended, texts, strict=True)]
    return [f"not {text[-80:]!r}: {got.body[-200:]!r}" for got, text in pairs if not got.is_done or got.text != text]


async def lose_worker(served: Served, texts: list[str], sent: signal.Signals) -> list[str]:
    """The worker dies or hangs while half of the streams have begun; the batch is full of them."""
    num_begun, worker = len(texts) // 2, served.find_worker()
    tasks = await begin(served, len(texts), num_begun)
    restarts = served.count()["tkernels_worker_restarts_total"]
    os.kill(worker, sent)
    start = time.perf_counter()
    unhealthy = Answer(200)
    while unhealthy.status == 200:
        unhealthy = await ask(served.port, encode_request("GET", "/health"))
    said = time.perf_counter() - start
    ended = await asyncio.gather(*tasks)
    failed = [one for one in ended if one.is_error]
    late = max((one.at for one in failed), default=start) - start - (STALL_S if sent == signal.SIGSTOP else 0)
    print(f"{sent.name}: {len(failed)} streams had their error {late:.3f} s after it at the latest, /health {said:.3f}")
    while (await ask(served.port, encode_request("GET", "/ready"))).status != 200:
        await asyncio.sleep(0.02)
    again = time.perf_counter() - start
    whole = [(one, text) for one, text in zip(ended, texts, strict=True) if not one.is_error]
    print(f"{sent.name}: {len(whole)} that waited were served whole; ready again after {again:.1f} s")
    wrong = find_cut([one for one, _ in whole], [text for _, text in whole])
    if not num_begun <= len(failed) < len(texts):
        wrong.append(f"{num_begun} streams had begun, and {len(failed)} of {len(texts)} failed")
    if served.count()["tkernels_worker_restarts_total"] != restarts + 1:
        wrong.append("the worker was not started once more")
    found = served.measure()
    received, refused = found["tkernels_requests_received_total"], found["tkernels_requests_refused_total"]
    if received != refused + found["vllm:request_success_total"]:
        wrong.append(f"received {received}, refused {refused}, finished {found['vllm:request_success_total']}")
    return wrong


async def kill_and_hang(served: Served, texts: list[str]) -> list[str]:
    return [
        *await lose_worker(served, texts, signal.SIGKILL),
        *await lose_worker(served, texts, signal.SIGSTOP),
    ]


def run(model: str, folder: Path, num_streams: int) -> list[str]:
    """What is wrong; the figures are printed."""
    cases: list[tuple[Callable[[Served, list[str]], Awaitable[list[str]]], int, float]] = [
        (drain, num_streams, 120.0),
        (signal_twice, num_streams, 120.0),
        (overrun_drain, num_streams, 0.2),
        (kill_and_hang, num_streams // 2, 120.0),
    ]
    wrong: list[str] = []
    texts: list[str] = []
    for case, rows, drain_timeout in cases:
        options = ["--max-num-seqs", str(rows), "--prefix-cache", "none", "--stall-timeout", str(STALL_S)]
        with serving(model, folder, [*options, "--drain-timeout", str(drain_timeout)]) as served:
            if not texts:
                llm = LLM(served.directory, prefix_cache="none")
                outputs = llm.generate(make_prompts(num_streams), SamplingParams(**PARAMS), use_tqdm=False)
                texts = [one.outputs[0].text for one in outputs]
            wrong += asyncio.run(case(served, texts))
    return wrong


def main() -> int:
    """1 where a client has what it should not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--streams", type=int, default=32)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    wrong = run(asked.model, asked.folder, asked.streams)
    print("\n".join(wrong[:10]) or "nothing is wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
