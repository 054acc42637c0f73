"""`zip`: axes that vary together. `exclude`: points that are left out. Of arms, and of the shapes of one op."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.document import Document, entries
from experiments.planning.arms import Pick
from experiments.planning.axes import Axis, Branch, Combination, Grid, Groups
from experiments.planning.model_names import whole_source
from experiments.schema import VariantChoice
from experiments.schema.experiment import written_choices
from tsched.torch_free import suggest_name

_NAMED = "workload"
"""The axis of workloads' names: a rule may name them, but they vary with nothing."""


def written_groups(document: Document) -> list[tuple[int, list[str]]]:
    """The groups that are lists of paths, with their indices; others are the schema's to refuse."""
    groups = document.data.get("zip")
    return [
        (index, group)
        for index, group in enumerate(groups if isinstance(groups, list) else [])
        if isinstance(group, list) and len(group) > 1 and all(isinstance(path, str) for path in group)
    ]


def _written_rules(document: Document) -> list[tuple[int, dict[str, Any]]]:
    """The rules that are mappings, with their indices."""
    rules = document.data.get("exclude")
    found = enumerate(rules if isinstance(rules, list) else [])
    return [(index, rule) for index, rule in found if isinstance(rule, dict) and rule]


def _is_pin(path: str) -> bool:
    """ "kernels.paged_decode.split_kv.num_splits"."""
    return path.startswith("kernels.") and path.count(".") == 3


def _axis_name(path: str) -> str:
    """The axis of a path: a pin's is its op's."""
    return ".".join(path.split(".")[:2]) if _is_pin(path) else path


def _section(path: str) -> str:
    """As Grid.section has it."""
    return path.rpartition(".")[0] if path.startswith("shapes.") else ""


def _known_paths(grids: Sequence[Grid]) -> list[str]:
    """Every path that a rule may name, in the YAML's order."""
    names: dict[str, None] = {}
    for axis in (axis for grid in grids for branch in grid.branches for axis in branch.axes.values()):
        names[axis.name] = None
        for pick in (value for value in axis.values if isinstance(value, Pick)):
            names.update(dict.fromkeys(f"{axis.name}.{pick.variant}.{pin}" for pin, _ in pick.pins))
    return list(names)


def _find_grid(paths: Sequence[str], grids: Sequence[Grid], known: Sequence[str]) -> Grid | str:
    """The grid that all the paths are of, or why they are of none."""
    if len({_section(path) for path in paths}) > 1:
        return "is of arms and shapes, or of several ops' shapes: shapes vary, and are left out, op by op"
    for path in paths:
        if path not in known:
            return f"{path!r} is no axis here: there is {', '.join(known) or 'none'}{suggest_name(path, known)}"
    return next(grid for grid in grids if grid.section == _section(paths[0]))


def sound_groups(document: Document, grids: Sequence[Grid], problems: list[str]) -> Groups:
    """The groups of `zip` whose axes can vary together, as names of axes; the others are added to `problems`.

    Pins of one variant are no axes of their own, and already vary together in their op's.
    """
    known = [path for path in _known_paths(grids) if path != _NAMED]
    sound: list[list[str]] = []
    checked: list[list[str]] = []
    for index, group in written_groups(document):
        grid = _find_grid(group, grids, known)
        if isinstance(grid, Grid):
            problem = _repeated(grid, group, checked) or _group_problem(document, grid, group)
        else:
            problem = grid
        checked.append(group)
        if problem is not None:
            problems.append(document.problem(("zip", index), problem))
        elif not _are_of_one_variant(group):
            sound.append([_axis_name(path) for path in group])
    return sound


def _repeated(grid: Grid, group: Sequence[str], others: Sequence[Sequence[str]]) -> str | None:
    """A path that is in the group twice, or also in another one that varies in the same branch."""
    for path in group:
        if group.count(path) > 1:
            return f"{path!r} is there twice"
        for other in (other for other in others if path in other):
            if any(all(_axis_name(one) in branch.axes for one in (*group, *other)) for branch in grid.branches):
                return f"{path!r} is in two groups"
    return None


def _are_of_one_variant(group: Sequence[str]) -> bool:
    return all(_is_pin(path) for path in group) and len({path.rpartition(".")[0] for path in group}) == 1


def _group_problem(document: Document, grid: Grid, group: Sequence[str]) -> str | None:
    if _are_of_one_variant(group):
        _, op, variant, _ = group[0].split(".")
        choices = (one for one in written_choices(document, op) if isinstance(one, VariantChoice))
        pins = next(choice.pins for choice in choices if choice.variant == variant)
        return _lengths_problem({path: len(pins[path.rpartition(".")[2]]) for path in group})
    for path in filter(_is_pin, group):
        values = grid.branches[0].axes[_axis_name(path)].values
        pinned = {_pinned(pick, path) for pick in values}
        if None in pinned or len(pinned) != len(values):
            return f"{path!r} varies with another axis only where nothing else of {_axis_name(path)!r} is a list"
    whole = [branch for branch in grid.branches if all(_axis_name(path) in branch.axes for path in group)]
    if not whole:
        return f"no {grid.noun} has all of {', '.join(group)}"
    problems = (_lengths_problem({path: len(b.axes[_axis_name(path)].order) for path in group}) for b in whole)
    return next((problem for problem in problems if problem is not None), None)


