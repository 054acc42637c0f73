"""A task under way: what it is given, what its rows say of it, and where they go."""

import json
import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from experiments.planning.arms import Arm, Pick, ServedWorkload
from experiments.planning.plan import Plan
from experiments.planning.requests import requests_of
from experiments.quantization.models import QuantizedModel, list_quantized_models
from experiments.runs.rows import Row, Stage, Status
from experiments.schema import HttpWorkload
from experiments.serving.requests import Request
from experiments.stages.task import Task
from tkernels import Tuning
from tkernels.variant import Variant

Send = Callable[[Mapping[str, Any]], None]
"""Takes a message of a task: what kind it is -> its value, which JSON can hold. They are sent at once, so that what a
crash leaves behind is not lost.
"""


def measure_load() -> float:
    """The machine's mean number of processes that run or wait to run over the last minute."""
    return os.getloadavg()[0]


def measure_process(device: torch.device, load: float) -> dict[str, Any]:
    """The columns of the memory that this process held, and of how busy the machine is.

    Args:
        load: When the task began.
    """
    return {
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "device_peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "load_before": load,
        "load_after": measure_load(),
    }


@dataclass(frozen=True)
class Context:
    """A task under way. cache: the folder of quantized checkpoints. load: of the machine, when it began."""

    task: Task
    plan: Plan
    run_id: str
    tuning: Tuning
    cache: Path
    send: Send
    load: float = field(default_factory=measure_load)

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
        return workload_of(self.plan, self.task)

    @property
    def directory(self) -> Path:
        """The model's."""
        assert self.plan.model is not None
        return self.plan.model.directory()

    def requests(self) -> list[Request]:
        """Those of the task's workload."""
        assert self.plan.model is not None
        return requests_of(self.served.requests, self.plan.model.config.vocab_size)

    def record(self, status: Status = "ok", *, stage: Stage | None = None, **columns: Any) -> None:
        """Records a row: these columns, what it is of, the memory that this process held, how busy the machine is.

        Args:
            stage: Another than the task's own.
        """
        row = Row(
            stage=stage or self.task.phase,
            status=status,
            **measure_process(self.plan.device, self.load),
            **task_fields(self.plan, self.task, self.run_id, columns.get("axes")),
            **columns,
        )
        self.send({"row": json.loads(row.as_json())})

    def keep(self, samples: Mapping[str, Any]) -> None:
        """Keeps raw figures that are too big for rows, once."""
        self.send({"samples": samples})

    def say(self, doing: str) -> None:
        """Says what the task is at."""
        self.send({"doing": doing})


def workload_of(plan: Plan, task: Task) -> ServedWorkload:
    """What a task serves."""
    return (plan.http_workloads if task.phase == "http" else plan.workloads)[task.workload]


def task_fields(plan: Plan, task: Task, run_id: str, axes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The columns by which every row of a task says what it is of.

    Args:
        axes: Of the row, where it is about a point.
    """
    fields: dict[str, Any] = {"run_id": run_id, "task": task.key, "replicate": task.replicate}
    fields |= {"dtype": dtype_at(plan, axes or {}), "device": plan.device.type, "settings": plan_settings(plan)}
    match task.phase:
        case "check" | "kernels":
            return {**fields, "arm": {task.op: task.variant}, "op": task.op, "variant": task.variant}
        case "quantization":
            model = quantized_model(plan, task)
            return {
                **fields,
                "arm": label_running_variants(plan, plan.arms[0]),
                "method": "dense" if model is None else model.told,
                "bits": None if model is None else model.bits,
                "group_size": None if model is None else model.group_size,
            }
    served = workload_of(plan, task)
    fields["workload"] = served.name
    if isinstance(served.workload, HttpWorkload):  # what runs there, only that server knows
        settings = {key: value for key, value in served.settings.items() if key != "workload.url"}
        return {**fields, "arm": {}, "dtype": "unknown", "settings": settings, "url": served.workload.url}
    if task.phase == "peers":  # it knows no arm, but is of its plan's model and dtype
        return {**fields, "arm": {}, "settings": {**fields["settings"], **served.settings}, "peer": task.peer}
    arm = plan.arms[task.arm]
    return {**fields, "arm": label_running_variants(plan, arm), "settings": {**arm.settings, **served.settings}}


def dtype_at(plan: Plan, axes: Mapping[str, Any]) -> str:
    """The name of the activations' dtype at a point of an op."""
    return str(axes.get("activation", plan.dtype_name))


def plan_settings(plan: Plan) -> dict[str, Any]:
    """What tells a plan from the others of its sweep: its model and dtype, where they are swept."""
    return {name: value for name, value in plan.arms[0].settings.items() if name in ("model", "dtype")}


def label_running_variants(plan: Plan, arm: Arm) -> dict[str, str]:
    """op -> the label of the variant that an arm calls: of all that serve it, also those that it does not name."""
    return {op: pick.label for op, pick in sorted(plan.running(arm).items())}


def quantized_model(plan: Plan, task: Task) -> QuantizedModel | None:
    """The quantized model that a task is about; None is the dense one."""
    assert plan.experiment.quantization is not None
    return [None, *list_quantized_models(plan.experiment.quantization)][task.checkpoint]


def describe_error(error: BaseException) -> str:
    """An exception as a row's reason, in one line."""
    text = " ".join(str(error).split())
    return name_lack_of_memory(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def name_lack_of_memory(reason: str) -> str:
    """The reason; that memory ran out is said in the same words, whoever says it."""
    unsaid = "out of memory" not in reason and any(sign in reason for sign in ("MemoryError", "can't allocate memory"))
    return f"out of memory: {reason}" if unsaid else reason
