"""`zip`: axes that vary together. `exclude`: points of a sweep that are left out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.document import Document, nearest
from experiments.planning.arms import Pick
from experiments.planning.axes import Axis, Branch, Combination, Groups, choices_of, entries, is_pin
from experiments.planning.model_names import whole_source
from experiments.schema import VariantChoice

SHAPES = "shapes."


def written_groups(document: Document) -> list[tuple[int, list[str]]]:
    """The groups that are lists of paths, with their indices; others are the schema's to refuse."""
    groups = document.data.get("zip")
    return [
        (index, group)
        for index, group in enumerate(groups if isinstance(groups, list) else [])
        if isinstance(group, list) and group and all(isinstance(path, str) for path in group)
    ]


def written_rules(document: Document) -> list[tuple[int, dict[str, Any]]]:
    """The rules that are mappings, with their indices."""
    rules = document.data.get("exclude")
    found = enumerate(rules if isinstance(rules, list) else [])
    return [(index, rule) for index, rule in found if isinstance(rule, dict) and rule]


def sound_groups(document: Document, branches: Sequence[Branch], problems: list[str]) -> Groups:
    """The groups of axes of arms, a pin's path being that of its op where the two are the same axis. What is wrong
    with the others is added to `problems`.
    """
    sound: list[list[str]] = []
    seen: set[str] = set()
    for index, group in written_groups(document):
        if group[0].startswith(SHAPES):
            continue  # of `shapes`, which have no arms
        problem = _repeated(group, seen) or _group_problem(document, branches, group)
        seen.update(group)
        if problem is not None:
            problems.append(document.problem(("zip", index), problem))
        elif not _of_one_variant(group):
            sound.append([_axis_of(path) for path in group])
    return sound


def _repeated(group: Sequence[str], seen: set[str]) -> str | None:
    if len(group) < 2:
        return "a group is of two paths or more, which vary together"
    for path in group:
        if path in seen:
            return f"{path!r} is in two groups"
        if group.count(path) > 1:
            return f"{path!r} is there twice"
    return None


def _of_one_variant(group: Sequence[str]) -> bool:
    return all(is_pin(path) for path in group) and len({path.rpartition(".")[0] for path in group}) == 1


def _axis_of(path: str) -> str:
    return ".".join(path.split(".")[:2]) if is_pin(path) else path


def _group_problem(document: Document, branches: Sequence[Branch], group: Sequence[str]) -> str | None:
    known = known_paths(branches)
    for path in group:
        if path not in known or path == "workload":
            return _unknown(path, known)
    if _of_one_variant(group):
        _, op, variant, _ = group[0].split(".")
        (choice, *_) = [c for c in choices_of(document, op) if isinstance(c, VariantChoice) and c.variant == variant]
        return _lengths_problem({path: len(choice.pins[path.rpartition(".")[2]]) for path in group})
    for path in filter(is_pin, group):
        values = branches[0].axes[_axis_of(path)].values
        pinned = {_pin(pick, path) for pick in values}
        if None in pinned or len(pinned) != len(values):
            return f"{path!r} varies with another axis only where nothing else of {_axis_of(path)!r} is a list"
    whole = [branch for branch in branches if all(_axis_of(path) in branch.axes for path in group)]
    if not whole:
        return f"no workload with its scheduler options has all of {', '.join(group)}"
    problems = [_lengths_problem({path: len(b.axes[_axis_of(path)].order) for path in group}) for b in whole]
    return next((problem for problem in problems if problem is not None), None)


def _lengths_problem(lengths: Mapping[str, int]) -> str | None:
    if len(set(lengths.values())) == 1:
        return None
    counts = ", ".join(f"{path} has {count}" for path, count in lengths.items())
    return f"what varies together must have as many values each: {counts}"


def known_paths(branches: Sequence[Branch]) -> list[str]:
    """Every path that a rule may name, in the YAML's order."""
    names: dict[str, None] = {}
    for branch in branches:
        for name, axis in branch.axes.items():
            names[name] = None
            for pick in (value for value in axis.values if isinstance(value, Pick)):
                names.update(dict.fromkeys(f"{name}.{pick.variant}.{pin}" for pin, _ in pick.pins))
    if any(branch.workload for branch in branches):
        names["workload"] = None
    return list(names)


