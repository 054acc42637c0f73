"""The processes that steps are done in: children of one server that compiles, each for as many steps as share it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.gpu_report.steps import Step
from experiments.gpu_report.supervisor import OnEnded, RunStep
from experiments.sweep.tasks import Ended
from tkernels.isolation import Ending, Server, ServerError


@contextmanager
def step_runner(out: Path, run_id: str, device: str) -> Iterator[RunStep]:
    """Runs steps, once the server is ready; what they print goes to worker.log in the report's folder `out`."""
    about = {"out": str(out.resolve()), "run_id": run_id, "device": device}
    with Server({"TRITON_INTERPRET": "0"}) as server:
        server.load("experiments.gpu_report.worker:prepare_steps", about)
        try:
            server.wait()
        except ServerError as error:
            _log(out, "", "", f"its server {error}")

        def run_step(steps: Sequence[Step], ended: OnEnded) -> None:
            _run(server, steps, out, ended)

        yield run_step


def _run(server: Server, steps: Sequence[Step], out: Path, on_ended: OnEnded) -> None:
    """Has a child do the steps; tells each as the next begins, and the last with how the process ended."""
    by_key, current, began = {step.key: step for step in steps}, Ended(steps[0]), time.monotonic()

    def hear(message: Mapping[str, Any]) -> None:
        nonlocal current, began
        if "step" not in message:
            current.hear(message)
            return
        if current.doing:
            end()
        current, began = Ended(by_key[message["step"]]), time.monotonic()

    def end() -> None:
        current.seconds = time.monotonic() - began
        on_ended(current)

    try:
        ending = server.run([asdict(step) for step in steps], hear, steps[0].timeout)
    except ServerError as error:
        ending = Ending(0.0, death=f"its server {error}")
    current.death = ending.death or current.death
    if ending.printed or ending.death is not None:
        _log(out, current.task.key, ending.printed, ending.death)
    end()


def _log(out: Path, key: str, printed: str, death: str | None) -> None:
    with open(out / "worker.log", "a", encoding="utf-8") as log:
        log.write(f"{key}\n{printed}\n{death or 'ended'}\n")
