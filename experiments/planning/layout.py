"""Round one: a document laid out as parts and arms, every type, name and axis checked. Nothing here needs torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from experiments.document import Document, ExperimentError, PathParts, entries, read_document, sort_problems
from experiments.planning.arms import Arm, Pick, ServedWorkload
from experiments.planning.axes import Point, is_pin, values_below
from experiments.planning.model_names import whole_source
from experiments.planning.written_checks import written_problems
from experiments.planning.zip_and_exclude import find_points
from experiments.schema import AnyWorkload, Experiment, HttpWorkload, ModelSource, SchedulerOptions
from experiments.schema.experiment import read_experiment
from experiments.schema.names import known_names
from tsched.options import DtypeName


@dataclass(frozen=True)
class Part:
    """What one model runs in one dtype.

    Attributes:
        model_place: Where the model is written.
    """

    model: ModelSource | None
    model_place: PathParts
    dtype: DtypeName | None
    arms: tuple[Arm, ...]


@dataclass(frozen=True)
class Shape:
    """A point of `shapes`.

    Attributes:
        entry: The index of the entry that it is of.
        places: Axis -> the index of its value in the list that was written.
    """

    entry: int
    values: Mapping[str, int | bool | str]
    places: Mapping[str, int]


@dataclass(frozen=True)
class Layout:
    """A document in which round one found nothing wrong.

    Attributes:
        shapes: Op -> the points of `shapes`, the last list of an entry varying fastest.
    """

    document: Document
    experiment: Experiment
    parts: tuple[Part, ...]
    shapes: Mapping[str, tuple[Shape, ...]]


def lay_out(document: Document) -> list[Layout]:
    """The layout of the document and, where it has full sizes, that of these.

    Raises:
        ExperimentError: All faults of round one, in both.
    """
    problems: list[str] = []
    layouts = [_lay_out_sizes(some, problems) for some in (document, document.full) if some is not None]
    if problems:
        raise ExperimentError(sort_problems(problems))
    return [layout for layout in layouts if layout is not None]


def refuse_unsound(file: Path, overrides: Sequence[str]) -> bool:
    """Round one of a file, for a command to call before it imports torch.

    Returns:
        Whether a model is served here, or quantized.

    Raises:
        ExperimentError: All faults of round one.
    """
    experiments = [layout.experiment for layout in lay_out(read_document(file, overrides))]
    served_here = (not isinstance(workload, HttpWorkload) for one in experiments for workload in one.workload)
    return any(served_here) or any(one.quantization for one in experiments)


def _lay_out_sizes(document: Document, problems: list[str]) -> Layout | None:
    """The layout, or None and what is wrong with it."""
    names = known_names(document.folder, document.data.get("variants_from"))
    found = [*document.faults, *written_problems(document, names)]
    points = find_points(document, lambda parts, message: found.append(document.problem(parts, message)))
    arms = points.pop("")
    served = {_workload_key(point): point for point in reversed(arms) if "workload" in point}
    singles = [served[key] for key in sorted(served)]
    data = _with_single_workloads(document, singles)
    experiment, faults = read_experiment(document, data, names, lambda path: _written_path(path, singles))
    problems += [*found, *faults]
    if experiment is None or found:
        return None
    workloads = dict(zip(sorted(served), experiment.workload, strict=True))
    shapes = {section.removeprefix("shapes."): some for section, some in points.items()}
    return Layout(
        document,
        experiment,
        _make_parts(experiment, arms, workloads),
        {op: tuple(_make_shape(experiment, op, point) for point in some) for op, some in shapes.items()},
    )


def _with_single_workloads(document: Document, served: Sequence[Point]) -> dict[str, Any]:
    """The document's data with one entry of `workload` for each of the points, and models found from anywhere."""
    data = dict(document.data)
    if models := entries(data.get("model")):
        data["model"] = [whole_source(one, document.folder) for one in models]
    if served:
        data["workload"] = [_make_single_workload(document, point) for point in served]
    return data


WorkloadKey = tuple[int, ...]
"""An entry of `workload`, and which value of each of its axes."""


def _workload_key(point: Point) -> WorkloadKey:
    return (point["workload"].index, *(value.index for value in values_below(point, "workload").values()))


