"""What the ranges of an arm's steps took, in rounds that are recorded apart from the timed ones, as many of them."""

from typing import Any

from experiments.runs.rows import Row
from experiments.stages.context import Context, one_line, served_fields
from experiments.stages.steady import recorded
from tkernels.spans import Breakdown, RangeTotal, breakdown


def run(context: Context) -> None:
    """Records a row for each range and clock; one that failed where the engine did."""
    plan, served = context.plan, context.served
    common = context.common(**served_fields(plan, context.arm, served))
    context.report.say("recording")
    try:
        spans, _ = recorded(plan, context.task.arm, served, context.tuning, plan.experiment.repeats)
    except Exception as error:
        context.record(Row(stage="step", **common, status="failed", reason=one_line(error)))
        return
    for row in figures(breakdown(spans)):
        context.record(Row(stage="step", **common, status="ok", **row, speed_reason=None))


def op_of(total: RangeTotal) -> tuple[str, str] | None:
    """(op, variant with its pins) of an op's range."""
    op, _, variant = total.name.partition(".")
    return (op, variant) if total.category == "op" else None


def figures(found: Breakdown) -> list[dict[str, Any]]:
    """For each range and clock the figures of a step row (see experiments.runs.rows), and op and variant."""
    step_us = found.step_ns / 1000
    rows = []
    for total in found.totals:
        op, variant = op_of(total) or (None, None)
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
                "step_us": step_us,
                "share": total.total_ns / found.step_ns if found.step_ns else 0.0,
            }
        )
    return rows
