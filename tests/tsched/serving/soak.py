"""A server under mixed load for minutes: cancels, refusals and a killed worker, then a look at what is left.

    python -m tests.tsched.serving.soak --minutes 3

Of the requests a fifth leave early, at a random moment, and a twentieth are refused. In the middle the worker is
killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

TK = [sys.executable, "-c", "from experiments.cli import main; main()", "serve"]
CLIENTS = 16


@dataclass
class Soak:
    """What clients saw, and the server's size over time.

    Attributes:
        answers: Outcome -> how many requests had it.
        faults: What no client should see.
        front: (seconds, bytes of memory) of the front end.
        worker: The same of the worker, since its last start.
    """

    port: int
    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    front: list[tuple[float, int]] = field(default_factory=list)
    worker: list[tuple[float, int]] = field(default_factory=list)


async def ask(port: int, method: str, path: str, body: Any = None, leave_after: float | None = None) -> bytes:
    """A request on a connection of its own: all bytes of the answer, or none where the client left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    try:
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        return await asyncio.wait_for(reader.read(), leave_after)
    except TimeoutError:
        return b""
    finally:
        writer.close()


async def client(soak: Soak, draw: random.Random, until: float) -> None:
    """One request after another."""
    while time.monotonic() < until:
        kind = draw.random()
        body = {
            "model": "soak", "prompt": [draw.randrange(1, 300) for _ in range(draw.randrange(1, 40))],
            "max_tokens": draw.randrange(1, 60), "stream": draw.random() < 0.6, "ignore_eos": True,
            "seed": draw.randrange(1000), "n": draw.choice([1, 1, 2]),
        }  # fmt: skip
        if kind < 0.05:
            body |= draw.choice([{"prompt": [300]}, {"top_p": 7}, {"model": "none"}, {"max_tokens": 500}])
        leave_after = draw.random() * 0.3 if kind > 0.8 else None
        try:
            answer = await ask(soak.port, "POST", "/v1/completions", body, leave_after)
        except OSError as error:
            soak.faults.append(f"no connection: {error}")
            continue
        judge(soak, body, answer, must_be_refused=kind < 0.05, has_left=leave_after is not None)
        if b"HTTP/1.1 503" in answer:
            await asyncio.sleep(0.2)


def judge(soak: Soak, body: dict[str, Any], answer: bytes, *, must_be_refused: bool, has_left: bool) -> None:
    if has_left and not answer:
        soak.answers["left"] += 1
        return
    status = int(answer[9:12])
    is_whole = b"[DONE]" in answer if body["stream"] else b'"usage"' in answer
    if must_be_refused:
        outcome = "refused" if status in (400, 404) or status == 503 else "fault"
    elif status == 200 and b'"error"' in answer:
        outcome = "error frame" if b"[DONE]" not in answer else "fault"
    elif status == 200:
        outcome = "whole" if is_whole else "fault"
    else:
        outcome = str(status) if status in (429, 500, 503) else "fault"
    soak.answers[outcome] += 1
    if outcome == "fault":
        soak.faults.append(repr(answer[:300]))


def memory(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def worker_of(pid: int) -> int | None:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


async def watch(soak: Soak, pid: int, until: float) -> None:
    """Notes the sizes once a second."""
    known: int | None = None
    while time.monotonic() < until:
        worker = worker_of(pid)
        if worker != known:
            known, soak.worker = worker, []
        try:
            soak.front.append((time.monotonic(), memory(pid)))
            if worker is not None:
                soak.worker.append((time.monotonic(), memory(worker)))
        except OSError:  # it has just died
            pass
        await asyncio.sleep(1.0)


def slope(sizes: list[tuple[float, int]]) -> float:
    """MB a minute over the later two thirds: pools fill up at first."""
    later = np.array(sizes[len(sizes) // 3 :])
    return float(np.polyfit(later[:, 0] / 60, later[:, 1] / 1e6, 1)[0]) if len(later) > 3 else 0.0


async def drive(soak: Soak, pid: int, seconds: float) -> dict[str, float]:
    """Loads the server for so long, kills its worker once, and returns the metrics when it is at rest again."""
    while b'"ready"' not in await ask(soak.port, "GET", "/ready"):
        await asyncio.sleep(0.1)
    until = time.monotonic() + seconds
    draw = random.Random(0)
    clients = [asyncio.create_task(client(soak, random.Random(draw.random()), until)) for _ in range(CLIENTS)]
    watching = asyncio.create_task(watch(soak, pid, until))
    await asyncio.sleep(seconds / 2)
    worker = worker_of(pid)
    assert worker is not None
    os.kill(worker, signal.SIGKILL)
    await asyncio.gather(*clients, watching)
    await asyncio.sleep(1.0)
    text = (await ask(soak.port, "GET", "/metrics")).partition(b"\r\n\r\n")[2].decode()
    found: dict[str, float] = {}
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def check(soak: Soak, found: dict[str, float]) -> list[str]:
    """What is wrong after the load; nothing should be."""
    received, refused = found["tkernels_requests_received_total"], found.get("tkernels_requests_refused_total", 0)
    finished = found["vllm:request_success_total"]
    wrong = [f"a client saw: {fault}" for fault in soak.faults]
    if received != refused + finished:
        wrong.append(f"received {received:.0f}, refused {refused:.0f}, finished {finished:.0f}")
    sent = sum(soak.answers.values())
    if not sent - soak.answers["left"] <= received <= sent:  # who leaves at once may not have been heard
        wrong.append(f"{sent} requests were sent and {received:.0f} received")
    wrong += [f"{name} is {found[name]}" for name in _AT_REST if found[name]]
    if found["tkernels_worker_restarts_total"] != 1:
        wrong.append(f"{found['tkernels_worker_restarts_total']:.0f} restarts")
    return wrong


_AT_REST = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def run(model: Path, seconds: float) -> tuple[Soak, list[str], dict[str, float]]:
    """(what was seen, what is wrong, the metrics)."""
    command = [*TK, str(model), "--name", "soak", "--port", "0", "--max-num-seqs", "8", "--prefix-cache", "none"]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as process:
        assert process.stdout is not None
        address = re.search(rb":(\d+)/v1", process.stdout.readline())
        assert address is not None
        soak = Soak(int(address[1]))
        try:
            found = asyncio.run(drive(soak, process.pid, seconds))
            wrong = check(soak, found)
            files = len(os.listdir(f"/proc/{process.pid}/fd"))
            wrong += [f"the front end has {files} open files"] if files > 40 else []
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(timeout=60)
        wrong += [f"exit status {status}"] if status else []
    return soak, wrong, found


def main() -> None:
    from tests.tsched.random_model import save_random_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(Path(folder))
        soak, wrong, found = run(Path(folder), 60 * minutes)
    print(f"{sum(soak.answers.values())} requests in {minutes:g} minutes: {dict(soak.answers.most_common())}")
    names = {"received": "tkernels_requests_received_total", "refused": "tkernels_requests_refused_total",
             "finished": "vllm:request_success_total"}  # fmt: skip
    print(", ".join(f"{what} {found.get(name, 0):.0f}" for what, name in names.items()))
    for who, sizes in (("front end", soak.front), ("worker, since its restart", soak.worker)):
        print(f"memory of the {who}: {sizes[-1][1] / 1e6:.0f} MB, {slope(sizes):+.2f} MB a minute")
    print("\n".join(wrong) or "nothing is wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
