"""Tensors as kernels take them: pointers and strides by name."""

from functools import cache
from typing import Any

import torch


def pointers(layout: str, *tensors: torch.Tensor | None) -> dict[str, Any]:
    """Each tensor's pointer, and the strides that its kernel takes.

    `pointers("q[th] weight", q, weight)` has q_ptr, stride_q_t, stride_q_h (the strides of q's first two dims) and
    weight_ptr.

    Args:
        layout: for each tensor its name, and in brackets a letter for each leading dim whose stride is taken.
        tensors: one for each name; None where an optional one without strides is not there.
    """
    arguments: dict[str, Any] = {}
    for (pointer, strides), tensor in zip(_parameter_names(layout), tensors, strict=True):
        arguments[pointer] = tensor
        if strides and tensor is not None:
            arguments.update(zip(strides, tensor.stride(), strict=False))
    return arguments


@cache
def _parameter_names(layout: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(pointer, strides) of each tensor of a layout. Cached: formatting them would cost more than a launch may."""
    found = []
    for part in layout.split():
        name, _, dims = part.removesuffix("]").partition("[")
        found.append((f"{name}_ptr", tuple(f"stride_{name}_{dim}" for dim in dims)))
    return tuple(found)
