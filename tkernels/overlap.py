"""Whether tensors share memory, from pointers, shapes and strides alone: nothing is read, so nothing waits."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

_MAX_WORK = 10_000
"""Steps of numpy's exact solver; the views of a fused row or of a joint cache take fewer than ten."""

_ENUMERATED = 2**16


class _Memory:
    """A tensor's addresses as numpy knows them; its memory may be a device's, and is not touched."""

    def __init__(self, tensor: torch.Tensor) -> None:
        width = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * width for step in tensor.stride()),
            "typestr": f"|V{width}",
        }


def overlap_each_other(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether some element of one lies on an element of the other. False where that is too hard to tell."""
    if one.device.type == "meta" or not (one.numel() and other.numel()):
        return False  # no memory: every storage on "meta" has the address 0
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    try:
        return bool(np.shares_memory(np.asarray(_Memory(one)), np.asarray(_Memory(other)), max_work=_MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements lie at one address, as in an expanded tensor."""
    dims = sorted((step, n) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    if tensor.numel() == 0 or not dims:
        return False
    if dims[0][0] == 0:
        return True
    reach = 0
    for step, n in dims:
        if step <= reach:
            break
        reach += (n - 1) * step
    else:
        return False  # each stride steps over all that the smaller ones reach
    if math.prod(n for _, n in dims) > _ENUMERATED:
        return True  # strides that interleave: no layout of ours, and too many to see whether they meet
    offsets = np.zeros(1, dtype=np.int64)
    for step, n in dims:
        offsets = np.add.outer(np.arange(n) * step, offsets).ravel()
    return len(np.unique(offsets)) < len(offsets)


def shared_memory(arguments: Mapping[str, Any], written: Sequence[str]) -> tuple[str, str] | None:
    """(argument, rule that it breaks) of the first written tensor that shares memory with itself or with another."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    for name in written:
        if name not in tensors:
            continue
        if overlaps_itself(tensors[name]):
            strides = tuple(tensors[name].stride())
            return name, f"is written, so no two of its elements may share memory, as they do at strides {strides}"
        for other, tensor in tensors.items():
            if other != name and overlap_each_other(tensors[name], tensor):
                return name, f"is written, so it may not share memory with argument {other!r}"
    return None
