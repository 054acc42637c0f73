"""Runs a report's steps one after the other, each in a process of its own, and records their rows, until time is up."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from experiments.gpu_report.steps import Step
from experiments.runs.folder import RunFolder
from experiments.sweep.local import run_task
from experiments.sweep.tasks import Ended
from tkernels.isolation import Server

# A step may take this many times its estimate, and a minute at least, before its process is ended.
_PATIENCE, _LEAST_S = 4.0, 60.0

GRACE_S = 20.0
"""What a step that was begun just before the deadline may go on past it."""

RunStep = Callable[[Step], Ended]
"""Has a process do the step within its time-out; what comes back says what it was doing once it had begun."""


def seconds_for(step: Step) -> float:
    """How long a step may take before its process is ended."""
    return max(_LEAST_S, _PATIENCE * step.seconds)


def run_steps(
    steps: Sequence[Step],
    folder: RunFolder,
    deadline: float,
    run_step: RunStep,
    *,
    now: Callable[[], float] = time.time,
) -> None:
    """Tries every step once, until the deadline, in seconds since the epoch. A step whose process did not come to its
    end has a row that says why, and is tried again when the report goes on.
    """
    for step in steps:
        left = deadline - now()
        if left <= 0:
            return
        ended = run_step(replace(step, timeout=min(seconds_for(step), left + GRACE_S)))
        if not ended.doing:
            return  # its process died before it began the step: so would the next
        rows = list(ended.rows)
        if ended.death is not None or not rows:
            late = "out of time: " if now() >= deadline else ""
            reason = f"{late}{ended.death or 'its process ended without a row'}"
            rows.append(step.row(folder.run_id, "report", "failed", reason))
        folder.record(rows, ended.samples)
        folder.use("nearest", ended.used)


@contextmanager
def step_runner(folder: RunFolder, device: str) -> Iterator[RunStep]:
    """Runs steps in children of one server that compiles; what they print goes to worker.log."""
    about = {"out": str(folder.path.resolve()), "run_id": folder.run_id, "device": device}
    with Server({"TRITON_INTERPRET": "0"}) as server:
        server.load("experiments.gpu_report.worker:prepare_steps", about)

        def run_step(step: Step) -> Ended:
            ended = run_task(server, step, lambda task, doing: None)
            if ended.printed or ended.death is not None:
                with open(folder.path / "worker.log", "a", encoding="utf-8") as log:
                    log.write(f"{step.key}\n{ended.printed}\n{ended.death or 'ended'}\n")
            return ended

        yield run_step
