"""Which lists of an experiment's YAML are axes, and the points that they multiply to.

Read from plain data, before anything is known to be right: what cannot be read as an axis is one value, and the schema
says what is wrong with it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from pydantic import TypeAdapter, ValidationError

from experiments.document import Document
from experiments.planning.arms import Pick, num_picks, picks_of
from experiments.planning.model_names import model_labels, whole_sources
from experiments.schema import Choice, SchedulerOptions, VariantChoice
from experiments.schema.workload import AXES as WORKLOAD_AXES

MOST_POINTS = 100_000
"""Before exclusions: lists that multiply to more are a mistake, and would take a minute to write down. Pins of one
variant too.
"""

Groups = Sequence[Sequence[str]]
"""Names of axes that vary together."""

_CHOICE: TypeAdapter[VariantChoice] = TypeAdapter(Choice)


@dataclass(frozen=True)
class Axis:
    """name: as zip and exclude have it, "scheduler.block_size". values: distinct; of an op, its picks. places: of each
    value, its index in the list that was written; None where no list was. labels: what each is called in rows and
    rules. order: of everything that was written, repeats too, which of the values it is: what varies together does by
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
        labels = model_labels(values) if name == "model" else tuple(map(_label, values))
        return Axis(name, values, tuple(place for place, _ in kept), labels, tuple(order))


def _label(value: Any) -> Any:
    return value.label if isinstance(value, Pick) else value


@dataclass(frozen=True)
class Branch:
    """The axes, lists or not, of one set of scheduler options with one entry of `workload` (None: there is none).

    workload: that entry's name.
    """

    options: int
    entry: int | None
    workload: str
    axes: Mapping[str, Axis]


@dataclass(frozen=True)
class Combination:
    """One point of a sweep: for every axis of its branch, which of the values."""

    branch: Branch
    picked: Mapping[str, int]

    def value(self, name: str) -> Any:
        return self.branch.axes[name].values[self.picked[name]]

    def place(self, name: str) -> int | None:
        return self.branch.axes[name].places[self.picked[name]]

    def label(self, name: str) -> Any:
        return self.branch.axes[name].labels[self.picked[name]]

    def below(self, section: str) -> dict[str, str]:
        """What follows the section's name -> the axis: {"block_size": "scheduler.block_size"}."""
        start = f"{section}."
        return {name.removeprefix(start): name for name in self.branch.axes if name.startswith(start)}


def entries(value: Any) -> list[Any]:
    """The entries of a section that may be one thing without brackets, or nothing."""
    return value if isinstance(value, list) else [] if value is None else [value]


def written_axis(name: str, value: Any) -> Axis:
    """The axis of what was written: a list, or one value."""
    is_list = isinstance(value, list)
    return Axis.of(name, [(index if is_list else None, one) for index, one in enumerate(entries(value))])


def is_pin(path: str) -> bool:
    """ "kernels.paged_decode.split_kv.num_splits"."""
    return path.startswith("kernels.") and path.count(".") == 3


def choices_of(document: Document, op: str) -> list[VariantChoice | str]:
    """The op's choices; as a text where the schema refuses one."""
    kernels = document.data.get("kernels")
    found: list[VariantChoice | str] = []
    for choice in entries(kernels.get(op) if isinstance(kernels, dict) else None):
        try:
            found.append(_CHOICE.validate_python(choice))
        except ValidationError:
            found.append(str(choice))
    return found


def read_branches(document: Document, groups: Groups, problems: list[str]) -> list[Branch]:
    """Every branch of the experiment; `groups` may have pins of one variant, which vary together. Pins that multiply to
    too many are a problem, and then not laid out.
    """
    data = document.data
    shared = {}
    if entries(data.get("model")):
        shared["model"] = written_axis("model", whole_sources(data["model"], document.folder))
    if entries(data.get("dtype")):
        shared["dtype"] = written_axis("dtype", data["dtype"])
    kernels = data.get("kernels")
    for op in kernels if isinstance(kernels, dict) else ():
        if (axis := _kernel_axis(document, op, groups, problems)).values:
            shared[f"kernels.{op}"] = axis
    batching = {"batching": written_axis("batching", entries(data.get("batching")) or "continuous")}
    workloads: list[tuple[int | None, Any]] = list(enumerate(entries(data.get("workload"))))
    found = []
    for index, options in enumerate(entries(data.get("scheduler")) or [{}]):
        scheduler = _fields("scheduler", options, SchedulerOptions.model_fields)
        for entry, workload in workloads or [(None, {})]:
            given = workload if isinstance(workload, dict) else {}
            fields = WORKLOAD_AXES.get(str(given.get("kind")), ())
            axes = {**shared, **scheduler, **batching, **_fields("workload", given, fields)}
            found.append(Branch(index, entry, str(given.get("name", "")), axes))
    return found


def _fields(section: str, data: Any, fields: Sequence[str] | Mapping[str, Any]) -> dict[str, Axis]:
    """An axis for each of the fields that is given; a dot in its name goes one mapping down."""
    axes = {}
    for field in fields:
        value = data
        for part in field.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if entries(value):
            axes[f"{section}.{field}"] = written_axis(f"{section}.{field}", value)
    return axes


def _kernel_axis(document: Document, op: str, groups: Groups, problems: list[str]) -> Axis:
    written: list[tuple[int | None, Any]] = []
    for index, choice in enumerate(choices_of(document, op)):
        picks: Iterable[Any] = [choice]
        if isinstance(choice, VariantChoice):
            start = f"kernels.{op}.{choice.variant}."
            together = [[path.removeprefix(start) for path in group] for group in groups]
            picks = picks_of(choice, together)
            if (count := len(written) + num_picks(choice, together)) > MOST_POINTS:
                problems.append(document.problem(("kernels", op, index), _too_many(count)))
                picks = islice(picks, 1)
        written += [(index, pick) for pick in picks]
    return Axis.of(f"kernels.{op}", written)


def _too_many(count: int) -> str:
    return f"the lists multiply to {count:,} points; {MOST_POINTS:,} are the most that are laid out"


def multiplied(
    document: Document, branches: Sequence[Branch], groups: Groups, problems: list[str]
) -> list[Combination]:
    """Every point, in order: the last list varies fastest; one workload, and one set of options, follows the other.

    A group varies together in the branches that have all of it. More than MOST_POINTS are a problem, and then of each
    branch only the first.
    """
    dimensions = [_dimensions(branch, groups) for branch in branches]
    total = sum(math.prod(map(len, some)) for some in dimensions)
    if total > MOST_POINTS:
        problems.append(document.problem((), _too_many(total)))
        dimensions = [[picks[:1] for picks in some] for some in dimensions]
    points = [
        Combination(branch, {name: index for part in parts for name, index in part.items()})
        for branch, some in zip(branches, dimensions, strict=True)
        for parts in product(*some)
    ]
    return sorted(points, key=_order)


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


def _order(point: Combination) -> tuple[Any, ...]:
    """Sorts points as nested loops would have made them, whatever was zipped."""
    sections: dict[str, list[int]] = {"outer": [], "kernels": [], "scheduler": [], "batching": [], "workload": []}
    for name in point.branch.axes:
        section = name.partition(".")[0]
        sections["outer" if section in ("model", "dtype") else section].append(point.picked[name])
    entry = -1 if point.branch.entry is None else point.branch.entry
    head = (sections["outer"], sections["kernels"], point.branch.options, sections["scheduler"], sections["batching"])
    return (*head, entry, sections["workload"])
