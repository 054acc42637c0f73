"""An experiment's structure, without torch: its axes laid out, and every value of every part as the schema wants it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from experiments.document import Document, ExperimentError, Narrowed, PathParts, in_order
from experiments.planning.arms import Arm, Pick, ServedWorkload
from experiments.planning.axes import Combination, entries, multiplied, read_branches
from experiments.planning.names import POLICIES, Known, known_names, name_problems, with_whole_path
from experiments.planning.shape_axes import Shape, expanded_shapes
from experiments.planning.zip_and_exclude import sound_groups, without_excluded, written_groups
from experiments.schema import (
    AnyWorkload,
    Experiment,
    SchedulerOptions,
    Validated,
    fit_problems,
    validate,
)


@dataclass(frozen=True)
class Part:
    """What one model runs in one dtype. `document`: with single values where lists were axes.

    Of a document that has faults, what is sound: experiment and arms are without what is wrong, so that the rest can be
    looked at all the same. is_typed: whether its dtype may be known. partial: the arms, by index, of whose scheduler
    options some were wrong. workload_places: of each workload of the experiment, its index in `document`.
    """

    document: Document
    experiment: Experiment
    arms: tuple[Arm, ...]
    is_typed: bool
    partial: frozenset[int]
    workload_places: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A document's parts, and all that is wrong with its structure and names. is_ruled: whether it is known what `zip`
    and `exclude` leave of the arms.
    """

    document: Document
    parts: tuple[Part, ...]
    problems: tuple[str, ...]
    is_ruled: bool


def parts_of(document: Document) -> list[Part]:
    """Every part of the experiment; ExperimentError has all that is wrong with structure and names, also where only
    the full sizes are concerned.
    """
    layouts = layouts_of(document)
    if problems := [problem for layout in layouts for problem in layout.problems]:
        raise ExperimentError(in_order(problems))
    return list(layouts[0].parts)


def layouts_of(document: Document) -> list[Layout]:
    """That of the document and, where it has full sizes, that of these."""
    return [_layout(some) for some in (document, document.full) if some is not None]


def _layout(document: Document) -> Layout:
    problems = list(document.faults)
    begun = len(problems)
    branches = read_branches(document, [group for _, group in written_groups(document)], problems)
    groups = sound_groups(document, branches, problems)
    points = multiplied(document, branches, groups, problems)
    left = without_excluded(document, branches, points, problems) or points
    is_ruled = len(problems) == begun
    shapes = expanded_shapes(document, problems)
    names = known_names(document)
    problems += [*_unnamed_workloads(document), *name_problems(document, names), *fit_problems(document)]
    swept = _swept(left)
    parts = []
    for some in _by_model_and_dtype(left):
        narrowed = _narrowed(document, some, shapes)
        found = validate(narrowed)
        problems += found.problems
        is_ruled = is_ruled and not any(path[:1] in (("zip",), ("exclude",)) for path in found.faulty)
        if (part := _part(narrowed, found, some, swept, names)) is not None:
            parts.append(part)
    return Layout(document, tuple(parts), tuple(dict.fromkeys(problems)), is_ruled)


def _part(
    document: Document, found: Validated, points: Sequence[Combination], swept: Sequence[str], names: Known
) -> Part | None:
    """None where so little is sound that nothing could be said of it."""
    faulty = {path for path in found.faulty if path}
    experiment = found.experiment or validate(replace(document, data=_without(document.data, faulty))).experiment
    if experiment is None:
        return None
    wrong = {path[1] if len(path) > 1 else None for path in faulty if path[0] == "workload"}
    served = list(_served(points)) if None not in wrong else []
    places = tuple(place for place in range(len(served)) if place not in wrong)
    workloads = {served[place]: one for place, one in zip(places, experiment.workload, strict=True)}
    options = entries(document.data.get("scheduler")) or [{}]
    arms: list[Arm] = []
    partial = set[int]()
    for same in _by_engine(points):
        arm, is_whole = _arm(same, workloads, swept, names, options[same[0].branch.options])
        if not is_whole:
            partial.add(len(arms))
        arms.append(arm)
    wrong_keys = {path[0] for path in faulty}
    is_typed = "dtype" not in wrong_keys and ("model" not in wrong_keys or experiment.dtype is not None)
    return Part(document, experiment, tuple(arms), is_typed, frozenset(partial), places)


