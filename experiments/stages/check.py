"""Each variant at each point, once, against the float64 oracle."""

from typing import Any

from experiments.arms import Pick
from experiments.peers import slack_of
from experiments.points import Point
from experiments.rows import CheckRow
from experiments.stages.context import Context, one_line
from tkernels.check import check_case
from tkernels.device import device_facts
from tkernels.launch import Kernel


def run(context: Context) -> None:
    """Records one row per variant and point, and fills `context.verdicts` with those that are wrong or failed."""
    work = [
        (op, point, pick) for op, picks in context.plan.picks.items() for point in context.points[op] for pick in picks
    ]
    with context.step("check", len(work)) as step:
        for op, point, pick in work:
            step.say(f"{op}.{pick.label} {point.name}")
            row = _check(context, op, point, pick)
            context.folder.record(row)
            if row.status in ("wrong", "failed"):
                context.verdicts.setdefault((op, pick.label), (row.status, row.reason or ""))
            step.advance("")


def _check(context: Context, op: str, point: Point, pick: Pick) -> CheckRow:
    plan, seed = context.plan, context.plan.experiment.seed
    variant = plan.ops[op].variants[pick.variant]
    common = context.common(arm={op: pick.label}, op=op, variant=pick.label, axes=dict(point.axes), point=point.name)
    try:
        case = variant.contract.case(point.axes, seed, plan.device)
        arguments = variant.contract.bind_arguments((), case.inputs)
        axes, device = variant.contract.bind_axes(arguments)
        config = None
        if variant.kind == "triton" and variant.unsupported_reason(axes, device, device_facts(device)) is None:
            config = Kernel(variant, context.tuning, dict(pick.pins)).config(axes, device, arguments)
        result = check_case(variant, case, config, slack=slack_of(variant))
    except Exception as error:
        return CheckRow(**common, status="failed", reason=one_line(error), seed=seed, replay=None)
    if result.status == "unsupported":
        return CheckRow(**common, status="unsupported", reason=result.reason)
    if result.status == "failed":
        return CheckRow(**common, status="failed", reason=result.reason, seed=seed, replay=result.replay)
    ratios: dict[str, Any] = {"max_error_ratio": result.max_ratio, "rms_error_ratio": result.rms_ratio}
    if result.status == "ok":
        return CheckRow(**common, status="ok", seed=seed, **ratios)
    reason = result.reason or "; ".join(
        f"{name}{list(v.index)}: expected {v.expected:.9g}, got {v.got:.9g} ({v.reason})"
        for name, v in result.verdicts.items()
        if not v.ok
    )
    return CheckRow(**common, status="wrong", reason=reason, seed=seed, replay=result.replay, **ratios)
