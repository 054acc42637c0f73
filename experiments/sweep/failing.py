"""The rows of a task whose process did not come to its end."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.planning.plan import Plan
from experiments.quantization.models import list_quantized_models
from experiments.runs.rows import Row
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


def failed_rows(plan: Plan, run_id: str, ended: Ended) -> list[Row]:
    """Rows of status failed, with how the process ended and what it was at; rows that it had sent stand beside them.

    One, but of a process that had not begun: then one for each point, for at none it would have gone better.
    """
    if ended.task.phase not in ("check", "kernels"):
        return [_failed_row(plan, run_id, ended)]
    points: Sequence[tuple[Any, Any]] = ended.without_row or [(None, None)]  # it ended after its last point
    return [_failed_row(plan, run_id, ended, *point) for point in (points[:1] if ended.doing else points)]


def _failed_row(
    plan: Plan, run_id: str, ended: Ended, point: str | None = None, axes: Mapping[str, Any] | None = None
) -> Row:
    task = ended.task
    at = f" (at: {ended.doing})" if ended.doing else ""
    reason = f"{ended.death or 'its process ended without a row'}{at}"
    common: dict[str, Any] = {"status": "failed", "reason": reason}

    def of(**more: Any) -> dict[str, Any]:
        return {**common_fields(plan, task, run_id, **more), **common}

    match task.phase:
        case "check" | "kernels":
            about = of(**op_fields(plan, task.op, task.variant), axes=axes and dict(axes), point=point)
            about |= {} if task.phase == "kernels" else {"seed": plan.experiment.seed, "replay": None}
        case "engine" | "step":
            about = of(**served_fields(plan, plan.arms[task.arm], plan.workloads[task.workload]))
        case "peers":
            about = of(**peer_fields(plan, plan.workloads[task.workload], task.peer))
        case "quantization":
            quantization = plan.experiment.quantization
            assert quantization is not None
            models = [None, *list_quantized_models(quantization)]
            which = {"arm": labels_of(plan, plan.arms[0]), "settings": plan_settings(plan)}
            about = of(**which) | settings_of(models[task.checkpoint])
    return Row(stage=task.phase, **about)
