"""`zip`: axes that vary together. `exclude`: points that are left out. Of arms, and of the shapes of one op."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.document import Document, Report, as_mapping, entries
from experiments.planning.axes import Branch, Grid, Groups, Point, Value, axis_name, is_pin, lay_out_points, make_grids
from experiments.planning.model_names import whole_source
from tsched.torch_free import suggest_name

Rule = Mapping[str, Any]
"""Path -> the value or values there of the points that are left out."""


def find_points(document: Document, report: Report) -> dict[str, list[Point]]:
    """The points of the arms, at "", and of each op's shapes, at "shapes.swiglu", that no rule leaves out; `report`
    gets what is wrong with the axes, the groups of `zip` and the rules of `exclude`.
    """
    groups = _written_groups(document)
    grids = make_grids(document, groups, report)
    groups = _sound_groups(grids, groups, report)
    rules = _rules_of_grids(document, grids, report)
    points = {grid.section: lay_out_points(grid, groups, report) for grid in grids}
    for grid in grids:
        matched = [
            id(point)
            for index, rule in rules[grid.section].items()
            for point in _match_rule(document.folder, grid, points[grid.section], index, rule, report)
        ]
        points[grid.section] = _leave_out(grid, points[grid.section], set(matched), report)
    return points


def _written_groups(document: Document) -> Groups:
    """The section `zip`; what is no list of paths is the schema's to refuse."""
    return [
        group if isinstance(group, list) and len(group) > 1 and all(isinstance(path, str) for path in group) else []
        for group in entries(document.data.get("zip"))
    ]


def _known_paths(grids: Sequence[Grid]) -> list[str]:
    return [path for grid in grids for path in grid.paths]


def _find_grid(paths: Iterable[str], grids: Sequence[Grid], known: Sequence[str]) -> Grid | str:
    """The grid that all the paths are of, or why they are of none, for one is not `known`."""
    sections = {path.rpartition(".")[0] if path.startswith("shapes.") else "" for path in paths}
    if len(sections) > 1:
        return "is of arms and shapes, or of several ops' shapes: shapes vary, and are left out, op by op"
    if unknown := [path for path in paths if path not in known]:
        there = ", ".join(known) or "none"
        return f"{unknown[0]!r} is no axis here: there is {there}{suggest_name(unknown[0], known)}"
    return next(grid for grid in grids if grid.section in sections)


def _sound_groups(grids: Sequence[Grid], groups: Groups, report: Report) -> Groups:
    """The groups, with none in place of those whose axes cannot vary together."""
    # Workloads' names are no list: a rule may name them, and they vary with nothing.
    known = [path for path in _known_paths(grids) if path != "workload"]
    sound: list[Sequence[str]] = []
    for index, group in enumerate(groups):
        grid = _find_grid(group, grids, known) if group else ""
        fault = grid if isinstance(grid, str) else _group_fault(grid, group, groups[:index])
        if fault:
            report(("zip", index), fault)
        sound.append([] if fault else group)
    return sound


def _group_fault(grid: Grid, group: Sequence[str], others: Groups) -> str:
    """Why the axes of a group cannot vary together, but for the numbers of their values; else ""."""
    if fault := _repetition(grid, group, others):
        return fault
    pins = list(filter(is_pin, group))
    if len(pins) == len(group) and len({path.rpartition(".")[0] for path in pins}) == 1:
        return ""  # of one variant, they vary together in their op's axis
    for path in pins:
        if not _is_all_that_varies(path, grid.branches[0]):
            return f"{path!r} varies with another axis only where nothing else of {axis_name(path)!r} is a list"
    return "" if _vary_together(group, grid) else f"no {grid.noun} has all of {', '.join(group)}"


def _repetition(grid: Grid, group: Sequence[str], others: Groups) -> str:
    """A path that is in the group twice, or also in another one that varies in the same branch."""
    for path in group:
        if group.count(path) > 1:
            return f"{path!r} is there twice"
        if any(_vary_together([*group, *other], grid) for other in others if path in other):
            return f"{path!r} is in two groups"
    return ""


def _is_all_that_varies(pin: str, branch: Branch) -> bool:
    """Whether each pick of a pin's op has a value of it of its own."""
    picks = branch.axes[axis_name(pin)]
    pinned = {entry[pin].value for entry in picks if pin in entry}
    return all(pin in entry for entry in picks) and len(pinned) == len(branch.values[axis_name(pin)])


def _vary_together(paths: Iterable[str], grid: Grid) -> bool:
    """Whether some branch has all of the paths."""
    return any(branch.values.keys() >= set(paths) for branch in grid.branches)


def _rules_of_grids(document: Document, grids: Sequence[Grid], report: Report) -> dict[str, dict[int, Rule]]:
    """Each grid's rules, by their indices; what is no mapping is the schema's to refuse."""
    rules: dict[str, dict[int, Rule]] = {grid.section: {} for grid in grids}
    for index, rule in enumerate(map(as_mapping, entries(document.data.get("exclude")))):
        grid = _find_grid(rule, grids, _known_paths(grids)) if rule else ""
        if isinstance(grid, Grid):
            rules[grid.section][index] = rule
        elif grid:
            report(("exclude", index), grid)
    return rules


def _leave_out(grid: Grid, points: list[Point], excluded: set[int], report: Report) -> list[Point]:
    """The points without those of the `excluded` ids; all of them where that is none."""
    left = [point for point in points if id(point) not in excluded]
    if points and not left:
        where = f" of {grid.section}" if grid.section else ""
        report(("exclude",), f"the rules leave nothing of {len(points)} points{where}")
    return left or points


def _match_rule(folder: Path, grid: Grid, points: list[Point], index: int, rule: Rule, report: Report) -> list[Point]:
    """The points that have one of the rule's values at all its paths."""
    named = {path: _named_values(folder, grid, index, path, given, report) for path, given in rule.items()}
    matched = [point for point in points if all(point.get(path) in values for path, values in named.items())]
    if not matched and all(named.values()):
        report(("exclude", index), f"matches no {grid.noun}: none has all of these together")
    return matched


def _named_values(folder: Path, grid: Grid, index: int, path: str, given: Any, report: Report) -> set[Value]:
    """The values that a rule names at a path."""
    there = [value for branch in grid.branches for value in branch.values.get(path, ())]
    named: set[Value] = set()
    for one in entries(given):
        found = matching_values(path, there, one, folder)
        named.update(found)
        if not found:
            labels = list(dict.fromkeys(str(value.label) for value in there))
            message = f"no {grid.noun} has {one!r} there: there is {', '.join(labels)}{suggest_name(one, labels)}"
            report(("exclude", index, path), message)
    return named


def matching_values(path: str, there: Iterable[Value], wanted: Any, folder: Path) -> list[Value]:
    """Which of the values at a path a rule's value means: those that are called so.

    A variant's name stands for all its pinnings. A model may also be as it is written in `folder`, or its directory
    alone, where none is called so.
    """
    found = [one for one in there if wanted in (one.label, getattr(one.value, "variant", one.label))]
    if path == "model" and not found:
        source = whole_source({"path": wanted} if isinstance(wanted, str) else wanted, folder)
        found = [one for one in there if one.value == source]
    return found
