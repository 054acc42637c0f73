"""Keeps steps going: a worker's process does them in order, and another one goes on after a step that ended it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from experiments.gpu_report.journal import Journal, done_steps, running_step
from experiments.gpu_report.steps import Step, pending
from tkernels.isolation import Ending, Server, ServerError

# A step may take this many times its estimate, and a minute at least, before its process is ended.
_PATIENCE, _LEAST_S = 4.0, 60.0

# What a step that was begun just before the deadline may go on past it.
_GRACE_S = 20.0

RunWorker = Callable[[Sequence[Step]], Ending]
"""Has a process do the steps, in order, and says how it ended."""


@dataclass(frozen=True)
class Outcome:
    """What is left: steps that no worker has ended well, by name."""

    left: tuple[str, ...]
    workers: int


def seconds_for(step: Step) -> float:
    """How long a step may take before its process is ended."""
    return max(_LEAST_S, _PATIENCE * step.seconds)


def seconds_left(step: Step, deadline: float) -> float:
    """The same for a step that begins now, where the deadline (seconds since the epoch) comes first."""
    return min(seconds_for(step), deadline + _GRACE_S - time.time())


def supervise(
    steps: Sequence[Step],
    journal: Journal,
    deadline: float,
    run_worker: RunWorker,
    *,
    now: Callable[[], float] = time.time,
) -> Outcome:
    """Has every pending step tried once, until the deadline, in seconds since the epoch."""
    todo = pending(steps, done_steps(journal.lines()))
    workers = 0
    while todo and now() < deadline:
        before = len(journal.lines())  # an earlier run's lines say nothing of this worker
        ending = run_worker(todo)
        workers += 1
        _end_open_step(ending, journal, before, todo, now() >= deadline)
        ended = [line["step"] for line in journal.lines()[before:] if line["event"] == "end"]
        tried = [index for index, step in enumerate(todo) if step.name in ended]
        if not tried:
            break  # it died before its first step: so would the next
        todo = todo[max(tried) + 1 :]
    done = done_steps(journal.lines())
    return Outcome(tuple(step.name for step in steps if step.name not in done), workers)


def _end_open_step(ending: Ending, journal: Journal, before: int, todo: Sequence[Step], is_late: bool) -> None:
    """Writes down the end of the step that a worker left open when it ended."""
    running = running_step(journal.lines()[before:])
    if running is None:
        return
    name, _ = running
    if ending.timed_out:
        limit = next((seconds_for(step) for step in todo if step.name == name), _LEAST_S)
        reason = "stopped: out of time" if is_late else f"stopped after {limit:.0f} s"
        journal.append(name, "end", status="stopped", reason=reason)
    else:
        journal.append(name, "end", status="failed", reason=f"its process died: {ending.death}")


@contextmanager
def worker_runner(out: Path, device: str, deadline: float) -> Iterator[RunWorker]:
    """Real workers, forked from one server; what they print goes to worker.log."""
    server = Server({"TRITON_INTERPRET": "0"})
    about = {"out": str(out.resolve()), "device": device, "deadline": deadline}
    server.load("experiments.gpu_report.worker:prepare_steps", about)

    def run_worker(steps: Sequence[Step]) -> Ending:
        try:
            ending = server.run([step.name for step in steps], lambda message: None)
        except ServerError as error:
            ending = Ending(0.0, f"its server {error}")
        with open(out / "worker.log", "a", encoding="utf-8") as log:
            log.write(f"{ending.printed}\n{ending.death or 'ended'}\n")
        return ending

    try:
        yield run_worker
    finally:
        server.end()
