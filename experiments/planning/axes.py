"""Which lists of an experiment's YAML are axes, and the points that they multiply to: its arms, and each op's shapes.

Read from the data as it was written: what is no list is one value, and the schema says what is wrong with it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate, product
from typing import Any

from experiments.document import Document, PathParts, Report, as_mapping, entries
from experiments.planning.arms import Pick
from experiments.planning.model_names import model_labels, whole_source
from experiments.schema import SchedulerOptions
from experiments.schema.experiment import written_choices
from experiments.schema.workload import AXES as WORKLOAD_AXES

MOST_POINTS = 100_000
"""Of arms, before exclusions: lists that multiply to more are a mistake, and would take a minute to write down. Pins of
one variant too.
"""

MOST_SHAPES = 10_000
"""Of an op: more would be checked and timed for hours."""


@dataclass(frozen=True, eq=False)
class Value:
    """One of the distinct values of an axis.

    Attributes:
        value: As it was written; of an op, its Pick.
        label: What it is called in rows and rules.
        index: Which of the axis's values it is.
        place: Its index in the list that was written.
        is_swept: Whether the axis has others.
    """

    value: Any
    label: Any
    index: int
    place: int
    is_swept: bool = False


Point = Mapping[str, Value]
"""What is at each path that zip and exclude may name, "scheduler.block_size" or a pin,
"kernels.paged_decode.split_kv.num_splits"; the index of the set of options is at "scheduler", that of the entry of
`workload`, called by its name, at "workload".
"""

Axis = Sequence[Point]
"""What was written at one path, repeats too, each with its value, and an op's with its pins."""

Dimensions = Sequence[Sequence[Point]]
"""What varies independently: an axis alone, or those of a group together, entry by entry."""

Groups = Sequence[Sequence[str]]
"""The paths that vary together, group by group as `zip` has them; none in place of what is no group."""


@dataclass(frozen=True)
class Branch:
    """Axes that multiply with each other, lists or not, the last one varying fastest.

    place: where they are written; () for arms, whose axes are of many sections.
    """

    axes: Mapping[str, Axis]
    place: PathParts = ()

    @cached_property
    def values(self) -> dict[str, list[Value]]:
        """Path -> the distinct values there."""
        found: dict[str, dict[Value, None]] = {}
        for entry in (entry for axis in self.axes.values() for entry in axis):
            for path, value in entry.items():
                found.setdefault(path, {})[value] = None
        return {path: list(values) for path, values in found.items()}

    def order_paths(self, point: Point) -> Point:
        """The point with its paths as the axes follow one another, whatever varies together."""
        return {path: point[path] for path in self.values if path in point}


@dataclass(frozen=True)
class Grid:
    """Branches whose points are of one kind: the arms of an experiment, or the shapes of one op.

    Attributes:
        noun: What a point is called: "arm" or "shape".
        section: What its paths start with: "" or "shapes.swiglu".
        most: Of its points.
    """

    noun: str
    section: str
    branches: Sequence[Branch]
    most: int

    @property
    def paths(self) -> list[str]:
        """Every path that a rule may name, in the YAML's order: workloads only where some have names."""
        found = dict.fromkeys(path for branch in self.branches for path in branch.values)
        has_names = any(value.label for branch in self.branches for value in branch.values.get("workload", ()))
        hidden = ("scheduler", self.section) if has_names else ("scheduler", "workload", self.section)
        return [path for path in found if path not in hidden]


def values_below(point: Point, section: str) -> dict[str, Value]:
    """What follows the section's name in a path -> the value there: {"block_size": ...} of "scheduler.block_size"."""
    start = f"{section}."
    return {path.removeprefix(start): value for path, value in point.items() if path.startswith(start)}


def is_pin(path: str) -> bool:
    """Whether it is a path as "kernels.paged_decode.split_kv.num_splits": of a pin, which is in its op's axis."""
    return path.startswith("kernels.") and path.count(".") == 3


def axis_name(path: str) -> str:
    """The axis that a path is in: a pin's is its op's."""
    return ".".join(path.split(".")[:2]) if is_pin(path) else path


def make_grids(document: Document, groups: Groups, report: Report) -> list[Grid]:
    """The arms' grid, and that of each op's `shapes`. `report` gets pins that multiply to too many."""
    return [Grid("arm", "", _arm_branches(document, groups, report), MOST_POINTS), *_shape_grids(document)]


def _arm_branches(document: Document, groups: Groups, report: Report) -> list[Branch]:
    """One for each set of scheduler options with each entry of `workload`."""
    data = document.data
    shared = {"model": model_axis(document), "dtype": make_axis("dtype", entries(data.get("dtype")))}
    for op in as_mapping(data.get("kernels")):
        shared[f"kernels.{op}"] = _kernel_axis(document, op, groups, report)
    batching = {"batching": make_axis("batching", entries(data.get("batching")) or ["continuous"])}
    workloads = entries(data.get("workload"))
    branches = []
    for index, options in enumerate(entries(data.get("scheduler")) or [{}]):
        scheduler: dict[str, Axis] = {"scheduler": [{"scheduler": Value(options, None, index, index)}]}
        scheduler |= _field_axes("scheduler", options, SchedulerOptions.model_fields)
        for entry, workload in enumerate(workloads or [{}]):
            given = as_mapping(workload)
            named = Value(workload, given.get("name", ""), entry, entry)
            served: dict[str, Axis] = {"workload": [{"workload": named}] if workloads else []}
            served |= _field_axes("workload", given, WORKLOAD_AXES.get(str(given.get("kind")), ()))
            axes = {**shared, **scheduler, **batching, **served}
            branches.append(Branch({path: axis for path, axis in axes.items() if axis}))
    return branches


