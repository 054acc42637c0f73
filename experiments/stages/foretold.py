"""What a model says of a kernel's time on a GPU, where nothing of it can be measured.

It needs no compiler: what the kernel compiles to is kept (`tkernels.prediction.kept`), in the tree for the project's
own variants at usual sizes, in the user's cache for what `tk inspect --predict` compiled since.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from experiments.stages.context import Context, describe_error
from tkernels.contract import Case
from tkernels.prediction import kept
from tkernels.prediction.calls import case_without_values
from tkernels.prediction.foretell import Foretold, foretell
from tkernels.prediction.gpus import find_gpu
from tkernels.prediction.model import VERSION
from tkernels.variant import Variant
from tmodel.presets import cache_folder

GPU = "H100"
"""That most published figures are of, by which the model was judged."""


def kept_rows(arch: str) -> list[kept.CompiledFacts]:
    """The rows of the tree and of the user's cache for an architecture."""
    return [*kept.read(kept.table_path(arch)), *kept.read(own_table(arch))]


def own_table(arch: str) -> Path:
    """The user's own table: what `tk inspect --predict` had to compile."""
    return cache_folder() / "predicted" / f"{arch}.jsonl"


_rows_of = cache(kept_rows)


def run(context: Context) -> None:
    """Records a row for each point that a workload gives, and for each of `shapes`: of its full sizes, where it has
    some.

    A fusion that is composed of others is no kernel of an arm, but its parts are: it is for `shapes` alone.
    """
    task, (variant, pick), plan = context.task, context.variant, context.plan
    contract, pins = variant.contract, dict(pick.pins)
    for point, axes in task.points:
        if variant.kind == "triton" and (point in task.serves or not task.full_points):
            make = partial(contract.case, axes, plan.experiment.seed, plan.device)
            _record(context, point, axes, _foretell(variant, make, pins))
    if variant.kind == "triton" or variant.parts:
        for point, axes in task.full_points:
            context.say(f"{point}, foretold")
            _record(context, point, axes, _foretell(variant, partial(case_without_values, contract, axes), pins))


def _record(context: Context, point: str, axes: Mapping[str, Any], found: Foretold) -> None:
    context.record(
        stage="foretold",
        axes=dict(axes),
        point=point,
        serves=list(context.task.serves.get(point, ())) or None,
        gpu=GPU,
        predicted_us=found.us,
        predicted_limit_us=found.limit_us,
        predicted_bound=found.bound,
        predicted_from=dict(found.compiled_for) if found.compiled_for else None,
        predicted_reason=found.reason,
        model_version=VERSION,
    )


def _foretell(variant: Variant, make: Callable[[], Case], pins: Mapping[str, int]) -> Foretold:
    try:
        gpu = find_gpu(GPU)
        return foretell(variant, make(), gpu, _rows_of(gpu.facts.arch), pins)
    except Exception as error:  # a launcher, or a prepare, may be anyone's
        return Foretold(reason=describe_error(error))
