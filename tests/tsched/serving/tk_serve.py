"""`tk serve` as a process of its own, for commands that put it under real load."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tmodel import find_model

_STEPS = "tkernels_engine_steps_total"
_SAMPLE = re.compile(r"^((?:vllm:|tkernels_)\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Served:
    """A server that runs, and what it serves. folder: where a client may write. process: of the front end."""

    base: str
    directory: Path
    folder: Path
    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.base.rpartition(":")[2])

    def find_worker(self) -> int:
        """The engine's process below the front end."""
        worker = find_worker(self.pid)
        assert worker is not None, "it is between two"
        return worker

    def measure(self, label: str = "") -> dict[str, float]:
        """All of /metrics that has this label, each name summed over its other ones; 0 where there is none yet."""
        with urllib.request.urlopen(f"{self.base}/metrics") as answer:
            text = answer.read().decode()
        found: dict[str, float] = defaultdict(float)
        for name, labels, value in _SAMPLE.findall(text):
            if label in labels:
                found[name] += float(value)
        return found

    def count(self) -> Counter[str]:
        """The counters among them."""
        return Counter({name: int(value) for name, value in self.measure().items() if name.endswith("_total")})

    def find_step_seconds(self) -> float:
        """An engine's step, on average since its start."""
        return self.measure('phase="step"')["tkernels_step_phase_seconds_total"] / self.count()[_STEPS]

    def load(self) -> dict[str, int]:
        """What is in work, by /load."""
        with urllib.request.urlopen(f"{self.base}/load") as answer:
            found: dict[str, int] = json.loads(answer.read())
        return found


def find_worker(pid: int) -> int | None:
    """The engine's process below a front end, which started it from one of its threads; None between two."""
    children: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        children |= {int(one) for one in (task / "children").read_text().split()}
    return max(children, key=memory, default=None)


def memory(pid: int) -> int:
    """Bytes of a process's memory that are in use; 0 where it is no more."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGESIZE")


def count_files(pid: int) -> int:
    """Files, sockets among them, that a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextmanager
def serving(model: str, folder: Path, options: Sequence[str] = ()) -> Iterator[Served]:
    """`tk serve MODEL --name served`, until the block ends; its log is serve.log in `folder`.

    Raises:
        SystemExit: It does not start, or does not end with status 0.
    """
    directory = find_model(model).directory().resolve()
    command = [sys.executable, "-c", "from experiments.cli import main; main()", "serve", str(directory)]
    log = folder / "serve.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [*command, "--name", "served", "--port", "0", *options], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            found = re.search(r"http://[^/\s]+", process.stdout.readline())
            if found is None:
                raise SystemExit(f"tk serve did not start:\n{log.read_text()[-2000:]}")
            _wait_until_ready(found.group())
            yield Served(found.group(), directory, folder, process)
        except BaseException:
            process.kill()
            raise
        if process.poll() is None:
            process.terminate()
        if status := process.wait(60):
            raise SystemExit(f"tk serve ended with status {status}:\n{log.read_text()[-2000:]}")


def _wait_until_ready(base: str) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{base}/ready"):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"{base} is not ready after 300 s")
