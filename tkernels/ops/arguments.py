"""Tensors as kernels take them: pointers and strides by name."""

from functools import cache
from typing import Any

import torch


def pointers(layout: str, *tensors: torch.Tensor | None) -> dict[str, Any]:
    """Each tensor's pointer, and the strides that its kernel takes.

    `pointers("q[th] weight", q, weight)` has q_ptr, stride_q_t, stride_q_h (the strides of q's first two dims) and
    weight_ptr.

    Args:
        layout: For each tensor its name, and in brackets a letter for each leading dim whose stride is taken.
        tensors: One for each name; None where an optional one without strides is not there.
    """
    names, counts = _parameter_names(layout)
    values: list[Any] = []
    for count, tensor in zip(counts, tensors, strict=True):
        values.append(tensor)
        if count:
            assert tensor is not None, "a tensor whose strides are taken is there"
            values += tensor.stride()[:count]
    return dict(zip(names, values, strict=True))


@cache
def _parameter_names(layout: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """A layout's parameters, and how many strides each tensor has. Cached: formatting them costs more than a launch."""
    names: list[str] = []
    counts = []
    for part in layout.split():
        name, _, dims = part.removesuffix("]").partition("[")
        names += [f"{name}_ptr", *(f"stride_{name}_{dim}" for dim in dims)]
        counts.append(len(dims))
    return tuple(names), tuple(counts)
