"""What the ranges of an arm's steps took, in rounds that are recorded apart from the timed ones, as many of them."""

from experiments.profiling.range_table import figures
from experiments.profiling.steady import recorded
from experiments.runs.rows import Row
from experiments.stages.context import Context, one_line, served_fields
from tkernels.spans import breakdown


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
