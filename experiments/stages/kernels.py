"""Each variant's time at each point where its check was ok. No other variant gets one."""

from typing import Any

from experiments.arms import Pick
from experiments.points import Point
from experiments.rows import CheckRow, KernelRow
from experiments.stages.context import Context, one_line
from experiments.yardstick import Yardstick
from tkernels.device import device_facts
from tkernels.launch import Kernel
from tkernels.roofline import roofline
from tkernels.timing import time_call

INTERPRETED = "interpreted on a CPU: not measured"


def run(context: Context) -> None:
    """Records one row per variant and point whose check row says ok."""
    passed = {
        (row.op, row.variant, row.point)
        for row in context.folder.rows
        if isinstance(row, CheckRow) and row.status == "ok"
    }
    work = [
        (op, point, pick)
        for op, picks in context.plan.picks.items()
        for point in context.points[op]
        for pick in picks
        if (op, pick.label, point.name) in passed
    ]
    with context.step("kernels", len(work)) as step:
        for op, point, pick in work:
            step.say(f"{op}.{pick.label} {point.name}")
            context.folder.record(_time(context, op, point, pick))
            step.advance("")


def _time(context: Context, op: str, point: Point, pick: Pick) -> KernelRow:
    plan = context.plan
    variant = plan.ops[op].variants[pick.variant]
    common = context.common(arm={op: pick.label}, op=op, variant=pick.label, axes=dict(point.axes), point=point.name)
    try:
        case = variant.contract.case(point.axes, plan.experiment.seed, plan.device)
        kernel = Kernel(variant, context.tuning, dict(pick.pins))
        config = None
        if variant.kind == "triton":
            axes, device = variant.contract.bind_axes(variant.contract.bind_arguments((), case.inputs))
            config = kernel.config(axes, device).as_dict()
        figures: dict[str, Any] = {"bytes_moved": case.bytes_moved, "flops": case.flops, "config": config}
        if variant.kind == "triton" and plan.device.type == "cpu":
            return KernelRow(**common, status="ok", **figures, **_not_timed(INTERPRETED))
        yardstick = Yardstick() if plan.device.type == "cpu" else None
        timing = time_call(lambda: kernel(**case.inputs), plan.device, between=yardstick)
        limit = roofline(timing.median_us, case.bytes_moved, case.flops, common["dtype"], device_facts(plan.device))
    except Exception as error:
        return KernelRow(**common, status="failed", reason=one_line(error))
    return KernelRow(
        **common,
        status="ok",
        **figures,
        median_us=timing.median_us,
        iqr_us=timing.iqr_us,
        min_us=timing.min_us,
        max_us=timing.max_us,
        samples_us=list(timing.samples_us),
        timer=timing.timer,
        speed_reason=None,
        roofline_fraction=limit.fraction,
        roofline_bound=limit.bound,
        roofline_reason=limit.reason,
        yardstick_us=yardstick.median_us if yardstick is not None else None,
    )


def _not_timed(reason: str) -> dict[str, Any]:
    nothing: dict[str, Any] = dict.fromkeys(("median_us", "iqr_us", "min_us", "max_us", "samples_us", "timer"))
    return {
        **nothing,
        "speed_reason": reason,
        "roofline_fraction": None,
        "roofline_bound": None,
        "roofline_reason": reason,
    }
