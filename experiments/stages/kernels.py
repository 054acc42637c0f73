"""A variant's time at each point where its check was ok."""

from collections.abc import Callable, Mapping
from typing import Any

from experiments.runs.rows import Row
from experiments.stages.context import Context, one_line, op_fields
from experiments.stages.yardstick import Yardstick
from tkernels.device import device_facts
from tkernels.launch import Kernel
from tkernels.measurement import prepare, timed_call
from tkernels.roofline import roofline
from tkernels.timing import time_call

INTERPRETED = "interpreted on a CPU: not measured"


_FEWEST, _MOST, _SAMPLED_US = 20, 200, 40_000.0
"""Samples. A process that was just forked has cold pages and caches, and on a CPU a neighbour's burst lasts longer than
a short call's 20 samples: on two cores with six busy processes, the medians of 69 processes, over the yardstick's,
spread by 9.8% with 20 and 3.8% with 200 (swiglu on [16, 256], 7 us), 6.9% and 4.1% (rms_norm), 12% and 9% (prefill).
"""


def run(context: Context) -> None:
    """Records one row per point."""
    for name, axes in context.task.points:
        context.report.say(name)
        context.record(_time(context, name, axes))


def _time(context: Context, point: str, at: Mapping[str, Any]) -> Row:
    plan, op = context.plan, context.task.op
    variant, pick = context.variant
    serves = list(context.task.serves.get(point, ())) or None
    common = context.common(**op_fields(plan, op, pick.label), axes=dict(at), point=point, serves=serves)
    try:
        case = variant.contract.case(at, plan.experiment.seed, plan.device)
        ready = prepare(variant, case)  # as loading a model does it, before any time is taken
        kernel = Kernel(variant, context.tuning, dict(pick.pins))
        config = None
        if variant.kind == "triton":
            axes, device = variant.contract.bind_axes(variant.contract.bind_arguments((), ready.case.inputs))
            config = kernel.config(axes, device).as_dict()
        figures: dict[str, Any] = {"bytes_moved": case.bytes_moved, "flops": case.flops, "config": config}
        if variant.kind == "triton" and plan.device.type == "cpu":
            return Row(stage="kernels", **common, status="ok", **figures, **_not_timed(INTERPRETED))
        yardstick = Yardstick() if plan.device.type == "cpu" else None
        call = timed_call(kernel, ready.arguments)
        count = _num_samples(call) if yardstick is not None else _FEWEST
        timing = time_call(call, plan.device, samples=count, between=yardstick)
        limit = roofline(timing.median_us, case.bytes_moved, case.flops, common["dtype"], device_facts(plan.device))
    except Exception as error:
        return Row(stage="kernels", **common, status="failed", reason=one_line(error))
    return Row(
        stage="kernels",
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


def _num_samples(call: Callable[[], object]) -> int:
    """Of a call on a CPU, so many that they take _SAMPLED_US."""
    sample = max(100.0, time_call(call, "cpu", samples=2).median_us)  # a short call is repeated within a sample
    return min(_MOST, max(_FEWEST, round(_SAMPLED_US / sample)))


def _not_timed(reason: str) -> dict[str, Any]:
    nothing: dict[str, Any] = dict.fromkeys(("median_us", "iqr_us", "min_us", "max_us", "samples_us", "timer"))
    return {
        **nothing,
        "speed_reason": reason,
        "roofline_fraction": None,
        "roofline_bound": None,
        "roofline_reason": reason,
    }
