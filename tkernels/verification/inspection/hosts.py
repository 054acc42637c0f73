"""What each variant's host code decides on each architecture: what it refuses, what it launches at benchmark points.

No value shows that a launcher refuses what it should take, or that it launches one program where a device has room for
hundreds. So what it decides is written down, as what kernels compile to is, and a change of it shows in a diff. This
needs no compiler: `python -m tkernels.verification.inspection.hosts` writes the table.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import torch

from tkernels.config import Config
from tkernels.contract import Axes, Choice, Contract, Int, Value
from tkernels.device import INTERPRETER, TARGETS, DeviceFacts
from tkernels.launch import Kernel
from tkernels.tuning import NEAREST
from tkernels.variant import Variant
from tkernels.verification.inspection.expected import FOLDER
from tkernels.verification.inspection.points import Point, point
from tkernels.verification.size_limits import last_alike

TABLE = FOLDER / "hosts.json"
_DEVICES = {INTERPRETER.arch: INTERPRETER, **TARGETS}

Decisions = dict[str, dict[str, list[str]]]
"""Architecture -> what it refuses, as "H > 16384" or "coding=lookup", and what it launches, each with its point."""


def decisions(
    variant: Variant, from_axes: Axes | None = None, points: Sequence[Point] | None = None
) -> tuple[dict[str, Value], Decisions]:
    """The axes from which one axis at a time (of choices, two) is changed, and what comes of it on each architecture.

    Args:
        from_axes: As a table has them; None is the last benchmark point that the variant supports.
        points: `benchmark_points` of the variant, where they are there already.
    """
    points = points if points is not None else benchmark_points(variant)
    start = dict(from_axes) if from_axes is not None else _supported_axes(variant, points)
    found = {}
    for arch, facts in _DEVICES.items():
        refused = sorted([*_refused(variant, start, facts), *_illegal(variant)])
        found[arch] = {"refuses": refused, "launches": sorted(_launches(variant, points, facts))}
    return start, found


def _supported_axes(variant: Variant, points: Sequence[Point]) -> dict[str, Value]:
    for facts in _DEVICES.values():
        for here in reversed(points):
            if variant.refusal(here.axes, facts) is None:
                return dict(here.axes)
    raise LookupError(f"{variant.contract.name}.{variant.name}: it supports none of the op's benchmark points")


def benchmark_points(variant: Variant) -> list[Point]:
    """Every point of `_held`, named as the contract names it, whether the variant supports it or not."""
    named = ((name, point(variant, "engine", INTERPRETER, axes)) for name, axes in _held(variant.contract).items())
    return [replace(here, name=name) for name, here in named if here is not None]


def _held(contract: Contract) -> dict[str, Axes]:
    """What each point of the table holds: benchmark points, and corners of sizes alone, which launches are cut for."""
    sizes = {axis.name for axis in contract.axes if isinstance(axis, Int)}
    corners = {name: axes for name, axes in contract.corners.items() if axes.keys() <= sizes}
    return {**corners, **contract.benchmarks}


def _refused(variant: Variant, start: Axes, facts: DeviceFacts) -> Iterator[str]:
    """Every change of the axes that changes whether they are refused; "as it is" where they are from the start."""

    def is_refused(changed: Axes) -> bool:
        return variant.refusal({**start, **changed}, facts) is not None

    usual = is_refused({})
    if usual:
        yield "as it is"
    choices = [(axis, value) for axis, value in _choices(variant.contract, start) if value != start.get(axis)]
    alone = {one: is_refused(dict([one])) != usual for one in choices}
    yield from (f"{axis}={value}" for (axis, value), differs in alone.items() if differs)
    for one, other in combinations(choices, 2):
        if one[0] != other[0] and (is_refused(dict([one, other])) != usual) != (alone[one] or alone[other]):
            yield f"{one[0]}={one[1]} and {other[0]}={other[1]}"
    for axis in variant.contract.axes:
        if isinstance(axis, Int) and isinstance(value := start.get(axis.name), int):
            yield from _bounds(axis, value, partial(_differs, is_refused, usual, axis.name))


def _illegal(variant: Variant) -> Iterator[str]:
    """What a config may not be."""
    for name, (low, high) in variant.limits.items():
        yield f"config {name} < {low}"
        yield f"config {name} > {high}"


def _differs(is_refused: Callable[[Axes], bool], usual: bool, axis: str, value: int) -> bool:
    return is_refused({axis: value}) != usual


def _choices(contract: Contract, start: Axes) -> Iterator[tuple[str, Value]]:
    for axis in contract.axes:
        if isinstance(axis, Choice):
            yield from ((axis.name, value) for value in dict.fromkeys(axis.legal or axis.draws))
    for name, value in start.items():  # what a call binds beside the contract's axes
        if name not in contract.axis_by_name and isinstance(value, bool):
            yield name, not value


def _bounds(axis: Int, start: int, differs: Callable[[int], bool]) -> Iterator[str]:
    """The first sizes above and below at which something changes, as far as the end of the axis tells."""
    for end, sign in ((axis.high, ">"), (axis.low, "<")):
        if (last := last_alike(lambda size: not differs(size), start, end)) is not None:
            yield f"{axis.name} {sign} {last}"


def _launches(variant: Variant, points: Sequence[Point], facts: DeviceFacts) -> Iterator[str]:
    """The workspace, grids and constants of the launches at each benchmark point that the variant supports."""
    contract, meta, config = variant.contract, torch.device("meta"), variant.default_config(facts.arch)
    for here in points:
        if variant.refusal(here.axes, facts) is not None:
            continue
        lines = [f"{here.name}: {_workspace(variant, here.axes, config, facts)}"]

        def door(
            kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config, lines: list[str] = lines
        ) -> None:
            numbers = {key: value for key, value in arguments.items() if isinstance(value, int | float)}
            constants = " ".join(f"{key}={value}" for key, value in sorted(numbers.items()))
            lines.append(f"{kernel.__name__} {tuple(grid)} {constants}")

        outputs = contract.allocate_outputs(here.axes, here.arguments, meta)
        Kernel(variant, NEAREST, {}, door).launch_into(outputs, here.arguments, here.axes, meta, facts, config)
        yield "; ".join(lines)


def _workspace(variant: Variant, axes: Axes, config: Config, facts: DeviceFacts) -> str:
    buffers = variant.workspace(axes, config, facts)
    return ", ".join(f"{name} {list(b.shape)} {b.dtype}{' zeroed' * b.zeroed}" for name, b in buffers.items()) or "-"


def read() -> dict[str, dict[str, Any]]:
    """The table: "op.variant" -> the axes from which it was made, and what is decided."""
    table: dict[str, dict[str, Any]] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    return table


def _grouped(decided: Decisions) -> dict[str, dict[str, str]]:
    """What is decided -> each thing -> the architectures, in words, which share most of it."""
    groups: dict[str, dict[str, list[str]]] = {"refuses": {}, "launches": {}}
    for arch, kinds in decided.items():
        for kind, things in kinds.items():
            for thing in things:
                groups[kind].setdefault(thing, []).append(arch)
    return {
        kind: {thing: "all" if len(archs) == len(_DEVICES) else " ".join(archs) for thing, archs in things.items()}
        for kind, things in groups.items()
    }


def difference(
    variant: Variant, table: Mapping[str, Mapping[str, Any]], points: Sequence[Point] | None = None
) -> str | None:
    """The first thing that a variant decides otherwise than the table says; None where all is so, or is not there.

    A benchmark point that is another than the table's says nothing. points: as for `decisions`.
    """
    was = table.get(f"{variant.contract.name}.{variant.name}")
    if was is None:
        return None
    now = _grouped(decisions(variant, was["axes"], points)[1])
    held = _held(variant.contract)
    known = {name for name, axes in was["points"].items() if name in held and dict(held[name]) == axes}
    for kind in now:
        for thing in dict.fromkeys((*was[kind], *now[kind])):
            if kind == "launches" and thing.partition(":")[0] not in known:
                continue
            before, after = was[kind].get(thing, "none"), now[kind].get(thing, "none")
            if before != after:
                return f"{kind} {thing}: on {after}, in the table on {before}"
    return None


def write(variants: Mapping[str, Variant]) -> None:
    """Writes the table anew, of these variants by "op.variant"."""
    rows = {}
    for name, variant in sorted(variants.items()):
        axes, decided = decisions(variant)
        rows[name] = {"axes": axes, "points": _held(variant.contract), **_grouped(decided)}
    TABLE.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    from tkernels.registry import builtin_ops

    launching = (one for op in builtin_ops().values() for one in op.variants.values() if one.launch is not None)
    write({f"{one.contract.name}.{one.name}": one for one in launching})