def _make_single_workload(document: Document, point: Point) -> Any:
    """The point's entry of `workload` with one value in every field."""
    entry = point["workload"].value
    single = with_whole_path(entry, document.folder) if isinstance(entry, dict) else entry
    for field, value in values_below(point, "workload").items():
        *outer, last = field.split(".")
        target = single
        for part in outer:
            target[part] = dict(target[part])
            target = target[part]
        target[last] = value.value
    return single


def with_whole_path(workload: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """An entry of `workload` whose files are found from anywhere."""
    found = dict(workload)
    for key in ("file", "key_file"):
        if isinstance(file := workload.get(key), str):
            found[key] = str((folder / file).resolve())
    if isinstance(inner := workload.get("requests"), dict):
        found["requests"] = with_whole_path(inner, folder)
    return found


def _written_path(path: PathParts, singles: Sequence[Point]) -> PathParts:
    """The path in the document of one in its data with single workloads: a swept field's is that of its value."""
    if path[:1] != ("workload",) or len(path) < 2 or not singles:
        return path
    point, inside = singles[int(path[1])], path[2:]
    for field, value in values_below(point, "workload").items():
        parts = tuple(field.split("."))
        if inside[: len(parts)] == parts:
            inside = (*parts, value.place, *inside[len(parts) :])
    return ("workload", point["workload"].place, *inside)


def _swept_axes(points: Sequence[Point]) -> tuple[str, ...]:
    """The axes of engines that have several values in the points, to lack one being another value: model and dtype,
    kernels, scheduler options as the schema orders them, batching.
    """
    kernels = (path for path in points[0] if path.startswith("kernels.") and not is_pin(path))
    options = (f"scheduler.{option}" for option in SchedulerOptions.model_fields)
    return tuple(
        name
        for name in ("model", "dtype", *kernels, *options, "batching")
        if len({repr(point[name].value) if name in point else None for point in points}) > 1
    )


def _part_key(point: Point) -> tuple[int, ...]:
    return tuple(point[name].index for name in ("model", "dtype") if name in point)


def _engine_key(point: Point) -> tuple[int, ...]:
    """What points have in common that differ in nothing but the workload."""
    return tuple(value.index for path, value in point.items() if not path.startswith("workload") and not is_pin(path))


def _make_parts(
    experiment: Experiment, points: Sequence[Point], workloads: Mapping[WorkloadKey, AnyWorkload]
) -> tuple[Part, ...]:
    swept = _swept_axes(points)
    parts = []
    for _, of_part in groupby(points, _part_key):  # the points are sorted so that what has one key is together
        arms = [list(same) for _, same in groupby(of_part, _engine_key)]
        model, dtype = arms[0][0].get("model"), arms[0][0].get("dtype")
        parts.append(
            Part(
                model=experiment.model[model.place] if experiment.model and model else None,
                model_place=("model", model.place if model else 0),
                dtype=experiment.dtype[dtype.place] if experiment.dtype and dtype else None,
                arms=tuple(_make_arm(same, workloads, swept) for same in arms),
            )
        )
    return tuple(parts)


def _make_arm(points: Sequence[Point], workloads: Mapping[WorkloadKey, AnyWorkload], swept: Sequence[str]) -> Arm:
    """The arm of one engine's points."""
    first = points[0]
    served = [_make_served_workload(point, workloads[_workload_key(point)]) for point in points if "workload" in point]
    return Arm(
        picks={
            op: value.value for op, value in values_below(first, "kernels").items() if isinstance(value.value, Pick)
        },
        scheduler={option: value.value for option, value in values_below(first, "scheduler").items()},
        swept=tuple(name.removeprefix("kernels.") for name in swept),
        batching=first["batching"].value,
        workloads=tuple(one for one in served if not isinstance(one.workload, HttpWorkload)),
        http_workloads=tuple(one for one in served if isinstance(one.workload, HttpWorkload)),
        **{name: str(first[name].label) for name in ("model", "dtype") if name in swept},
    )


def _make_served_workload(point: Point, workload: AnyWorkload) -> ServedWorkload:
    fields = values_below(point, "workload").items()
    settings = {f"workload.{field}": value.value for field, value in fields if value.is_swept}
    return ServedWorkload(workload.name, settings, workload, point["workload"].index)


def _make_shape(experiment: Experiment, op: str, point: Point) -> Shape:
    entry = point[f"shapes.{op}"].index
    places = {axis: value.place for axis, value in values_below(point, f"shapes.{op}").items()}
    values = {axis: experiment.shapes[op][entry][axis][place] for axis, place in places.items()}
    return Shape(entry, values, places)
