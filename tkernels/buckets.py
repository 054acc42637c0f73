"""Which calls share a tuned config: the part of their axes that a variant's key names, as text.

Sizes are rounded up to a power of two, those of the batch to their axis's classes. The buckets of one variant that
differ in classes alone are a family: one row may meet all of them, alone and beside others.
"""

import re
from collections.abc import Sequence

import torch

from tkernels.contract import Axes, Int
from tkernels.variant import Variant


def bucket(variant: Variant, axes: Axes) -> str:
    """The part of the axes that selects a config: dtypes and key axes, as "M<=16,N<=4096,activation=bfloat16"."""
    parts = []
    fixed = {axis for option in variant.left_out for axis in variant.contract.options[option]}
    for axis in variant.contract.axes:
        if axis.name in fixed:  # an option that it does not take changes none of its launches
            continue
        value = axes.get(axis.name)
        if axis.name in variant.key and isinstance(axis, Int) and isinstance(value, int):
            parts.append(axis.size_class(value))
        elif axis.name in variant.key or isinstance(getattr(torch, str(value), None), torch.dtype):
            parts.append(f"{axis.name}={value}")
    return ",".join(parts)


def family(variant: Variant, point: str) -> str:
    """A bucket without its classes of the batch."""
    return ",".join(part for part in _parts(point) if _name(part) not in _classes(variant))


def class_distance(variant: Variant, point: str, other: str) -> int:
    """How many classes lie between two buckets of one family."""
    ordered, there = _classes(variant), {_name(part): part for part in _parts(other)}
    return sum(
        abs(ordered[name].index(part) - ordered[name].index(there[name]))
        for part in _parts(point)
        if (name := _name(part)) in ordered
    )


def unknown_class(variant: Variant, point: str) -> str | None:
    """What a bucket, of a lockfile, has in the place of one of the variant's classes, in words; None where all are."""
    there = {_name(part): part for part in _parts(point)}
    for name, labels in _classes(variant).items():
        if there.get(name) not in labels:
            return f"{there.get(name, f'no class of {name}')} is none of {', '.join(labels)}"
    return None


def class_axes(variant: Variant) -> list[Int]:
    """The axes of the batch that the key names and that have classes."""
    return [
        axis
        for axis in variant.contract.axes
        if isinstance(axis, Int) and axis.batch and axis.classes and axis.name in variant.key
    ]


def _classes(variant: Variant) -> dict[str, Sequence[str]]:
    """Axis of the batch -> its classes, the smallest sizes first."""
    return {axis.name: axis.class_labels for axis in class_axes(variant)}


def _parts(point: str) -> list[str]:
    return point.split(",") if point else []


def _name(part: str) -> str:
    """The axis of a bucket's part."""
    return re.split(r"<=|>|=", part, maxsplit=1)[0]
