"""What every task is given."""

import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from experiments.planning.arms import Arm, Pick, ServedWorkload
from experiments.planning.plan import Plan
from experiments.planning.requests import requests_of
from experiments.runs.rows import Row
from experiments.serving.requests import Request
from experiments.stages.task import Task
from tkernels import Tuning
from tkernels.variant import Variant


class Report(Protocol):
    """Where a task's findings go. Each is known at once, so that what a crash leaves behind is not lost."""

    def record(self, row: Row) -> None: ...

    def keep(self, samples: Mapping[str, Any]) -> None:
        """Raw figures that are too big for rows, once."""

    def say(self, doing: str) -> None: ...


_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes of what getrusage counts memory in."""


def machine_load() -> float | None:
    """The machine's mean number of processes that run or wait to run over the last minute; None where none is known."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


@dataclass(frozen=True)
class Context:
    """A task under way. cache: the folder of quantized checkpoints. load: of the machine, when it began."""

    task: Task
    plan: Plan
    run_id: str
    tuning: Tuning
    cache: Path
    report: Report
    load: float | None = field(default_factory=machine_load)

    @property
    def arm(self) -> Arm:
        return self.plan.arms[self.task.arm]

    @property
    def variant(self) -> tuple[Variant, Pick]:
        """The task's variant, and how it is pinned."""
        pick = next(pick for pick in self.plan.picks[self.task.op] if pick.label == self.task.variant)
        return self.plan.ops[self.task.op].variants[pick.variant], pick

    @property
    def served(self) -> ServedWorkload:
        """The task's workload."""
        return self.plan.workloads[self.task.workload]

    def requests(self) -> list[Request]:
        """Those of the task's workload."""
        assert self.plan.model is not None
        return requests_of(self.served.workload, self.plan.model.config.vocab_size)

    def common(self, **more: Any) -> dict[str, Any]:
        return common_fields(self.plan, self.task, self.run_id, **more)

    def record(self, row: Row) -> None:
        """Records a row with the memory that this process has held, and how busy the machine is."""
        on_cuda = self.plan.device.type == "cuda"
        peaks = {
            "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT,
            "device_peak_bytes": torch.cuda.max_memory_allocated(self.plan.device) if on_cuda else None,
        }
        loads = {"load_before": self.load, "load_after": machine_load()}
        self.report.record(row.model_copy(update=peaks | loads))


def common_fields(plan: Plan, task: Task, run_id: str, **more: Any) -> dict[str, Any]:
    """The fields that every row of a task shares."""
    return {
        "run_id": run_id,
        "task": task.key,
        "replicate": task.replicate,
        "dtype": str((more.get("axes") or {}).get("activation", plan.dtype_name)),
        "device": plan.device.type,
        **more,
    }


def served_fields(plan: Plan, arm: Arm, served: ServedWorkload) -> dict[str, Any]:
    """Of an arm at a workload, the fields that say which they are."""
    return {"arm": labels_of(plan, arm), "settings": {**arm.settings, **served.settings}, "workload": served.name}


def plan_settings(plan: Plan) -> dict[str, Any]:
    """What tells a plan from the others of its sweep: its model and dtype, where they are swept."""
    return {name: value for name, value in plan.arms[0].settings.items() if name in ("model", "dtype")}


def op_fields(plan: Plan, op: str, variant: str) -> dict[str, Any]:
    """Of a variant, by its label, the fields that say which it is."""
    return {"arm": {op: variant}, "settings": plan_settings(plan), "op": op, "variant": variant}


def peer_fields(plan: Plan, served: ServedWorkload, peer: str) -> dict[str, Any]:
    """Of a peer at a workload, the fields that say which they are. It knows no arm, but is of its plan's model and
    dtype.
    """
    return {"arm": {}, "settings": {**plan_settings(plan), **served.settings}, "workload": served.name, "peer": peer}


def labels_of(plan: Plan, arm: Arm) -> dict[str, str]:
    """op -> the label of the variant that an arm calls: of all that serve it, also those that it does not name."""
    return {op: pick.label for op, pick in sorted(plan.running(arm).items())}


def one_line(error: BaseException) -> str:
    """An exception as a row's reason."""
    text = " ".join(str(error).split())
    return in_words(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def in_words(reason: str) -> str:
    """The reason; that memory ran out is said in the same words, whoever says it."""
    unsaid = "out of memory" not in reason and any(sign in reason for sign in ("MemoryError", "can't allocate memory"))
    return f"out of memory: {reason}" if unsaid else reason