def _shape_grids(document: Document) -> Iterator[Grid]:
    for op, written in as_mapping(document.data.get("shapes")).items():
        section, branches = f"shapes.{op}", []
        for index, entry in enumerate(written if isinstance(written, list) else ()):
            axes: dict[str, Axis] = {section: [{section: Value(entry, None, index, index)}]}
            axes |= _field_axes(section, entry, as_mapping(entry))
            branches.append(Branch({path: axis for path, axis in axes.items() if axis}, ("shapes", op, index)))
        yield Grid("shape", section, branches, MOST_SHAPES)


def make_axis(path: str, written: Sequence[Any], labels: Sequence[Any] | None = None) -> Axis:
    """The axis of the values that were written at a path; they are their own labels unless others are given."""
    keys = [(type(value), repr(value)) for value in written]  # 0 and false are equal, and two values
    is_swept = len(set(keys)) > 1
    found: dict[tuple[type, str], Value] = {}
    for place, (key, value, label) in enumerate(zip(keys, written, labels or written, strict=True)):
        found.setdefault(key, Value(value, label, len(found), place, is_swept))
    return [{path: found[key]} for key in keys]


def model_axis(document: Document) -> Axis:
    """The axis of models, each called as in rows."""
    models = [whole_source(one, document.folder) for one in entries(document.data.get("model"))]
    return make_axis("model", models, model_labels(models))


def _field_axes(section: str, data: Any, fields: Iterable[str]) -> dict[str, Axis]:
    """An axis for each of the fields; a dot in its name goes one mapping down. It is empty where none is given."""
    axes = {}
    for field in fields:
        value = reduce(lambda inside, part: as_mapping(inside).get(part), field.split("."), data)
        axes[f"{section}.{field}"] = make_axis(f"{section}.{field}", entries(value))
    return axes


def _kernel_axis(document: Document, op: str, groups: Groups, report: Report) -> Axis:
    """Every pinning of every choice, the last pin in the alphabet varying fastest; of what is no choice, its text."""
    path = f"kernels.{op}"
    found: dict[Pick | str, Value] = {}
    axis: list[Point] = []
    for place, choice in enumerate(written_choices(document, op)):
        if isinstance(choice, str):
            axis.append({path: found.setdefault(choice, Value(choice, choice, len(found), place))})
            continue
        start = f"{path}.{choice.variant}"
        pins = {f"{start}.{pin}": make_axis(f"{start}.{pin}", choice.pins[pin]) for pin in sorted(choice.pins)}
        dimensions = _pair_axes(pins, groups, report)
        if (count := len(axis) + math.prod(map(len, dimensions))) > MOST_POINTS:
            report(("kernels", op, place), _format_excess(count, MOST_POINTS))
            dimensions = _first_entries(dimensions)
        for point in map(_join, product(*dimensions)):
            pinned = values_below(point, start)
            pick = Pick(choice.variant, tuple((pin, pinned[pin].value) for pin in sorted(pinned)))
            axis.append({path: found.setdefault(pick, Value(pick, pick.label, len(found), place)), **point})
    return axis


def _pair_axes(axes: Mapping[str, Axis], groups: Groups, report: Report) -> Dimensions:
    together: dict[str, tuple[str, ...]] = {}
    for index, group in enumerate(groups):
        names = {path: path if path in axes else axis_name(path) for path in group}
        paired = tuple(dict.fromkeys(names.values()))
        if len(paired) < 2 or not axes.keys() >= set(paired):
            continue
        if fault := _lengths_fault({path: len(axes[name]) for path, name in names.items()}):
            report(("zip", index), fault)
        else:
            together |= dict.fromkeys(paired, paired)
    independent = dict.fromkeys(together.get(name, (name,)) for name in axes)
    return [list(map(_join, zip(*map(axes.__getitem__, names), strict=True))) for names in independent]


def _lengths_fault(lengths: Mapping[str, int]) -> str:
    """Why axes of so many entries cannot vary together; else ""."""
    if len(set(lengths.values())) == 1:
        return ""
    counts = ", ".join(f"{path} has {count}" for path, count in lengths.items())
    return f"what varies together must have as many values each: {counts}"


def _join(parts: Iterable[Point]) -> Point:
    return {path: value for part in parts for path, value in part.items()}


def _first_entries(dimensions: Dimensions) -> Dimensions:
    return [entries_of_one[:1] for entries_of_one in dimensions]


def _format_excess(count: int, most: int) -> str:
    return f"the lists multiply to {count:,} points; {most:,} are the most that are laid out"


def lay_out_points(grid: Grid, groups: Groups, report: Report) -> list[Point]:
    """Every point of the grid once, in the order of nested loops over its axes, whatever varies together.

    Too many points are a problem, and then each branch has only its first.
    """
    dimensions = [_pair_axes(branch.axes, groups, report) for branch in grid.branches]
    totals = accumulate(math.prod(map(len, some)) for some in dimensions)
    for branch, total in zip(grid.branches, totals, strict=True):
        if total > grid.most:
            report(branch.place, _format_excess(total, grid.most))
            dimensions = [_first_entries(some) for some in dimensions]
            break
    points: dict[tuple[int, ...], Point] = {}
    for branch, some in zip(grid.branches, dimensions, strict=True):
        for point in map(_join, product(*some)):
            points[tuple(point[name].index for name in branch.axes)] = branch.order_paths(point)
    return [points[indices] for indices in sorted(points)]
