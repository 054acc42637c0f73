"""Keeps a worker at work: starts it, ends it where a step hangs, and starts another one after a step that killed it."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from experiments.gpu_report.journal import Journal, done_steps, running_step
from experiments.gpu_report.steps import Step, pending

# A step may take this many times its estimate, and a minute at least, before its process is ended.
_PATIENCE, _LEAST_S = 4.0, 60.0

# What a worker may go on past the deadline: a step that was begun just before it.
_GRACE_S = 20.0

_POLL_S = 0.5


class Process(Protocol):
    """What is asked of a worker's process; subprocess.Popen is one."""

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


Start = Callable[[Sequence[Step]], Process]


@dataclass(frozen=True)
class Outcome:
    """What is left: steps that no worker has ended well, by name."""

    left: tuple[str, ...]
    workers: int


def supervise(
    steps: Sequence[Step],
    journal: Journal,
    deadline: float,
    start: Start,
    *,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome:
    """Has every pending step tried once, until the deadline.

    Args:
        deadline: seconds since the epoch. start: starts a worker on steps, in order.
    """
    todo = pending(steps, done_steps(journal.lines()))
    by_name = {step.name: step for step in steps}
    workers = 0
    while todo and now() < deadline:
        before = len(journal.lines())  # an earlier run's lines say nothing of this worker
        process = start(todo)
        workers += 1
        _watch(process, journal, before, by_name, deadline, now, sleep)
        tried = _settle(process, journal, before, todo)
        if tried == 0:
            break  # it died before its first step: so would the next
        todo = todo[tried:]
    done = done_steps(journal.lines())
    return Outcome(tuple(step.name for step in steps if step.name not in done), workers)


def _watch(
    process: Process, journal: Journal, before: int, by_name: dict[str, Step], deadline: float,
    now: Callable[[], float], sleep: Callable[[float], None],
) -> None:  # fmt: skip
    """Until the process ends, by itself or because a step takes far too long or time is up."""
    while process.poll() is None:
        sleep(_POLL_S)
        running = running_step(journal.lines()[before:])
        if running is None:
            continue
        name, begun = running
        limit = max(_LEAST_S, _PATIENCE * by_name[name].seconds) if name in by_name else _LEAST_S
        if now() > min(begun + limit, deadline + _GRACE_S):
            process.kill()
            process.wait()
            reason = "stopped: out of time" if now() > deadline + _GRACE_S else f"stopped after {limit:.0f} s"
            journal.append(name, "end", status="stopped", reason=reason)
            return


def _settle(process: Process, journal: Journal, before: int, todo: Sequence[Step]) -> int:
    """Ends the step that a dead worker left open, and says how many of `todo` were tried."""
    code = process.wait()
    running = running_step(journal.lines()[before:])
    if running is not None:
        journal.append(running[0], "end", status="failed", reason=f"its process died (exit {code})")
    ended = [line["step"] for line in journal.lines()[before:] if line["event"] == "end"]
    tried = [index for index, step in enumerate(todo) if step.name in ended]
    return max(tried) + 1 if tried else 0


def start_worker(out: Path, device: str, deadline: float) -> Start:
    """Starts real workers; what they print goes to worker.log."""

    def start(steps: Sequence[Step]) -> Process:
        command = [sys.executable, "-m", "experiments.gpu_report.worker", "--device", device, "--out", str(out)]
        with open(out / "worker.log", "ab") as log, tempfile.TemporaryFile("w+") as names:
            names.writelines(step.name + "\n" for step in steps)
            names.seek(0)
            return subprocess.Popen(
                [*command, "--deadline", str(deadline)], stdin=names, stdout=log, stderr=subprocess.STDOUT
            )

    return start
