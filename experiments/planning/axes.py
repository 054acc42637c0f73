"""Which lists of an experiment's YAML are axes, and the points that they multiply to.

Read from the data as it was written: what is no list is one value, and the schema says what is wrong with it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from experiments.document import Document, PathParts, entries
from experiments.planning.arms import Pick, num_picks, picks_of
from experiments.planning.model_names import model_labels, whole_sources
from experiments.schema import SchedulerOptions, VariantChoice
from experiments.schema.experiment import written_choices
from experiments.schema.workload import AXES as WORKLOAD_AXES

MOST_POINTS = 100_000
"""Of arms, before exclusions: lists that multiply to more are a mistake, and would take a minute to write down. Pins of
one variant too.
"""

MOST_SHAPES = 10_000
"""Of an op: more would be checked and timed for hours."""

Groups = Sequence[Sequence[str]]
"""Names of axes that vary together."""


@dataclass(frozen=True)
class Axis:
    """One list of the YAML, or a single value.

    Attributes:
        name: as zip and exclude have it, "scheduler.block_size".
        values: distinct; of an op, its picks.
        places: of each value, its index in the list that was written; None where no list was.
        labels: what each value is called in rows and rules.
        order: of everything that was written, repeats too, which of the values it is. Axes that vary together pair
            these.
    """

    name: str
    values: tuple[Any, ...]
    places: tuple[int | None, ...]
    labels: tuple[Any, ...]
    order: tuple[int, ...]

    @staticmethod
    def of(name: str, written: Sequence[tuple[int | None, Any]]) -> "Axis":
        """The axis of values, each with its place."""
        found: dict[Any, int] = {}
        kept: list[tuple[int | None, Any]] = []
        order = []
        for place, value in written:
            # 0 and false are equal, and two values
            key = value if isinstance(value, Pick) else (type(value), repr(value))
            if key not in found:
                found[key] = len(kept)
                kept.append((place, value))
            order.append(found[key])
        values = tuple(value for _, value in kept)
        labels = model_labels(values) if name == "model" else tuple(map(_label_value, values))
        return Axis(name, values, tuple(place for place, _ in kept), labels, tuple(order))

    @staticmethod
    def written(name: str, value: Any) -> "Axis":
        """The axis of what was written: a list, or one value."""
        is_list = isinstance(value, list)
        return Axis.of(name, [(index if is_list else None, one) for index, one in enumerate(entries(value))])


def _label_value(value: Any) -> Any:
    return value.label if isinstance(value, Pick) else value


@dataclass(frozen=True)
class Branch:
    """Axes that multiply with each other, lists or not, the last one varying fastest.

    Attributes:
        options: the index of its set of scheduler options.
        entry: the index of its entry of `workload`, or of its op's in `shapes`; None where there is none.
        place: what it is written at; () for arms, whose axes are of many sections.
    """

    axes: Mapping[str, Axis]
    options: int = 0
    entry: int | None = None
    place: PathParts = ()


@dataclass(frozen=True)
class Grid:
    """Branches whose points are of one kind: the arms of an experiment, or the shapes of one op.

    Attributes:
        noun: what a point is called: "arm" or "shape".
        section: what the names of its axes start with: "" or "shapes.swiglu".
        most: of its points.
    """

    noun: str
    section: str
    branches: Sequence[Branch]
    most: int


@dataclass(frozen=True)
class Combination:
    """One point of a grid: for every axis of its branch, which of the values."""

    branch: Branch
    picked: Mapping[str, int]

    def value(self, name: str) -> Any:
        return self.branch.axes[name].values[self.picked[name]]

    def place(self, name: str) -> int | None:
        return self.branch.axes[name].places[self.picked[name]]

    def label(self, name: str) -> Any:
        return self.branch.axes[name].labels[self.picked[name]]

    def axes_below(self, section: str) -> dict[str, str]:
        """What follows the section's name -> the axis: {"block_size": "scheduler.block_size"}."""
        start = f"{section}."
        return {name.removeprefix(start): name for name in self.branch.axes if name.startswith(start)}


