"""What a model says of an interpreted kernel's time on a GPU, where nothing of it can be measured.

It needs no compiler: what the kernel compiles to is kept (`tkernels.prediction.kept`), in the tree for the project's
own variants at usual sizes, in the user's cache for what `tk inspect --predict` compiled since.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from experiments.stages.context import Context, describe_error
from tkernels.prediction import kept
from tkernels.prediction.foretell import Foretold, foretell
from tkernels.prediction.gpus import find_gpu
from tkernels.prediction.model import VERSION
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


def record(context: Context, point: str, axes: Mapping[str, Any]) -> None:
    """Records the model's row of the task's variant at a point."""
    found = _foretell(context, axes)
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


def _foretell(context: Context, axes: Mapping[str, Any]) -> Foretold:
    variant, pick = context.variant
    try:
        case = variant.contract.case(axes, context.plan.experiment.seed, context.plan.device)
        gpu = find_gpu(GPU)
        return foretell(variant, case, gpu, _rows_of(gpu.facts.arch), dict(pick.pins))
    except Exception as error:  # a launcher, or a prepare, may be anyone's
        return Foretold(reason=describe_error(error))
