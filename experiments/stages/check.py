"""A variant at each of its points, once, against the float64 oracle."""

from collections.abc import Mapping
from typing import Any

from experiments.peers import slack_of
from experiments.runs.rows import Row
from experiments.stages.context import Context, in_words, one_line, op_fields
from tkernels.device import device_facts
from tkernels.launch import Kernel
from tkernels.measurement import prepare
from tkernels.verification.check import check_case


def run(context: Context) -> None:
    """Records one row per point."""
    for name, axes in context.task.points:
        context.report.say(name)
        context.record(_check(context, name, axes))


def _check(context: Context, point: str, at: Mapping[str, Any]) -> Row:
    plan, seed, op = context.plan, context.plan.experiment.seed, context.task.op
    variant, pick = context.variant
    common = context.common(**op_fields(plan, op, pick.label), axes=dict(at), point=point)
    try:
        case = variant.contract.case(at, seed, plan.device)
        axes, device = variant.contract.bind_axes(variant.contract.bind_arguments((), case.inputs))
        if reason := variant.unsupported_reason(axes, device, device_facts(device)):
            return Row(stage="check", **common, status="unsupported", reason=reason)
        ready = prepare(variant, case)  # what will be timed
        arguments = variant.contract.bind_arguments((), ready.case.inputs)
        axes, device = variant.contract.bind_axes(arguments)
        config = None
        if variant.kind == "triton":
            config = Kernel(variant, context.tuning, dict(pick.pins)).config(axes, device, arguments)
        result = check_case(ready.variant, ready.case, config, slack=slack_of(variant))
    except Exception as error:
        return Row(stage="check", **common, status="failed", reason=one_line(error), seed=seed, replay=None)
    if result.status == "unsupported":
        return Row(stage="check", **common, status="unsupported", reason=result.reason)
    if result.status == "failed":
        reason = in_words(result.reason or "")
        return Row(stage="check", **common, status="failed", reason=reason, seed=seed, replay=result.replay)
    ratios: dict[str, Any] = {"max_error_ratio": result.max_ratio, "rms_error_ratio": result.rms_ratio}
    if result.status == "ok":
        return Row(stage="check", **common, status="ok", seed=seed, **ratios)
    reason = result.reason or "; ".join(
        f"{name}{list(v.index)}: expected {v.expected:.9g}, got {v.got:.9g} ({v.reason})"
        for name, v in result.verdicts.items()
        if not v.ok
    )
    return Row(stage="check", **common, status="wrong", reason=reason, seed=seed, replay=result.replay, **ratios)