def arm_grid(document: Document, groups: Groups, problems: list[str]) -> Grid:
    """The grid of the experiment's arms.

    Args:
        groups: those of `zip`; pins of one variant that are in one vary together.
        problems: takes what is wrong. Pins that multiply to too many are a problem, and then not laid out.
    """
    data = document.data
    shared = {}
    if entries(data.get("model")):
        shared["model"] = Axis.written("model", whole_sources(data["model"], document.folder))
    if entries(data.get("dtype")):
        shared["dtype"] = Axis.written("dtype", data["dtype"])
    kernels = data.get("kernels")
    for op in kernels if isinstance(kernels, dict) else ():
        if (axis := _kernel_axis(document, op, groups, problems)).values:
            shared[f"kernels.{op}"] = axis
    batching = {"batching": Axis.written("batching", entries(data.get("batching")) or "continuous")}
    workloads: list[tuple[int | None, Any]] = list(enumerate(entries(data.get("workload"))))
    branches = []
    for index, options in enumerate(entries(data.get("scheduler")) or [{}]):
        scheduler = _field_axes("scheduler", options, SchedulerOptions.model_fields)
        for entry, workload in workloads or [(None, {})]:
            given = workload if isinstance(workload, dict) else {}
            served = _field_axes("workload", given, WORKLOAD_AXES.get(str(given.get("kind")), ()))
            if isinstance(given.get("name"), str):
                served["workload"] = Axis.written("workload", given["name"])
            branches.append(Branch({**shared, **scheduler, **batching, **served}, index, entry))
    return Grid("arm", "", branches, MOST_POINTS)


def shape_grids(document: Document) -> dict[str, Grid]:
    """op -> the grid of its points in `shapes`."""
    written = document.data.get("shapes")
    grids = {}
    for op, given in (written if isinstance(written, dict) else {}).items():
        section = f"shapes.{op}"
        branches = [
            Branch(_field_axes(section, entry, entry), entry=index, place=("shapes", op, index))
            for index, entry in enumerate(given if isinstance(given, list) else ())
            if isinstance(entry, dict)
        ]
        grids[op] = Grid("shape", section, branches, MOST_SHAPES)
    return grids


def _field_axes(section: str, data: Any, fields: Iterable[str]) -> dict[str, Axis]:
    """An axis for each of the fields that is given; a dot in its name goes one mapping down."""
    axes = {}
    for field in fields:
        value = data
        for part in field.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if entries(value):
            axes[f"{section}.{field}"] = Axis.written(f"{section}.{field}", value)
    return axes


def _kernel_axis(document: Document, op: str, groups: Groups, problems: list[str]) -> Axis:
    written: list[tuple[int | None, Any]] = []
    for index, choice in enumerate(written_choices(document, op)):
        picks: Iterable[Any] = [choice]
        if isinstance(choice, VariantChoice):
            start = f"kernels.{op}.{choice.variant}."
            together = [[path.removeprefix(start) for path in group] for group in groups]
            picks = picks_of(choice, together)
            if (count := len(written) + num_picks(choice, together)) > MOST_POINTS:
                problems.append(document.problem(("kernels", op, index), _format_excess(count, MOST_POINTS)))
                picks = islice(picks, 1)
        written += [(index, pick) for pick in picks]
    return Axis.of(f"kernels.{op}", written)


def _format_excess(count: int, most: int) -> str:
    return f"the lists multiply to {count:,} points; {most:,} are the most that are laid out"


def multiply(document: Document, grid: Grid, groups: Groups, problems: list[str]) -> list[Combination]:
    """Every point of the grid, in order: the last list varies fastest, and one branch follows the other.

    A group varies together in the branches that have all of it. Too many points are a problem, and then each branch
    has only its first.
    """
    dimensions = [_dimensions(branch, groups) for branch in grid.branches]
    total = 0
    for branch, some in zip(grid.branches, dimensions, strict=True):
        total += math.prod(map(len, some))
        if total > grid.most:
            problems.append(document.problem(branch.place, _format_excess(total, grid.most)))
            dimensions = [[picks[:1] for picks in each] for each in dimensions]
            break
    points = [
        Combination(branch, {name: index for part in parts for name, index in part.items()})
        for branch, some in zip(grid.branches, dimensions, strict=True)
        for parts in product(*some)
    ]
    return sorted(points, key=_sort_key)


def _dimensions(branch: Branch, groups: Groups) -> list[list[dict[str, int]]]:
    """What varies independently: an axis alone, or those of a group together, each combination of theirs once."""
    together = {name: group for group in groups for name in group if all(each in branch.axes for each in group)}
    dimensions, done = [], set[str]()
    for name in branch.axes:
        if name not in done:
            group = together.get(name, [name])
            done.update(group)
            rows = zip(*(branch.axes[each].order for each in group), strict=True)
            dimensions.append([dict(zip(group, row, strict=True)) for row in dict.fromkeys(rows)])
    return dimensions


def _sort_key(point: Combination) -> tuple[Any, ...]:
    """Sorts points as nested loops would have made them, whatever was zipped."""
    sections: dict[str, list[int]] = {"outer": [], "kernels": [], "scheduler": [], "batching": [], "entry": []}
    for name in point.branch.axes:
        section = name.partition(".")[0]
        place = {"model": "outer", "dtype": "outer", "workload": "entry", "shapes": "entry"}.get(section, section)
        sections[place].append(point.picked[name])
    entry = -1 if point.branch.entry is None else point.branch.entry
    head = (sections["outer"], sections["kernels"], point.branch.options, sections["scheduler"], sections["batching"])
    return (*head, entry, sections["entry"])
