"""Lists of sizes in `shapes` are axes of points: each point is checked and timed, and none of them is an arm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from experiments.document import Document, nearest
from experiments.planning.axes import entries
from experiments.planning.zip_and_exclude import SHAPES, written_groups, written_rules


@dataclass(frozen=True)
class Shape:
    """A point of `shapes`: the entry that it is of, and axis -> value, with its place in a list where there was one."""

    entry: int
    values: Mapping[str, Any]
    places: Mapping[str, int]


def expanded_shapes(document: Document, problems: list[str]) -> dict[str, list[Shape]]:
    """op -> its points, the last list of an entry varying fastest. What is wrong with the zip groups and the rules of
    shapes is added to `problems`; what has not the form of a shape is left as it is.
    """
    written = document.data.get("shapes")
    found: dict[str, list[Shape]] = {}
    for op, given in (written if isinstance(written, dict) else {}).items():
        if isinstance(given, list) and all(isinstance(entry, dict) for entry in given):
            groups = _groups(document, op)
            found[op] = [s for index, entry in enumerate(given) for s in _expanded(index, entry, groups)]
    for index, group in written_groups(document):
        if any(path.startswith(SHAPES) for path in group):
            problem = _path_problem(group, found) or _group_problem(document, group)
            problems += [document.problem(("zip", index), problem)] if problem else []
    for index, rule in written_rules(document):
        if any(path.startswith(SHAPES) for path in rule):
            problem = _path_problem(list(rule), found)
            if problem is None:
                _, op, _ = next(iter(rule)).split(".")
                wanted = {path.rpartition(".")[2]: entries(value) for path, value in rule.items()}
                left = [s for s in found[op] if not all(s.values.get(axis) in v for axis, v in wanted.items())]
                if len(left) == len(found[op]) or not left:
                    problem = "matches no shape" if left else "leaves no shape"
                found[op] = left or found[op]
            problems += [document.problem(("exclude", index), problem)] if problem else []
    return found


def _groups(document: Document, op: str) -> list[list[str]]:
    start = f"{SHAPES}{op}."
    groups = [group for _, group in written_groups(document)]
    return [[p.removeprefix(start) for p in group] for group in groups if all(p.startswith(start) for p in group)]


def _expanded(index: int, entry: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> list[Shape]:
    lists = {axis: value for axis, value in entry.items() if isinstance(value, list) and value}
    dimensions: list[list[str]] = []
    for axis in lists:
        if not any(axis in names for names in dimensions):
            whole = [g for g in groups if axis in g and len({len(lists.get(name, ())) for name in g}) == 1]
            dimensions.append(list(whole[0]) if whole else [axis])
    shapes = []
    for indices in product(*(range(len(lists[names[0]])) for names in dimensions)):
        places = {name: i for names, i in zip(dimensions, indices, strict=True) for name in names}
        values = {axis: lists[axis][places[axis]] if axis in places else value for axis, value in entry.items()}
        shapes.append(Shape(index, values, places))
    return shapes


def _path_problem(paths: Sequence[str], shapes: Mapping[str, Sequence[Shape]]) -> str | None:
    """What is wrong with the paths of a group or rule, of which one is of shapes."""
    if len({path.rpartition(".")[0] for path in paths}) > 1:
        return "is of arms and shapes, or of several ops' shapes: shapes vary, and are left out, op by op"
    known = [f"{SHAPES}{op}.{axis}" for op, some in shapes.items() for shape in some for axis in shape.values]
    for path in paths:
        if path not in known:
            return f"{path!r} is no axis here: there is {', '.join(dict.fromkeys(known))}{nearest(path, known)}"
    return None


def _group_problem(document: Document, group: Sequence[str]) -> str | None:
    _, op, _ = group[0].split(".")
    axes = [path.rpartition(".")[2] for path in group]
    whole = [entry for entry in document.data["shapes"][op] if all(axis in entry for axis in axes)]
    if not whole:
        return f"no entry of shapes.{op} has all of {', '.join(axes)}"
    for entry in whole:
        lengths = {axis: len(entries(entry[axis])) for axis in axes}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{axis} has {count}" for axis, count in lengths.items())
            return f"what varies together must have as many values each: {counts}"
    return None
