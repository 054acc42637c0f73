"""`zip`: axes that vary together. `exclude`: points that are left out. Of arms, and of the shapes of one op."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.document import Document, Report, as_mapping, entries
from experiments.planning.axes import Branch, Grid, Groups, Point, Value, axis_name, is_pin, lay_out_points, make_grids
from experiments.planning.model_names import whole_source
from tsched.torch_free import suggest_name


def find_points(document: Document, report: Report) -> dict[str, list[Point]]:
    """The points of the arms, at "", and of each op's shapes, at "shapes.swiglu", that no rule leaves out; `report`
    gets what is wrong with the axes, the groups of `zip` and the rules of `exclude`.
    """
    groups = _written_groups(document)
    grids = make_grids(document, groups, report)
    groups = _sound_groups(grids, groups, report)
    points = {grid.section: lay_out_points(grid, groups, report) for grid in grids}
    excluded: set[int] = set()
    for index, rule in enumerate(map(as_mapping, entries(document.data.get("exclude")))):
        if rule:
            excluded.update(map(id, _match_rule(document.folder, grids, points, index, rule, report)))
    return {section: _leave_out(section, some, excluded, report) for section, some in points.items()}


def _written_groups(document: Document) -> Groups:
    """The section `zip`; what is no list of paths is the schema's to refuse."""
    return [
        group if isinstance(group, list) and len(group) > 1 and all(isinstance(path, str) for path in group) else []
        for group in entries(document.data.get("zip"))
    ]


def _section_of(path: str) -> str:
    """As Grid.section has it."""
    return path.rpartition(".")[0] if path.startswith("shapes.") else ""


def _find_grid(paths: Iterable[str], grids: Sequence[Grid], unlisted: str = "") -> Grid:
    """The grid that all the paths are of; ValueError where they are of none, as `unlisted` is."""
    sections = set(map(_section_of, paths))
    if len(sections) > 1:
        raise ValueError("is of arms and shapes, or of several ops' shapes: shapes vary, and are left out, op by op")
    known = [path for grid in grids for path in grid.paths if path != unlisted]
    for path in paths:
        if path not in known:
            raise ValueError(f"{path!r} is no axis here: there is {', '.join(known)}{suggest_name(path, known)}")
    return next(grid for grid in grids if grid.section in sections)


def _sound_groups(grids: Sequence[Grid], groups: Groups, report: Report) -> Groups:
    """The groups, with none in place of those whose axes cannot vary together."""
    sound = list(groups)
    for index, group in enumerate(groups):
        try:
            _check_group(grids, group, groups[:index])
        except ValueError as error:
            report(("zip", index), str(error))
            sound[index] = []
    return sound


def _check_group(grids: Sequence[Grid], group: Sequence[str], others: Groups) -> None:
    """Refuses a group whose axes cannot vary together, but for the numbers of their values."""
    if not group:
        return
    # Workloads' names are no list: a rule may name them, and they vary with nothing.
    grid = _find_grid(group, grids, unlisted="workload")
    _check_repetition(grid, group, others)
    pins = list(filter(is_pin, group))
    if len(pins) == len(group) and len({path.rpartition(".")[0] for path in pins}) == 1:
        return  # of one variant, they vary together in their op's axis
    for path in pins:
        if not _is_all_that_varies(path, grid.branches[0]):
            op = axis_name(path)
            raise ValueError(f"{path!r} varies with another axis only where nothing else of {op!r} is a list")
    if not _vary_together(group, grid):
        raise ValueError(f"no {grid.noun} has all of {', '.join(group)}")


def _check_repetition(grid: Grid, group: Sequence[str], others: Groups) -> None:
    """Refuses a path that is in the group twice, or also in another one that varies in the same branch."""
    for path in group:
        if group.count(path) > 1:
            raise ValueError(f"{path!r} is there twice")
        if any(_vary_together([*group, *other], grid) for other in others if path in other):
            raise ValueError(f"{path!r} is in two groups")


def _is_all_that_varies(pin: str, branch: Branch) -> bool:
    """Whether each pick of a pin's op has a value of it of its own."""
    picks = branch.axes[axis_name(pin)]
    pinned = {entry[pin].value for entry in picks if pin in entry}
    return all(pin in entry for entry in picks) and len(pinned) == len(branch.values[axis_name(pin)])


def _vary_together(paths: Iterable[str], grid: Grid) -> bool:
    """Whether some branch has all of the paths."""
    return any(branch.values.keys() >= set(paths) for branch in grid.branches)


def _match_rule(
    folder: Path,
    grids: Sequence[Grid],
    points: Mapping[str, Sequence[Point]],
    index: int,
    rule: Mapping[str, Any],
    report: Report,
) -> list[Point]:
    """The points that have one of the rule's values at all its paths."""
    try:
        grid = _find_grid(rule, grids)
    except ValueError as error:
        report(("exclude", index), str(error))
        return []
    named = {path: _named_values(folder, grid, index, path, given, report) for path, given in rule.items()}
    matched = [p for p in points[grid.section] if all(p.get(path) in values for path, values in named.items())]
    if not matched and all(named.values()):
        report(("exclude", index), f"matches no {grid.noun}: none has all of these together")
    return matched


def _leave_out(section: str, points: list[Point], excluded: set[int], report: Report) -> list[Point]:
    """The points without those of the `excluded` ids; all of them where that is none."""
    left = [point for point in points if id(point) not in excluded]
    if points and not left:
        where = f" of {section}" if section else ""
        report(("exclude",), f"the rules leave nothing of {len(points)} points{where}")
    return left or points


def _named_values(folder: Path, grid: Grid, index: int, path: str, given: Any, report: Report) -> set[Value]:
    """The values that a rule names at a path; null and an empty list are no value."""
    there = [value for branch in grid.branches for value in branch.values.get(path, ())]
    named: set[Value] = set()
    for one in entries(given) or [given]:
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
