"""Lists of sizes in `shapes` are axes of points: each point is checked and timed, and none of them is an arm."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from experiments.document import Document, nearest
from experiments.planning.axes import entries
from experiments.planning.zip_and_exclude import SHAPES, written_groups, written_rules

MOST_SHAPES = 10_000
"""Of an op: more would be checked and timed for hours."""


@dataclass(frozen=True)
class Shape:
    """A point of `shapes`: the entry that it is of, and axis -> value, with its place in a list where there was one."""

    entry: int
    values: Mapping[str, Any]
    places: Mapping[str, int]


def expanded_shapes(document: Document, problems: list[str]) -> dict[str, list[Shape]]:
    """op -> its points, the last list of an entry varying fastest. What is wrong with the zip groups and the rules of
    shapes is added to `problems`; what has not the form of a shape is left as it is. Of an entry whose lists multiply
    to too many there is the first.
    """
    written = document.data.get("shapes")
    found: dict[str, list[Shape]] = {}
    for op, given in (written if isinstance(written, dict) else {}).items():
        if isinstance(given, list) and all(isinstance(entry, dict) for entry in given):
            groups = _groups(document, op)
            found[op] = []
            for index, entry in enumerate(given):
                dimensions = _dimensions(entry, groups)
                count = len(found[op]) + math.prod(len(entry[names[0]]) for names in dimensions)
                if count > MOST_SHAPES:
                    message = f"the lists multiply to {count:,} points; {MOST_SHAPES:,} are the most of an op"
                    problems.append(document.problem(("shapes", op, index), message))
                found[op] += islice(_expanded(index, entry, dimensions), 1 if count > MOST_SHAPES else None)
    for index, group in written_groups(document):
        if any(path.startswith(SHAPES) for path in group):
            problem = _path_problem(group, found) or _group_problem(document, group)
            problems += [document.problem(("zip", index), problem)] if problem else []
    for index, rule in written_rules(document):
        if any(path.startswith(SHAPES) for path in rule):
            problems += _left_out(document, index, rule, found)
    return found


def _left_out(document: Document, index: int, rule: Mapping[str, Any], found: dict[str, list[Shape]]) -> list[str]:
    """Takes what the rule matches out of `found`; what is wrong with the rule."""
    if problem := _path_problem(list(rule), found):
        return [document.problem(("exclude", index), problem)]
    _, op, _ = next(iter(rule)).split(".")
    wanted = {path.rpartition(".")[2]: entries(value) for path, value in rule.items()}
    problems = []
    for axis, values in wanted.items():
        there = list(dict.fromkeys(str(shape.values[axis]) for shape in found[op] if axis in shape.values))
        for value in values:
            if not any(shape.values.get(axis) == value for shape in found[op]):
                message = f"no shape has {value!r} there: there is {', '.join(there)}{nearest(value, there)}"
                problems.append(document.problem(("exclude", index, f"{SHAPES}{op}.{axis}"), message))
    left = [shape for shape in found[op] if not all(shape.values.get(axis) in some for axis, some in wanted.items())]
    if not problems and len(left) == len(found[op]):
        message = "matches no shape: none has all of these together"
        problems.append(document.problem(("exclude", index), message))
    if not left:
        message = f"leaves no shape of {op}, with what the rules before it leave out"
        problems.append(document.problem(("exclude", index), message))
    found[op] = left or found[op]
    return problems


def _groups(document: Document, op: str) -> list[list[str]]:
    start = f"{SHAPES}{op}."
    groups = [group for _, group in written_groups(document)]
    return [[p.removeprefix(start) for p in group] for group in groups if all(p.startswith(start) for p in group)]


def _dimensions(entry: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """The lists of an entry that vary independently: one alone, or those of a group."""
    lists = {axis: value for axis, value in entry.items() if isinstance(value, list) and value}
    dimensions: list[list[str]] = []
    for axis in lists:
        if not any(axis in names for names in dimensions):
            whole = [g for g in groups if axis in g and len({len(lists.get(name, ())) for name in g}) == 1]
            dimensions.append(list(whole[0]) if whole else [axis])
    return dimensions


def _expanded(index: int, entry: Mapping[str, Any], dimensions: Sequence[Sequence[str]]) -> Iterator[Shape]:
    for indices in product(*(range(len(entry[names[0]])) for names in dimensions)):
        places = {name: i for names, i in zip(dimensions, indices, strict=True) for name in names}
        values = {axis: value[places[axis]] if axis in places else value for axis, value in entry.items()}
        yield Shape(index, values, places)


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
