"""Round one: a document laid out as parts and arms, every type, name and axis checked. Nothing here needs torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.document import Document, ExperimentError, PathParts, entries, read_document, sort_problems
from experiments.planning.arms import Arm, ServedWorkload
from experiments.planning.axes import Combination, arm_grid, multiply, shape_grids
from experiments.planning.model_names import whole_sources
from experiments.planning.written_checks import written_problems
from experiments.planning.zip_and_exclude import sound_groups, without_excluded, written_groups
from experiments.schema import AnyWorkload, Experiment, ModelSource, SchedulerOptions
from experiments.schema.experiment import read_experiment
from experiments.schema.names import known_names
from tsched.options import DtypeName


@dataclass(frozen=True)
class Part:
    """What one model runs in one dtype.

    Attributes:
        model_place: where the model is written.
    """

    model: ModelSource | None
    model_place: PathParts
    dtype: DtypeName | None
    arms: tuple[Arm, ...]


@dataclass(frozen=True)
class Shape:
    """A point of `shapes`.

    Attributes:
        entry: the index of the entry that it is of.
        places: axis -> the index of its value in the list that was written.
    """

    entry: int
    values: Mapping[str, int | bool | str]
    places: Mapping[str, int]


@dataclass(frozen=True)
class Layout:
    """A document in which round one found nothing wrong.

    Attributes:
        shapes: op -> the points of `shapes`, the last list of an entry varying fastest.
    """

    document: Document
    experiment: Experiment
    parts: tuple[Part, ...]
    shapes: Mapping[str, tuple[Shape, ...]]


def lay_out(document: Document) -> list[Layout]:
    """The layout of the document and, where it has full sizes, that of these.

    Raises:
        ExperimentError: all faults of round one, in both.
    """
    problems: list[str] = []
    layouts = [_lay_out_sizes(some, problems) for some in (document, document.full) if some is not None]
    if problems:
        raise ExperimentError(sort_problems(problems))
    return [layout for layout in layouts if layout is not None]


def refuse_unsound(file: Path, overrides: Sequence[str]) -> bool:
    """Round one of a file, for a command to call before it imports torch.

    Returns:
        Whether a model is served or quantized.

    Raises:
        ExperimentError: All faults of round one.
    """
    experiments = [layout.experiment for layout in lay_out(read_document(file, overrides))]
    return any(one.workload or one.quantization for one in experiments)


def _lay_out_sizes(document: Document, problems: list[str]) -> Layout | None:
    """The layout, or None and what is wrong with it."""
    names = known_names(document.folder, document.data.get("variants_from"))
    found = [*document.faults, *written_problems(document, names)]
    arms, shapes = arm_grid(document, [group for _, group in written_groups(document)], found), shape_grids(document)
    grids = [arms, *shapes.values()]
    groups = sound_groups(document, grids, found)
    points = {grid.section: multiply(document, grid, groups, found) for grid in grids}
    points = without_excluded(document, grids, points, found)
    served = _served_points(points[""])
    data = dict(document.data)
    if entries(data.get("model")):
        data["model"] = whole_sources(data["model"], document.folder)
    if served:
        data["workload"] = [_make_single_workload(document, point) for point in served.values()]

    def written(path: PathParts) -> PathParts:
        return _written_path(path, list(served.values()))

    experiment, faults = read_experiment(document, data, names, written)
    problems += [*found, *faults]
    if experiment is None or found:
        return None
    workloads = dict(zip(served, experiment.workload, strict=True))
    swept = _swept_axes(points[""])
    parts = tuple(_make_part(experiment, some, workloads, swept) for some in _by_model_and_dtype(points[""]))
    typed = {op: tuple(_make_shape(experiment, op, one) for one in points[grid.section]) for op, grid in shapes.items()}
    return Layout(document, experiment, parts, typed)


WorkloadKey = tuple[int, ...]
"""An entry of `workload`, and which value of each of its axes."""


def _workload_key(point: Combination) -> WorkloadKey:
    return (point.branch.entry or 0, *(point.picked[name] for name in point.axes_below("workload").values()))


def _served_points(points: Sequence[Combination]) -> dict[WorkloadKey, Combination]:
    """The first point of every workload, in order; of none where the experiment has none."""
    served: dict[WorkloadKey, Combination] = {}
    for point in points:
        if point.branch.entry is not None:
            served.setdefault(_workload_key(point), point)
    return dict(sorted(served.items()))


def _make_single_workload(document: Document, point: Combination) -> Any:
    """The point's entry of `workload` with one value in every field."""
    assert point.branch.entry is not None
    entry = entries(document.data["workload"])[point.branch.entry]
    single = with_whole_path(entry, document.folder) if isinstance(entry, dict) else entry
    for field, name in point.axes_below("workload").items():
        *outer, last = field.split(".")
        target = single
        for part in outer:
            target[part] = dict(target[part])
            target = target[part]
        target[last] = point.value(name)
    return single


