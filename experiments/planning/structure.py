"""An experiment's structure, without torch: its axes laid out, and every value of every part as the schema wants it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.document import Document, ExperimentError, Narrowed, PathParts, in_order, read_document
from experiments.planning.arms import Arm, ServedWorkload
from experiments.planning.axes import Combination, choices_of, distinct, entries, label_of, multiplied, read_branches
from experiments.planning.names import name_problems, with_whole_path
from experiments.planning.shape_axes import Shape, expanded_shapes
from experiments.planning.zip_and_exclude import sound_groups, without_excluded, written_groups
from experiments.schema import (
    AnyWorkload,
    Experiment,
    SchedulerOptions,
    VariantChoice,
    validate,
)


@dataclass(frozen=True)
class Part:
    """What one model runs in one dtype. `document`: with single values where lists were axes."""

    document: Document
    experiment: Experiment
    arms: tuple[Arm, ...]


def parts_of(document: Document) -> list[Part]:
    """Every part of the experiment; ExperimentError has all that is wrong with structure and names, also where only
    the full sizes are concerned.
    """
    problems: list[str] = []
    found: list[Part] = []
    for some in (document, document.full):
        if some is not None:
            parts = _parts(some, problems)
            found = found or parts
    if problems:
        raise ExperimentError(in_order(problems))
    return found


def refuse_early(file: Path, overrides: Sequence[str]) -> None:
    """Raises ExperimentError with what is wrong, where the live registry would have nothing to add to it."""
    document = read_document(file, overrides)
    try:
        parts_of(document)
    except ExperimentError:
        if not _says_more(document):
            raise


def _says_more(document: Document) -> bool:
    """Whether the registry may have something against the document that names alone do not show: pins and shapes."""
    kernels = document.data.get("kernels")
    choices = [c for op in (kernels if isinstance(kernels, dict) else {}) for c in choices_of(document, op)]
    pinned = any(isinstance(choice, VariantChoice) and choice.pins for choice in choices)
    return pinned or bool(document.data.get("shapes")) or bool(document.data.get("variants_from"))


def _parts(document: Document, problems: list[str]) -> list[Part]:
    problems += document.faults
    branches = read_branches(document, [group for _, group in written_groups(document)])
    groups = sound_groups(document, branches, problems)
    try:
        points = multiplied(branches, groups)
    except ValueError as error:
        problems.append(document.problem((), str(error)))
        return []
    left = without_excluded(document, branches, points, problems) or points
    shapes = expanded_shapes(document, problems)
    problems += _unnamed_workloads(document)
    problems += name_problems(document)
    swept = _swept(left)
    parts = []
    for some in _by_model_and_dtype(left):
        narrowed = _narrowed(document, some, shapes)
        try:
            experiment = validate(narrowed)
        except ExperimentError as error:
            problems += error.problems
        else:
            parts.append(Part(narrowed, experiment, _arms(some, experiment, swept)))
    return parts


def _unnamed_workloads(document: Document) -> list[str]:
    names = [entry.get("name", "") for entry in entries(document.data.get("workload")) if isinstance(entry, dict)]
    if len(distinct("workload", names).values) == len(names):
        return []
    return [document.problem(("workload",), "each workload of a list needs a name of its own")]


def _by_model_and_dtype(points: Sequence[Combination]) -> list[list[Combination]]:
    groups: dict[tuple[int | None, int | None], list[Combination]] = {}
    for point in points:
        groups.setdefault((point.picked.get("model"), point.picked.get("dtype")), []).append(point)
    return list(groups.values())


def _swept(points: Sequence[Combination]) -> tuple[str, ...]:
    """The axes of engines that have several values in the points, to lack one being another value: model and dtype,
    kernels, scheduler options as the schema orders them, batching.
    """
    names = dict.fromkeys(name for point in points for name in point.branch.axes)
    ordered = [name for name in names if not name.startswith(("scheduler.", "workload.")) and name != "batching"]
    ordered += [name for option in SchedulerOptions.model_fields if (name := f"scheduler.{option}") in names]
    return tuple(
        name
        for name in [*ordered, "batching"]
        if len({repr(point.value(name)) if name in point.picked else None for point in points}) > 1
    )


def _served(points: Sequence[Combination]) -> dict[tuple[int, ...], Combination]:
    """The first point of every workload, in order; of none where the experiment has none."""
    served: dict[tuple[int, ...], Combination] = {}
    for point in points:
        if point.branch.entry is not None:
            served.setdefault(_workload_key(point), point)
    return dict(sorted(served.items()))


def _workload_key(point: Combination) -> tuple[int, ...]:
    return (point.branch.entry or 0, *(point.picked[name] for name in point.below("workload").values()))


def _narrowed(document: Document, points: Sequence[Combination], shapes: Mapping[str, Sequence[Shape]]) -> Narrowed:
    """The document of the points, which have one model and one dtype."""
    data = dict(document.data)
    origins: dict[PathParts, PathParts] = {}
    for name in ("model", "dtype"):
        if name in points[0].picked:
            data[name] = points[0].value(name)
            place = points[0].place(name)
            origins[(name,)] = (name,) if place is None else (name, place)
    served = _served(points)
    if served:
        written = entries(document.data["workload"])
        data["workload"] = [
            _single(document, point, written[point.branch.entry or 0], index, origins)
            for index, point in enumerate(served.values())
        ]
    if shapes:
        data["shapes"] = dict(document.data["shapes"])
    for op, some in shapes.items():
        data["shapes"][op] = [dict(shape.values) for shape in some]
        for index, shape in enumerate(some):
            origins[("shapes", op, index)] = ("shapes", op, shape.entry)
            for axis, place in shape.places.items():
                origins[("shapes", op, index, axis)] = ("shapes", op, shape.entry, axis, place)
    return Narrowed(data, document.folder, document.places, document.text, whole=document, origins=origins)


def _single(document: Document, point: Combination, entry: Any, index: int, origins: dict[PathParts, PathParts]) -> Any:
    """An entry of `workload` with one value in every field, which is the `index`-th of the narrowed document."""
    assert point.branch.entry is not None
    origin: PathParts = ("workload", point.branch.entry)
    origins[("workload", index)] = origin
    single = with_whole_path(entry, document.folder) if isinstance(entry, dict) else entry
    for field, name in point.below("workload").items():
        place = point.place(name)
        target, path = single, field.split(".")
        for part in path[:-1]:
            target[part] = dict(target[part])
            target = target[part]
        target[path[-1]] = point.value(name)
        if place is not None:
            origins[("workload", index, *path)] = (*origin, *path, place)
    return single


def _arms(points: Sequence[Combination], experiment: Experiment, swept: Sequence[str]) -> tuple[Arm, ...]:
    """One arm for all points that differ in nothing but the workload."""
    workloads = dict(zip(_served(points), experiment.workload, strict=True))
    arms: dict[tuple[int, ...], list[Combination]] = {}
    for point in points:
        engine = [point.picked[name] for name in point.branch.axes if not name.startswith("workload.")]
        arms.setdefault((point.branch.options, *engine), []).append(point)
    made = []
    for same in arms.values():
        first = same[0]
        served = [_served_workload(point, workloads[_workload_key(point)]) for point in same if workloads]
        outer = {name: str(label_of(first.value(name))) for name in ("model", "dtype") if name in swept}
        made.append(
            Arm(
                picks={op: first.value(name) for op, name in first.below("kernels").items()},
                scheduler={option: first.value(name) for option, name in first.below("scheduler").items()},
                swept=tuple(_key(name) for name in swept),
                batching=first.value("batching"),
                workloads=tuple(served),
                **outer,
            )
        )
    return tuple(made)


def _served_workload(point: Combination, workload: AnyWorkload) -> ServedWorkload:
    names = point.below("workload").values()
    settings = {name: point.value(name) for name in names if len(point.branch.axes[name].values) > 1}
    return ServedWorkload(workload.name, settings, workload)


def _key(name: str) -> str:
    """An axis as `Arm.swept` has it: an op is called by its name alone."""
    return name.removeprefix("kernels.")
