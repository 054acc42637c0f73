"""The row of a task whose process did not come to its end."""

from typing import Any

from experiments.planning.plan import Plan
from experiments.quantization.models import quantized_models
from experiments.runs.rows import CheckRow, EngineRow, KernelRow, PeerRow, QuantizationRow, Row, StepRow
from experiments.stages.context import (
    common_fields,
    labels_of,
    op_fields,
    peer_fields,
    plan_settings,
    served_fields,
)
from experiments.stages.quantization import settings_of
from experiments.sweep.tasks import Ended


def failed_row(plan: Plan, run_id: str, ended: Ended) -> Row:
    """A row of status failed, with how the process ended and what it was at; rows that it had sent stand beside it."""
    task = ended.task
    at = f" (at: {ended.doing})" if ended.doing else ""
    reason = f"{ended.death or 'its process ended without a row'}{at}"
    common: dict[str, Any] = {"status": "failed", "reason": reason}

    def of(**more: Any) -> dict[str, Any]:
        return {**common_fields(plan, task, run_id, **more), **common}

    match task.phase:
        case "check" | "kernels":
            done = {row.point for row in ended.rows if isinstance(row, CheckRow | KernelRow)}
            at_point = next(((name, dict(axes)) for name, axes in task.points if name not in done), (None, None))
            about = of(**op_fields(plan, task.op, task.variant), axes=at_point[1], point=at_point[0])
            if task.phase == "kernels":
                return KernelRow(**about)
            return CheckRow(**about, seed=plan.experiment.seed, replay=None)
        case "engine" | "step":
            about = of(**served_fields(plan, plan.arms[task.arm], plan.workloads[task.workload]))
            return EngineRow(**about) if task.phase == "engine" else StepRow(**about)
        case "peers":
            return PeerRow(**of(**peer_fields(plan, plan.workloads[task.workload], task.peer)))
        case "quantization":
            quantization = plan.experiment.quantization
            assert quantization is not None
            models = [None, *quantized_models(quantization)]
            which = {"arm": labels_of(plan, plan.arms[0]), "settings": plan_settings(plan)}
            return QuantizationRow(**of(**which), **settings_of(models[task.checkpoint]))
