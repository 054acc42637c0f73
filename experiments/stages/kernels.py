"""A variant's time at each point where its check was ok."""

from collections.abc import Callable, Mapping
from typing import Any

from experiments.stages import foretold
from experiments.stages.context import Context, describe_error, dtype_at
from experiments.stages.yardstick import Yardstick
from tkernels.device import device_facts
from tkernels.launch import Kernel
from tkernels.measurement import prepare, timed_call
from tkernels.roofline import roofline
from tkernels.timing import time_call

_INTERPRETED = "interpreted on a CPU: not measured"

_FEWEST, _MOST, _SAMPLED_US = 20, 200, 40_000.0
"""Samples. A process that was just forked has cold pages and caches, and on a CPU a neighbour's burst lasts longer than
a short call's 20 samples: on two cores with six busy processes, the medians of 69 processes, over the yardstick's,
spread by 9.8% with 20 and 3.8% with 200 (swiglu on [16, 256], 7 us), 6.9% and 4.1% (rms_norm), 12% and 9% (prefill).
"""


def run(context: Context) -> None:
    """Records one row per point, and on a CPU those that a model foretells."""
    for point, axes in context.task.points:
        context.say(point)
        serves = list(context.task.serves.get(point, ())) or None
        context.record(axes=dict(axes), point=point, serves=serves, **_time(context, axes))
    if context.plan.device.type == "cpu" and context.task.replicate == 0:
        foretold.run(context)


def _time(context: Context, at: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that say how long a point's call takes."""
    plan = context.plan
    variant, pick = context.variant
    try:
        case = variant.contract.case(at, plan.experiment.seed, plan.device)
        ready = prepare(variant, case)  # as loading a model does it, before any time is taken
        kernel = Kernel(variant, context.tuning, dict(pick.pins))
        figures: dict[str, Any] = {"bytes_moved": case.bytes_moved, "flops": case.flops, "config": None}
        if variant.kind == "triton":
            axes, device = variant.contract.bind_axes(variant.contract.bind_arguments((), ready.case.inputs))
            figures["config"] = kernel.config(axes, device).as_dict()
            if plan.device.type == "cpu":
                return {**figures, **_NOT_TIMED}
        yardstick = Yardstick() if plan.device.type == "cpu" else None
        call = timed_call(kernel, ready.arguments)
        count = _count_samples(call) if yardstick is not None else _FEWEST
        timing = time_call(call, plan.device, samples=count, between=yardstick)
        facts = device_facts(plan.device)
        limit = roofline(timing.median_us, case.bytes_moved, case.flops, dtype_at(plan, at), facts)
    except Exception as error:
        return {"status": "failed", "reason": describe_error(error)}
    return {
        **figures,
        "median_us": timing.median_us,
        "iqr_us": timing.iqr_us,
        "min_us": timing.min_us,
        "max_us": timing.max_us,
        "samples_us": list(timing.samples_us),
        "timer": timing.timer,
        "speed_reason": None,
        "roofline_fraction": limit.fraction,
        "roofline_bound": limit.bound,
        "roofline_reason": limit.reason,
        "yardstick_us": yardstick.median_us if yardstick is not None else None,
    }


def _count_samples(call: Callable[[], object]) -> int:
    """Of a call on a CPU, so many samples that they take _SAMPLED_US."""
    sample = max(100.0, time_call(call, "cpu", samples=2).median_us)  # a short call is repeated within a sample
    return min(_MOST, max(_FEWEST, round(_SAMPLED_US / sample)))


_NOT_TIMED: Mapping[str, Any] = {
    **dict.fromkeys(("median_us", "iqr_us", "min_us", "max_us", "samples_us", "timer")),
    **dict.fromkeys(("roofline_fraction", "roofline_bound")),
    **dict.fromkeys(("speed_reason", "roofline_reason"), _INTERPRETED),
}