def _lengths_problem(lengths: Mapping[str, int]) -> str | None:
    if len(set(lengths.values())) == 1:
        return None
    counts = ", ".join(f"{path} has {count}" for path, count in lengths.items())
    return f"what varies together must have as many values each: {counts}"


def without_excluded(
    document: Document, grids: Sequence[Grid], points: Mapping[str, Sequence[Combination]], problems: list[str]
) -> dict[str, list[Combination]]:
    """The points that no rule of `exclude` matches, by their grid's section, as `points` are.

    What is wrong with a rule is added to `problems`; so is that the rules leave nothing, and then they take nothing.
    """
    known = _known_paths(grids)
    left = {section: list(some) for section, some in points.items()}
    for index, rule in _written_rules(document):
        grid = _find_grid(list(rule), grids, known)
        if isinstance(grid, str):
            problems.append(document.problem(("exclude", index), grid))
            continue
        found = list(_value_problems(document, grid, index, rule))
        wanted = {id(branch): _matching_rule(branch, rule, document.folder) for branch in grid.branches}
        matched = {id(point) for point in points[grid.section] if _matches(point, wanted[id(point.branch)])}
        if not found and not matched:
            found.append(
                document.problem(("exclude", index), f"matches no {grid.noun}: none has all of these together")
            )
        problems += found
        left[grid.section] = [point for point in left[grid.section] if id(point) not in matched]
    for section, some in points.items():
        if some and not left[section]:
            where = f" of {section}" if section else ""
            message = f"the rules leave nothing of {len(some)} points{where}"
            problems.append(document.problem(("exclude",), message))
            left[section] = list(some)
    return left


def _value_problems(document: Document, grid: Grid, index: int, rule: Mapping[str, Any]) -> Iterator[str]:
    """Values that are nowhere at their path."""
    for path, value in rule.items():
        axes = [branch.axes[_axis_name(path)] for branch in grid.branches if _axis_name(path) in branch.axes]
        there = list(dict.fromkeys(str(label) for axis in axes for label in _labels(axis, path)))
        for one in entries(value):
            if not any(matching_indices(axis, path, one, document.folder) for axis in axes):
                message = f"no {grid.noun} has {one!r} there: there is {', '.join(there)}{suggest_name(one, there)}"
                yield document.problem(("exclude", index, path), message)


def _labels(axis: Axis, path: str) -> list[Any]:
    """What may be at a path, as it is called."""
    found = [_pinned(pick, path) for pick in axis.values] if _is_pin(path) else axis.labels
    return [label for label in found if label is not None]


def _pinned(pick: Any, path: str) -> Any:
    """What a pick's config is pinned to at a pin's path; None where it is not."""
    _, _, variant, pin = path.split(".")
    return dict(pick.pins).get(pin) if isinstance(pick, Pick) and pick.variant == variant else None


def matching_indices(axis: Axis, path: str, wanted: Any, folder: Path) -> set[int]:
    """Which values of a path's axis a rule's value means: those that are called so.

    A variant's name stands for all its pinnings. A model may also be as it is written in `folder`, or its directory
    alone, where none is called so.
    """
    found = set()
    for index, (value, label) in enumerate(zip(axis.values, axis.labels, strict=True)):
        names = [_pinned(value, path)] if _is_pin(path) else [label]
        names += [value.variant] if isinstance(value, Pick) and not _is_pin(path) else []
        if wanted is not None and wanted in names:
            found.add(index)
    if path == "model" and not found:
        source = whole_source({"path": wanted} if isinstance(wanted, str) else wanted, folder)
        found = {index for index, value in enumerate(axis.values) if value == source}
    return found


def _matching_rule(branch: Branch, rule: Mapping[str, Any], folder: Path) -> dict[str, set[int]]:
    """Axis -> which of its values a rule takes, for all that it names; none of an axis that the branch has not."""
    found: dict[str, set[int]] = {}
    for path, value in rule.items():
        name = _axis_name(path)
        indices = set()
        if name in branch.axes:
            indices = {i for one in entries(value) for i in matching_indices(branch.axes[name], path, one, folder)}
        found[name] = found[name] & indices if name in found else indices
    return found


def _matches(point: Combination, wanted: Mapping[str, set[int]]) -> bool:
    return all(point.picked.get(name) in indices for name, indices in wanted.items())
