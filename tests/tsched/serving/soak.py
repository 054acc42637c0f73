"""A server under mixed load for minutes: cancels, refusals and a killed worker, then a look at what is left.

    python -m tests.tsched.serving.soak --minutes 3

Of the requests a fifth leave early, at a random moment, and a twentieth are refused. After a third of the time the
worker is killed. What was counted must add up, and nothing may be left: requests, blocks, open files, threads; from
twenty minutes on neither process may grow by a MB a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.tsched.serving.raw_http import Answer, ask, encode_request
from tests.tsched.serving.tk_serve import Served, count_files, find_worker, memory, serving
from tsched.serving.limits import ServerLimits

CLIENTS = 16
MOST_GROWTH = 1.0  # MB a minute
_POOLS_FILL = 20.0  # minutes; a worker grows for its first ten


@dataclass
class Soak:
    """What clients saw, and the server's size over time.

    Attributes:
        served: The server.
        answers: Outcome -> how many requests had it.
        faults: What no client should see.
        front: (seconds, bytes of memory) of the front end.
        worker: The same of the worker, since its last start.
    """

    served: Served
    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    front: list[tuple[float, int]] = field(default_factory=list)
    worker: list[tuple[float, int]] = field(default_factory=list)


async def client(soak: Soak, draw: random.Random, until: float) -> None:
    """One request after another."""
    while time.monotonic() < until:
        kind = draw.random()
        body = {
            "model": "served", "prompt": [draw.randrange(1, 300) for _ in range(draw.randrange(1, 40))],
            "max_tokens": draw.randrange(1, 60), "stream": draw.random() < 0.6, "ignore_eos": True,
            "seed": draw.randrange(1000), "n": draw.choice([1, 1, 2]),
        }  # fmt: skip
        if kind < 0.05:
            body |= draw.choice([{"prompt": [10**6]}, {"top_p": 7}, {"model": "none"}, {"max_tokens": 5000}])
        leave_after = None
        if kind > 0.8:  # before the last of as many tokens as the model's length leaves
            body["max_tokens"], leave_after = 85, draw.random() * 0.08
        try:
            answer = await ask(soak.served.port, encode_request("POST", "/v1/completions", body), leave_after)
        except OSError as error:
            soak.faults.append(f"no connection: {error}")
            continue
        outcome = judge(body, answer, must_be_refused=kind < 0.05, has_left=leave_after is not None)
        soak.answers[outcome] += 1
        if outcome == "fault":
            soak.faults.append(f"{answer.status} {answer.body[-300:]!r} to {body}")
        if answer.status == 503:
            await asyncio.sleep(0.2)


def judge(body: dict[str, Any], answer: Answer, *, must_be_refused: bool, has_left: bool) -> str:
    """The outcome of a request; "fault" where no client should see it."""
    if has_left and not answer.is_whole:
        return "left"
    if must_be_refused:
        return "refused" if answer.status in (400, 404, 503) else "fault"
    if answer.status == 200 and answer.error is not None:
        return "fault" if answer.is_done else "error frame"
    if answer.status == 200:
        return "whole" if (answer.is_done if body["stream"] else answer.is_whole) else "fault"
    return str(answer.status) if answer.status in (429, 500, 503) else "fault"


async def watch(soak: Soak, until: float) -> None:
    """Notes the sizes once a second."""
    known: int | None = None
    while time.monotonic() < until:
        worker = find_worker(soak.served.pid)
        if worker != known:
            known, soak.worker = worker, []
        soak.front.append((time.monotonic(), memory(soak.served.pid)))
        if worker is not None:
            soak.worker.append((time.monotonic(), memory(worker)))
        await asyncio.sleep(1.0)


def slope(sizes: list[tuple[float, int]]) -> float:
    """MB a minute over the later two thirds: pools fill up at first."""
    later = np.array(sizes[len(sizes) // 3 :])
    return float(np.polyfit(later[:, 0] / 60, later[:, 1] / 1e6, 1)[0]) if len(later) > 3 else 0.0


async def drive(soak: Soak, seconds: float) -> None:
    """Loads the server for so long, and kills its worker once."""
    until = time.monotonic() + seconds
    draw = random.Random(0)
    clients = [asyncio.create_task(client(soak, random.Random(draw.random()), until)) for _ in range(CLIENTS)]
    watching = asyncio.create_task(watch(soak, until))
    await asyncio.sleep(seconds / 3)
    os.kill(soak.served.find_worker(), signal.SIGKILL)
    await asyncio.gather(*clients, watching)
    await asyncio.sleep(1.0)  # who has just left is noticed


def check_counts(soak: Soak) -> list[str]:
    """What does not add up after the load."""
    found, wrong = soak.served.measure(), [f"a client saw: {fault}" for fault in soak.faults]
    received, refused = found["tkernels_requests_received_total"], found["tkernels_requests_refused_total"]
    if received != refused + found["vllm:request_success_total"]:
        wrong.append(f"received {received:.0f}, refused {refused:.0f}, {found['vllm:request_success_total']:.0f} ended")
    sent = sum(soak.answers.values())
    if not sent - soak.answers["left"] <= received <= sent:  # who leaves at once may not have been heard
        wrong.append(f"{sent} requests were sent and {received:.0f} received")
    if found["tkernels_worker_restarts_total"] != 1:
        wrong.append(f"{found['tkernels_worker_restarts_total']:.0f} restarts")
    left = {**soak.served.load(), "blocks in use": found["vllm:kv_cache_usage_perc"]}
    return wrong + [f"{name} is {value}" for name, value in left.items() if value]


def find_sizes(served: Served) -> dict[str, int]:
    """What could grow unseen: open files and threads of both processes."""
    processes = {"front end": served.pid, "worker": served.find_worker()}
    files = {f"files of the {name}": count_files(pid) for name, pid in processes.items()}
    return files | {f"threads of the {name}": len(os.listdir(f"/proc/{pid}/task")) for name, pid in processes.items()}


def find_grown(served: Served, before: dict[str, int]) -> list[str]:
    """Which sizes grew, but for the threads that tokenize, which start when they are first needed.

    The last connections close when the server comes to it: what is larger for five seconds has grown.
    """
    most = before | {"threads of the front end": before["threads of the front end"] + ServerLimits().tokenizer_threads}
    deadline = time.monotonic() + 5
    while True:
        grown = {name: size for name, size in find_sizes(served).items() if size > most[name]}
        if not grown or time.monotonic() > deadline:
            return [f"{name}: {before[name]} before, {size} after" for name, size in grown.items()]
        time.sleep(0.1)


def run(model: str, folder: Path, seconds: float) -> tuple[Soak, list[str]]:
    """(what was seen, what is wrong); the server's log is in `folder`."""
    options = ["--max-num-seqs", "8", "--prefix-cache", "none"]
    with serving(model, folder, options) as served:
        soak, before = Soak(served), find_sizes(served)
        asyncio.run(drive(soak, seconds))
        wrong = check_counts(soak)
        wrong += find_grown(served, before)
        grown = {"front end": slope(soak.front), "worker": slope(soak.worker)}
        if seconds >= 60 * _POOLS_FILL:
            wrong += [f"the {name} grows by {mb:.2f} MB a minute" for name, mb in grown.items() if mb >= MOST_GROWTH]
        print_figures(soak, seconds, grown)
    return soak, wrong


def print_figures(soak: Soak, seconds: float, grown: dict[str, float]) -> None:
    found = soak.served.measure()
    print(f"{sum(soak.answers.values())} requests in {seconds / 60:g} minutes: {dict(soak.answers.most_common())}")
    names = {"received": "tkernels_requests_received_total", "refused": "tkernels_requests_refused_total",
             "finished": "vllm:request_success_total", "output tokens": "vllm:generation_tokens_total"}  # fmt: skip
    print(", ".join(f"{what} {found[name]:.0f}" for what, name in names.items()))
    for (who, mb), sizes in zip(grown.items(), (soak.front, soak.worker), strict=True):
        since = ", since its restart" if who == "worker" else ""
        print(f"memory of the {who}{since}: {sizes[-1][1] / 1e6:.0f} MB, {mb:+.2f} MB a minute")


def main() -> int:
    """1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory() as folder:
        _, wrong = run("tiny", Path(folder), 60 * minutes)
    print("\n".join(wrong) or "nothing is wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