def with_whole_path(workload: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """An entry of `workload` whose trace is found from anywhere."""
    file = workload.get("file")
    return {**workload, "file": str((folder / file).resolve())} if isinstance(file, str) else dict(workload)


def _written_path(path: PathParts, served: Sequence[Combination]) -> PathParts:
    """The path in the document of one in its data with single workloads: a swept field's is that of its value."""
    if path[:1] != ("workload",) or len(path) < 2 or not served:
        return path
    point = served[int(path[1])]
    inside = path[2:]
    for field, name in point.axes_below("workload").items():
        parts = tuple(field.split("."))
        place = point.place(name)
        if inside[: len(parts)] == parts and place is not None:
            inside = (*parts, place, *inside[len(parts) :])
    return ("workload", point.branch.entry or 0, *inside)


def _swept_axes(points: Sequence[Combination]) -> tuple[str, ...]:
    """The axes of engines that have several values in the points, to lack one being another value: model and dtype,
    kernels, scheduler options as the schema orders them, batching.
    """
    names = dict.fromkeys(name for point in points for name in point.branch.axes)
    ordered = [name for name in names if name.partition(".")[0] in ("model", "dtype", "kernels")]
    ordered += [name for option in SchedulerOptions.model_fields if (name := f"scheduler.{option}") in names]
    return tuple(
        name
        for name in [*ordered, "batching"]
        if len({repr(point.value(name)) if name in point.picked else None for point in points}) > 1
    )


def _by_model_and_dtype(points: Sequence[Combination]) -> list[list[Combination]]:
    groups: dict[tuple[int | None, int | None], list[Combination]] = {}
    for point in points:
        groups.setdefault((point.picked.get("model"), point.picked.get("dtype")), []).append(point)
    return list(groups.values())


def _by_engine(points: Sequence[Combination]) -> list[list[Combination]]:
    """The points that differ in nothing but the workload, together."""
    engines: dict[tuple[int, ...], list[Combination]] = {}
    for point in points:
        engine = [point.picked[name] for name in point.branch.axes if name.partition(".")[0] != "workload"]
        engines.setdefault((point.branch.options, *engine), []).append(point)
    return list(engines.values())


def _make_part(
    experiment: Experiment,
    points: Sequence[Combination],
    workloads: Mapping[WorkloadKey, AnyWorkload],
    swept: Sequence[str],
) -> Part:
    """The part of points that have one model and one dtype."""
    first = points[0]
    places = {name: first.place(name) or 0 if name in first.picked else 0 for name in ("model", "dtype")}
    return Part(
        model=experiment.model[places["model"]] if experiment.model else None,
        model_place=("model", places["model"]),
        dtype=experiment.dtype[places["dtype"]] if experiment.dtype else None,
        arms=tuple(_make_arm(same, workloads, swept) for same in _by_engine(points)),
    )


def _make_arm(points: Sequence[Combination], workloads: Mapping[WorkloadKey, AnyWorkload], swept: Sequence[str]) -> Arm:
    """The arm of one engine's points."""
    first = points[0]
    outer = {name: str(first.label(name)) for name in ("model", "dtype") if name in swept}
    return Arm(
        picks={op: first.value(name) for op, name in first.axes_below("kernels").items()},
        scheduler={option: first.value(name) for option, name in first.axes_below("scheduler").items()},
        swept=tuple(name.removeprefix("kernels.") for name in swept),
        batching=first.value("batching"),
        workloads=tuple(
            _make_served_workload(point, workloads[_workload_key(point)])
            for point in points
            if point.branch.entry is not None
        ),
        **outer,
    )


def _make_served_workload(point: Combination, workload: AnyWorkload) -> ServedWorkload:
    names = point.axes_below("workload").values()
    settings = {name: point.value(name) for name in names if len(point.branch.axes[name].values) > 1}
    return ServedWorkload(workload.name, settings, workload, point.branch.entry or 0)


def _make_shape(experiment: Experiment, op: str, point: Combination) -> Shape:
    entry = point.branch.entry or 0
    typed = experiment.shapes[op][entry]
    places = {axis: point.place(name) for axis, name in point.axes_below(f"shapes.{op}").items()}
    values = {axis: typed[axis][place or 0] for axis, place in places.items()}
    return Shape(entry, values, {axis: place for axis, place in places.items() if place is not None})