def _without(data: Mapping[str, Any], faulty: Iterable[PathParts]) -> dict[str, Any]:
    """The document's data less what is wrong: an op, a workload, or else the whole section."""
    left = dict(data)
    dropped = set[Any]()
    for section, *inside in faulty:
        given = left.get(str(section))
        if section == "workload" and inside and isinstance(given, list):
            dropped.add(inside[0])
        elif section in ("kernels", "shapes") and inside and isinstance(given, dict):
            left[str(section)] = {op: value for op, value in given.items() if op != inside[0]}
        else:
            left.pop(str(section), None)
    if dropped and "workload" in left:
        left["workload"] = [one for index, one in enumerate(left["workload"]) if index not in dropped]
    return {"name": "unnamed", **left}


def _unnamed_workloads(document: Document) -> list[str]:
    names = [entry.get("name", "") for entry in entries(document.data.get("workload")) if isinstance(entry, dict)]
    if len(set(map(repr, names))) == len(names):
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


def _by_engine(points: Sequence[Combination]) -> list[list[Combination]]:
    """The points that differ in nothing but the workload, together."""
    engines: dict[tuple[int, ...], list[Combination]] = {}
    for point in points:
        engine = [point.picked[name] for name in point.branch.axes if not name.startswith("workload.")]
        engines.setdefault((point.branch.options, *engine), []).append(point)
    return list(engines.values())


def _arm(
    points: Sequence[Combination],
    workloads: Mapping[tuple[int, ...], AnyWorkload],
    swept: Sequence[str],
    names: Known,
    options: Any,
) -> tuple[Arm, bool]:
    """The arm of an engine's points, of what is sound: its variants, scheduler options and workloads; and whether all
    its scheduler options are.
    """
    first = points[0]
    picks = {op: first.value(name) for op, name in first.below("kernels").items()}
    known = {op: names.variants.get(op, ()) for op in picks}
    scheduler = {option: first.value(name) for option, name in first.below("scheduler").items()}
    sound = {option: value for option, value in scheduler.items() if _is_option(option, value)}
    served = [
        _served_workload(point, workloads[key])
        for point in points
        if point.branch.entry is not None and (key := _workload_key(point)) in workloads
    ]
    outer = {name: str(first.label(name)) for name in ("model", "dtype") if name in swept}
    arm = Arm(
        picks={op: pick for op, pick in picks.items() if isinstance(pick, Pick) and pick.variant in known[op]},
        scheduler=sound,
        swept=tuple(_key(name) for name in swept),
        batching=first.value("batching"),
        workloads=tuple(served),
        **outer,
    )
    is_known = isinstance(options, dict) and options.keys() <= SchedulerOptions.model_fields.keys()
    return arm, is_known and len(sound) == len(scheduler)


def _is_option(name: str, value: Any) -> bool:
    """Whether one value of a scheduler option is as it should be."""
    try:
        SchedulerOptions.model_validate({name: [value]})
    except ValidationError:
        return False
    return name not in POLICIES or value in POLICIES[name]


def _served_workload(point: Combination, workload: AnyWorkload) -> ServedWorkload:
    names = point.below("workload").values()
    settings = {name: point.value(name) for name in names if len(point.branch.axes[name].values) > 1}
    return ServedWorkload(workload.name, settings, workload)


def _key(name: str) -> str:
    """An axis as `Arm.swept` has it: an op is called by its name alone."""
    return name.removeprefix("kernels.")
