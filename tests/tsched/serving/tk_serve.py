"""`tk serve` as a process of its own, for commands that put it under real load."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tmodel import find_model

_COUNTED = re.compile(r"^(vllm:\w+_total|tkernels_\w+_total)(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Served:
    """A server that runs, and what it serves. folder: where a client may write. pid: of the front end."""

    base: str
    directory: Path
    folder: Path
    pid: int

    def find_worker(self) -> int:
        """The engine's process below the front end, which started it from one of its threads."""
        children: set[int] = set()
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            children |= {int(one) for one in (task / "children").read_text().split()}
        return max(children, key=lambda one: int(Path(f"/proc/{one}/statm").read_text().split()[1]))

    def count(self) -> Counter[str]:
        """The counters of /metrics, each summed over its labels."""
        with urllib.request.urlopen(f"{self.base}/metrics") as answer:
            text = answer.read().decode()
        found: Counter[str] = Counter()
        for name, value in _COUNTED.findall(text):
            found[name] += int(float(value))
        return found


@contextmanager
def serving(model: str, folder: Path, options: Sequence[str] = ()) -> Iterator[Served]:
    """`tk serve MODEL --name served`, until the block ends; its log is serve.log in `folder`."""
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
            yield Served(found.group(), directory, folder, process.pid)
        finally:
            process.terminate()
            process.wait(60)


def _wait_until_ready(base: str) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{base}/ready"):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"{base} is not ready after 300 s")
