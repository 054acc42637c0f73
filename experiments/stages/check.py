"""A variant at each of its points, once, against the float64 oracle."""

from collections.abc import Mapping
from typing import Any

from experiments.peers import slack_of
from experiments.stages.context import Context, describe_error, name_lack_of_memory
from tkernels.launch import Kernel
from tkernels.measurement import prepare_supported
from tkernels.variant import UnsupportedError
from tkernels.verification.check import CheckResult, check_case


def run(context: Context) -> None:
    """Records one row per point."""
    for point, axes in context.task.points:
        context.say(point)
        context.record(axes=dict(axes), point=point, **_check(context, axes))


def _check(context: Context, at: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that say how a point's check went."""
    plan, seed = context.plan, context.plan.experiment.seed
    variant, pick = context.variant
    try:
        case = variant.contract.case(at, seed, plan.device)
        ready = prepare_supported(variant, case)  # what will be timed
        arguments = variant.contract.bind_arguments((), ready.case.inputs)
        axes, device = variant.contract.bind_axes(arguments)
        config = None
        if variant.kind == "triton":
            config = Kernel(variant, context.tuning, dict(pick.pins)).config(axes, device, arguments)
        return _columns(check_case(ready.variant, ready.case, config, slack=slack_of(variant)), seed)
    except UnsupportedError as error:
        return {"status": "unsupported", "reason": str(error)}
    except (Exception, SystemExit) as error:
        return {"status": "failed", "reason": describe_error(error), "seed": seed, "replay": None}


def _columns(result: CheckResult, seed: int) -> dict[str, Any]:
    ratios: dict[str, Any] = {"max_error_ratio": result.max_ratio, "rms_error_ratio": result.rms_ratio}
    match result.status:
        case "ok":
            return {"seed": seed, **ratios}
        case "unsupported":
            return {"status": "unsupported", "reason": result.reason}
        case "failed":
            reason = name_lack_of_memory(result.reason)
            return {"status": "failed", "reason": reason, "seed": seed, "replay": result.replay}
    reason = result.reason or "; ".join(
        f"{name}{list(v.index)}: expected {v.expected:.9g}, got {v.got:.9g} ({v.reason})"
        for name, v in result.verdicts.items()
        if not v.ok
    )
    return {"status": "wrong", "reason": reason, "seed": seed, "replay": result.replay, **ratios}
