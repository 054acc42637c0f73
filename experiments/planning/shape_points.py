"""A point of an op from the sizes that are given of it: what is left open is as an engine's calls have it."""

from collections.abc import Iterable, Mapping, Sequence

from tkernels.contract import Contract, Value
from tkernels.measurement import complete_axes

# What the engine's own calls look like, where a contract's first draw is a nastier one.
AS_SERVED: Mapping[str, Value] = {"lengths": "full", "bound": "exact"}
DTYPE_ROLES = ("activation", "kv", "weight", "out")


def name_points(asked: Sequence[Mapping[str, Value]]) -> dict[str, Mapping[str, Value]]:
    """The points of `shapes` by name: of one all that it says, of several what tells them apart; of one that has none
    of that, all.
    """
    if len(asked) == 1:
        return {_format_sizes(asked[0], asked[0]): asked[0]}
    telling: list[str] = []
    for axis in dict.fromkeys(axis for axes in asked for axis in axes):
        if _count_distinct(asked, [*telling, axis]) > _count_distinct(asked, telling):
            telling.append(axis)
    return {_format_sizes(axes, telling) or _format_sizes(axes, axes): axes for axes in asked}


def _count_distinct(asked: Sequence[Mapping[str, Value]], names: Sequence[str]) -> int:
    return len({tuple(axes.get(name) for name in names) for axes in asked})


def _format_sizes(axes: Mapping[str, Value], names: Iterable[str]) -> str:
    return ",".join(f"{name}={axes[name]}" for name in names if name in axes) or ("" if axes else "drawn")


def asked_point(contract: Contract, asked: Mapping[str, Value], dtype: str) -> dict[str, Value]:
    """A point of `shapes` with every axis given: what it leaves open as an engine's calls have it, and no more pages
    than it uses.

    Raises:
        ContractError: It breaks a constraint.
    """
    given = {axis: value for axis, value in AS_SERVED.items() if axis in contract.axis_by_name} | dict(asked)
    is_sized = {"B", "N"} <= asked.keys() or ("B" not in asked and {"T", "S"} <= asked.keys())
    if "P" in contract.axis_by_name and "P" not in asked and is_sized:
        given["P"] = max(1, used_pages(asked))
    return complete_point(contract, given, dtype)


def complete_point(contract: Contract, axes: Mapping[str, Value], dtype: str) -> dict[str, Value]:
    """The point with every axis given: the dtype where it gives none itself, and the rest as `complete_axes` says."""
    dtype = str(axes.get("activation", dtype))
    roles = {role: dtype for role in DTYPE_ROLES if role in contract.axis_by_name}
    return complete_axes(contract, {**roles, **axes})


def used_pages(axes: Mapping[str, Value]) -> int:
    """The pages of a cache that a point uses."""
    if "pairs" in axes:  # one page is copied to all the others
        return int(axes["pairs"]) + 1
    return int(axes["B"]) * int(axes["N"]) if "B" in axes else -(-int(axes["T"]) // int(axes["S"]))
