"""The sizes that an op's variants exist for and no ordinary draw reaches: found by asking what each of them takes."""

from collections.abc import Callable
from functools import partial

import torch

from tkernels.contract import Axes, Choose, ContractError, Int
from tkernels.device import device_facts
from tkernels.preparation import prepared_case
from tkernels.registry import builtin_ops
from tkernels.variant import UnsupportedError, Variant
from tkernels.verification.covering import chooser

_LARGEST = 2**17
"""Elements along one axis: a row of this many is what an interpreter computes in a tenth of a second."""
_TRIES = 40
_WHOLES = (1, 8, 32, 128)
"""What sizes may have to be multiples of: a vector's, a warp's or a block's elements."""


def sizes_to_reach(variant: Variant, device: torch.device) -> list[tuple[str, int]]:
    """(axis, size) of each case that a variant is to be checked at beside its draws.

    They are, wherever they lie beyond all sizes that are drawn: the last size that it takes itself, the first that
    another variant of its op refuses, and the ends of the region that it declares.
    """
    contract = variant.contract
    if variant.kind == "torch":
        return []  # the measure of the others, checked beside each of them
    builtin = builtin_ops()
    own = {axis.name: last for axis, last in last_sizes(variant, device).items()}
    siblings = builtin[contract.name].variants.values() if contract.name in builtin else ()
    found: list[tuple[str, int]] = []
    for other in (variant, *(one for one in siblings if one.name != variant.name)):
        for axis, last in last_sizes(other, device).items():
            if last >= max(axis.draws):
                found += [(axis.name, last)] if other is variant else _first_beyond(variant, axis, last, device)
    for name, (low, high) in variant.region.items():
        axis = contract.axis_by_name[name]  # type: ignore[assignment]  # a region is of sizes
        if not any(low <= size <= high for size in (*axis.draws, *axis.wide)):
            found += _first_beyond(variant, axis, low - 1, device)
        last = high if axis.batch else min(high, _LARGEST)
        found += [(name, last)] if high > max((*axis.draws, *axis.wide)) else []
    return [(name, size) for name, size in dict.fromkeys(found) if size <= min(_LARGEST, own.get(name, _LARGEST))]


def last_sizes(variant: Variant, device: torch.device) -> dict[Int, int]:
    """The last size of each axis that a variant takes, for those axes where it refuses what comes after."""
    contract = variant.contract
    axes = _taken_axes(variant, device)
    found: dict[Int, int] = {}
    for axis in contract.axes:
        if isinstance(axis, Int) and axis.name in axes:
            takes = partial(_takes, variant, device, axes, axis.name)
            if (last := last_alike(takes, int(axes[axis.name]), axis.high)) is not None:
                found[axis] = last
    return found


def _taken_axes(variant: Variant, device: torch.device) -> Axes:
    """The axes of some call that a variant takes; none where no draw gives one."""
    return first_supported(variant, device) or first_supported(variant, device, inside=True) or {}


def _takes(variant: Variant, device: torch.device, axes: Axes, name: str, size: int) -> bool:
    return variant.unsupported_reason({**axes, name: size}, device, device_facts(device)) is None


def last_alike(alike: Callable[[int], bool], start: int, end: int) -> int | None:
    """The last size from `start`, where it is so, towards `end` that something holds for; None where it holds to there.

    Where it holds for multiples of 8, 32 or 128 alone, it ends with the last of these: a size that it does not hold for
    is asked again at the multiples before it.
    """
    step = 1 if end >= start else -1

    def holds_before(distance: int) -> bool:
        size = start + step * distance
        tried = (step * (step * size // whole * whole) for whole in _WHOLES)
        return any(alike(one) for one in tried if step * (one - start) >= 0)

    low, high = 0, abs(end - start)
    if holds_before(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds_before(middle) else (low, middle)
    return next((size for size in range(start + step * low, start, -step) if alike(size)), start)


def far_sizes(axis: Int) -> list[int]:
    """Sizes far beyond the draws, the largest first, of which a check takes the first that costs it little.

    They are just past powers of two: 32,768 wraps an index of 16 bits, 8,192 and 1,024 are what tables, buffers and
    grids are cut off at. A member of a batch is a program as a rule, so there 1,024 is as far as it goes, and a case of
    its own has the batch at which a grid ends. What may be absent, a window or a padding, is no size. The next multiple
    of 128 is for what comes in whole groups. Where the op allows none of them, its largest is as far.

    Not all are reached. Sequences and KV heads of paged attention are programs that each do much: 1,025 of either took
    11 to 20 s of CPU a variant. What launchers do with so many members is seen in dry runs (`batch_growth`).
    """
    if axis.low == 0 and not axis.batch:
        return []
    powers = (2**10,) if axis.batch else (2**15, 2**13, 2**10)
    sizes = (power + beyond for power in powers for beyond in (1, 128))
    found = [size for size in sizes if max(axis.draws) < size <= axis.high]
    return found or [axis.high] * (max(axis.draws) < axis.high <= max(powers))


def first_supported(variant: Variant, device: torch.device, inside: bool = False) -> Axes | None:
    """The axes of the first drawn call that a variant takes; with `inside`, of those that are drawn in its region."""
    contract, facts = variant.contract, device_facts(device)
    for seed in range(_TRIES):
        choose = chooser(seed)
        try:
            drawn = contract.draw_axes(choose, draw_inside(variant, choose) if inside else None)
        except ContractError:  # the op's rules leave no room beside these sizes
            continue
        try:
            case = prepared_case(variant, contract.case(drawn, seed, device))
        except UnsupportedError:
            continue
        axes, _ = contract.bind_axes(contract.bind_arguments((), case.inputs))
        if variant.unsupported_reason(axes, device, facts) is None:
            return axes
    return None


def draw_inside(variant: Variant, choose: Choose) -> Axes:
    """A size of each axis that a variant's region names: its first, the next multiple of 128, or its last. Of what
    counts members of a batch, each of which may be a program, the last is left out. A ContractError where the region
    begins beyond all that is checked.
    """
    held = {}
    for name, (low, high) in variant.region.items():
        if low > _LARGEST:
            raise ContractError(f"{variant.name} is for {name} from {low:,}, and none beyond {_LARGEST:,} is checked")
        last = low if variant.contract.axis_by_name[name].batch else high
        sizes = sorted({low, -(-low // 128) * 128, min(last, _LARGEST)})
        held[name] = choose(name, [size for size in sizes if size <= min(high, _LARGEST)])
    return held


def _first_beyond(variant: Variant, axis: Int, last: int, device: torch.device) -> list[tuple[str, int]]:
    """The first size beyond one that the axis' own rules allow, or the next one that a variant takes which takes whole
    groups; none where the rules end there.
    """
    own = [rule for rule in variant.contract.constraints if rule.names == {axis.name}]
    sizes = range(last + 1, min(axis.high, last + _LARGEST) + 1)
    allowed = (size for size in sizes if all(rule.holds({axis.name: size}) for rule in own))
    first, axes = next(allowed, None), _taken_axes(variant, device)
    if first is None or not axes:
        return []
    wholes = (-(-first // whole) * whole for whole in _WHOLES)
    return [(axis.name, next((one for one in wholes if _takes(variant, device, axes, axis.name, one)), first))]
