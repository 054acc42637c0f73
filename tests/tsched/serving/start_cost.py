"""How long `tk serve` takes until it answers and until it is ready, beside `LLM(...)`, in turns in one run.

python -m tests.tsched.serving.start_cost FOLDER [--model tiny] [--rounds 5]

Each starts in a fresh process, from the interpreter's start on. Asked: /live within 2 s, and /ready within 1.2 times
LLM(...), though it comes after a first request. FOLDER keeps the server's log.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.tsched.serving.cost_over_http import cpu_seconds
from tests.tsched.serving.tk_serve import find_worker

_LOOK_S = 0.02


@dataclass(frozen=True)
class Start:
    """Seconds from the interpreter's start; CPU seconds of the front end up to live, of the worker up to ready."""

    live: float
    ready: float
    front_cpu: float
    worker_cpu: float


def start_server(model: str, log: Path) -> Start:
    """Starts a server, waits until it is ready, and stops it."""
    command = [sys.executable, "-c", "from experiments.cli import main; main()", "serve", model, "--port", "0"]
    began = time.monotonic()
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        base = re.search(r"http://[^/\s]+", process.stdout.readline())
        if base is None:
            raise SystemExit(f"tk serve did not start:\n{log.read_text()[-2000:]}")
        wait_for(f"{base.group()}/live")
        live, cpu = time.monotonic() - began, cpu_seconds(process.pid)
        wait_for(f"{base.group()}/ready")
        ready = time.monotonic() - began
        worker = find_worker(process.pid)
        assert worker is not None, "it is ready"
        worker_cpu = cpu_seconds(worker)
        process.terminate()
        process.wait(60)
    return Start(live, ready, cpu, worker_cpu)


def wait_for(url: str) -> None:
    """Waits until `url` answers with 200."""
    while True:
        try:
            with urllib.request.urlopen(url):
                return
        except OSError:
            time.sleep(_LOOK_S)


def start_llm(model: str) -> tuple[float, float]:
    """(seconds, CPU seconds) of a process that makes an LLM and ends."""
    began, before = time.monotonic(), os.times()
    program = "import os, sys; from tsched import LLM; LLM(sys.argv[1]); os._exit(0)"
    subprocess.run([sys.executable, "-c", program, model], check=True)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.monotonic() - began, cpu


def describe(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"


def main() -> int:
    """Prints what each takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    start_llm(asked.model)  # the files come from the disk once
    turns = [
        (start_server(asked.model, asked.folder / "serve.log"), start_llm(asked.model)) for _ in range(asked.rounds)
    ]
    starts = [start for start, _ in turns]
    print(f"/live: {describe([one.live for one in starts])}, CPU {describe([one.front_cpu for one in starts])}")
    print(f"/ready: {describe([one.ready for one in starts])}, CPU of the worker", end=" ")
    print(describe([one.worker_cpu for one in starts]))
    print(f"LLM(...): {describe([one for _, (one, _) in turns])}, CPU {describe([one for _, (_, one) in turns])}")
    ratios = [start.ready / llm for start, (llm, _) in turns]
    print(f"/ready / LLM(...): {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"load average: {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
