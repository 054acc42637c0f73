"""Carrying a task out, in whatever process it was given to."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.document import parse_document
from experiments.planning.plan import Plan, make_sweep
from experiments.runs.rows import Row
from experiments.stages import check, engine, kernels, peers, quantization, steps
from experiments.stages.context import Context
from experiments.sweep.tasks import Phase, Setup, Task
from tkernels import Tuning

_STAGES: Mapping[Phase, Callable[[Context], None]] = {
    "check": check.run,
    "kernels": kernels.run,
    "engine": engine.run,
    "peers": peers.run,
    "step": steps.run,
    "quantization": quantization.run,
}

Send = Callable[[str], None]
"""Takes a message as one line of JSON."""


@dataclass(frozen=True)
class _Messages:
    """A report whose every line is sent as soon as it is known."""

    send: Send

    def record(self, row: Row) -> None:
        self.send(f'{{"row": {row.as_json()}}}')

    def keep(self, samples: Mapping[str, Any]) -> None:
        self.send(json.dumps({"samples": samples}))

    def say(self, doing: str) -> None:
        self.send(json.dumps({"doing": doing}))


def plans_of(setup: Setup) -> list[Plan]:
    """The run's plans, from its resolved experiment."""
    return list(make_sweep(parse_document(setup.resolved, "resolved.yaml", Path("/"), ())).plans)


def carry_out(task: Task, plans: list[Plan], setup: Setup, send: Send) -> None:
    """Does the task, and sends its messages, as in Ended.hear. What is raised is a fault of the stage itself: what goes
    wrong in a variant, an engine or a peer is a row.
    """
    tuning = Tuning(setup.tuning_mode, Path(setup.tuning_folder))
    context = Context(task, plans[task.plan], setup.run_id, tuning, Path(setup.cache), _Messages(send))
    _STAGES[task.phase](context)
    send(json.dumps({"used": tuning.used}))
