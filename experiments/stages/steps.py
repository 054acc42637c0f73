"""What the ranges of an arm's steps took, in rounds that are recorded apart from the timed ones, as many of them."""

from typing import Any

from experiments.stages.context import Context, describe_error
from experiments.stages.steady import recorded
from tkernels.spans import Breakdown, RangeTotal, breakdown


def run(context: Context) -> None:
    """Records a row for each range and clock; one that failed where the engine did."""
    plan = context.plan
    context.say("recording")
    try:
        spans, _ = recorded(plan, context.task.arm, context.served, context.tuning, plan.experiment.repeats)
    except Exception as error:
        context.record("failed", reason=describe_error(error))
        return
    for columns in range_columns(breakdown(spans)):
        context.record(**columns, speed_reason=None)


def _op_and_variant(total: RangeTotal) -> tuple[str | None, str | None]:
    """Of an op's range; a section's is the same for every variant."""
    if total.category == "op":
        op, _, variant = total.name.partition(".")
        return op, variant
    return (total.name.partition(" ")[0] if total.category == "section" else None), None


def range_columns(found: Breakdown) -> list[dict[str, Any]]:
    """For each range and clock the figures of a step row (see experiments.runs.rows), and op and variant."""
    rows = []
    for total in found.totals:
        op, variant = _op_and_variant(total)
        rows.append(
            {
                "range": total.name,
                "category": total.category,
                "clock": total.clock,
                "op": op,
                "variant": variant,
                "calls": total.calls,
                "total_us": total.total_ns / 1000,
                "self_us": None if total.self_ns is None else total.self_ns / 1000,
                "steps": found.steps,
                "step_us": found.step_ns / 1000,
                "share": total.total_ns / found.step_ns if found.step_ns else 0.0,
            }
        )
    return rows