def _unknown(path: str, known: Sequence[str]) -> str:
    return f"{path!r} is no axis here: there is {', '.join(known)}{nearest(path, known)}"


def without_excluded(
    document: Document, branches: Sequence[Branch], points: list[Combination], problems: list[str]
) -> list[Combination]:
    """The points that no sound rule matches; what is wrong with the rules is added to `problems`."""
    left = points
    for index, rule in written_rules(document):
        if any(path.startswith(SHAPES) for path in rule):
            continue
        found = list(_rule_problems(document, branches, index, rule))
        wanted = {id(branch): _matching(document, branch, rule) for branch in branches}
        matched = {id(point) for point in points if _matches(point, wanted[id(point.branch)])}
        if not found and not matched:
            message = "matches no arm: no arm has all of these together"
            found.append(document.problem(("exclude", index), message))
        problems += found
        left = [point for point in left if id(point) not in matched]
    if points and not left:
        problems.append(document.problem(("exclude",), f"the rules leave nothing of {len(points)} points"))
    return left


def _rule_problems(
    document: Document, branches: Sequence[Branch], index: int, rule: Mapping[str, Any]
) -> Iterator[str]:
    known = known_paths(branches)
    for path, value in rule.items():
        if path not in known:
            yield document.problem(("exclude", index, path), _unknown(path, known))
            continue
        there = list(dict.fromkeys(str(label) for branch in branches for label in _labels(branch, path)))
        for one in entries(value):
            if not any(_is_picked(document, branch, path, one) for branch in branches):
                message = f"no arm has {one!r} there: there is {', '.join(there)}{nearest(one, there)}"
                yield document.problem(("exclude", index, path), message)


def _labels(branch: Branch, path: str) -> list[Any]:
    """What may be at a path, as it is called."""
    if path == "workload":
        return [branch.workload]
    axis = branch.axes.get(_axis_of(path))
    if axis is None:
        return []
    found = [_pin(pick, path) for pick in axis.values] if is_pin(path) else axis.labels
    return [label for label in found if label is not None]


def _pin(pick: Any, path: str) -> Any:
    _, _, variant, pin = path.split(".")
    return dict(pick.pins).get(pin) if isinstance(pick, Pick) and pick.variant == variant else None


def _is_picked(document: Document, branch: Branch, path: str, wanted: Any) -> bool:
    """Whether any point of the branch has it."""
    if path == "workload":
        return bool(branch.workload == wanted)
    return bool(meant(document, branch.axes.get(_axis_of(path)), path, wanted))


def meant(document: Document, axis: Axis | None, path: str, wanted: Any) -> set[int]:
    """Which values of a path's axis a rule's value means: those that are called so. A variant's name stands for all its
    pinnings; a model may also be as it is written, or its directory alone, where none is called so.
    """
    if axis is None:
        return set()
    found = set()
    for index, (value, label) in enumerate(zip(axis.values, axis.labels, strict=True)):
        mine = [_pin(value, path)] if is_pin(path) else [value.variant, label] if isinstance(value, Pick) else [label]
        if wanted is not None and wanted in mine:
            found.add(index)
    if path == "model" and not found:
        source = whole_source({"path": wanted} if isinstance(wanted, str) else wanted, document.folder)
        found = {index for index, value in enumerate(axis.values) if value == source}
    return found


def _matching(document: Document, branch: Branch, rule: Mapping[str, Any]) -> dict[str, set[int]] | None:
    """Axis -> which of its values a rule takes, for all that it names; None where the branch is not of the rule."""
    found: dict[str, set[int]] = {}
    for path, value in rule.items():
        if path == "workload":
            if branch.workload not in entries(value):
                return None
            continue
        name = _axis_of(path)
        some = {index for one in entries(value) for index in meant(document, branch.axes.get(name), path, one)}
        found[name] = found[name] & some if name in found else some
    return found


def _matches(point: Combination, wanted: Mapping[str, set[int]] | None) -> bool:
    return wanted is not None and all(point.picked.get(name) in some for name, some in wanted.items())
