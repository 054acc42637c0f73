"""Where variants are foretold: at every realistic point of their op, and at every mark's."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.document import read_document
from experiments.gpu_report.marks import MARKS
from experiments.gpu_report.worth import report_points
from experiments.planning.plan import make_sweep
from experiments.planning.points import points_of as planned_points
from tkernels.contract import Axes, Case
from tkernels.prediction.calls import case_without_values
from tkernels.prediction.foretell import Foretold, foretell
from tkernels.prediction.gpus import Gpu
from tkernels.prediction.kept import CompiledFacts
from tkernels.prediction.model import VERSION
from tkernels.registry import Registry
from tkernels.variant import Variant

QUICKSTART = Path(__file__).parent.parent / "quickstart.yaml"


@dataclass(frozen=True)
class PredictedRow:
    """What the model says of a variant at a point on a GPU. is_mark: a mark is judged there."""

    op: str
    variant: str
    point: str
    axes: Axes
    gpu: str
    is_mark: bool
    foretold: Foretold

    def as_json(self) -> dict[str, Any]:
        found = self.foretold
        return {
            "op": self.op, "variant": self.variant, "point": self.point, "axes": dict(self.axes), "gpu": self.gpu,
            "model_version": VERSION,
            "predicted_us": found.us, "predicted_limit_us": found.limit_us, "predicted_bound": found.bound,
            "predicted_from": dict(found.compiled_for) if found.compiled_for else None,
            "predicted_reason": found.reason,
        }  # fmt: skip


def points_of(variants: Iterable[Variant]) -> list[tuple[Variant, str, Axes]]:
    """Each variant that the model can say something of, at each of its op's points, by name."""
    return [
        (variant, name, axes)
        for variant in variants
        if variant.launch is not None or variant.parts
        for name, axes in report_points(variant.contract).items()
    ]


def quickstart_points() -> list[tuple[Variant, str, Axes]]:
    """The Triton variants of the quickstart at its own shapes, which a run of it shows on any CPU."""
    (plan,) = make_sweep(read_document(QUICKSTART, ())).plans
    return [
        (variant, "quickstart", point.axes)
        for op, points in planned_points(plan).items()
        for point in points
        for pick in plan.picks[op]
        if (variant := plan.ops[op].variants[pick.variant]).kind == "triton"
    ]


def predict(
    points: Sequence[tuple[Variant, str, Axes]],
    gpu: Gpu,
    rows: Sequence[CompiledFacts],
    on_done: Callable[[str], None] = lambda name: None,
) -> Iterator[PredictedRow]:
    """A row for each variant at each point, by op, point and variant."""
    marked = {(mark.op, mark.point) for mark in MARKS}
    cases: dict[tuple[str, str], Case] = {}
    order = {variant.contract.name: place for place, (variant, _, _) in enumerate(points)}
    for variant, point, axes in sorted(points, key=lambda one: order[one[0].contract.name]):
        place = (variant.contract.name, point)
        if place not in cases:
            cases[place] = case_without_values(variant.contract, axes)
        said = _say(variant, cases[place], gpu, rows)
        yield PredictedRow(variant.contract.name, variant.name, point, axes, gpu.name, place in marked, said)
        on_done(f"{place[0]}.{variant.name}")


def _say(variant: Variant, case: Case, gpu: Gpu, rows: Sequence[CompiledFacts]) -> Foretold:
    try:
        return foretell(variant, case, gpu, rows)
    except Exception as error:  # a launcher, or a prepare, may be anyone's
        return Foretold(reason=f"{type(error).__name__}: {error}")


def predict_by_name(
    ops: Registry, wanted: Iterable[tuple[str, str, str]], gpu: Gpu, rows: Sequence[CompiledFacts]
) -> Mapping[tuple[str, str, str], Foretold]:
    """(op, variant, point) -> what the model says; none of a name that there is not."""
    known = {}
    for op, variant, point in wanted:
        if (
            op in ops
            and variant in ops[op].variants
            and (axes := report_points(ops[op].contract).get(point)) is not None
        ):
            known[op, variant, point] = _say(
                ops[op].variants[variant], case_without_values(ops[op].contract, axes), gpu, rows
            )
    return known
