"""Every unmasked lane of every load, store and atomic must fall on an element of a tensor of the launch.

Stricter than a range of bytes: the gaps of a strided view (the V part of a fused QKV row, the padding between rows)
belong to nobody, so a load that is saved only by luck is caught where it happens, before it is made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tkernels.config import Config
from tkernels.errors import TKernelsError
from tkernels.interpreter.accesses import watch_accesses
from tkernels.interpreter.replaced import overflow_checks
from tkernels.launch import Door, jit_door
from tkernels.mode import MODE
from tkernels.names import suggest_name


class AddressError(TKernelsError, RuntimeError):
    """An access outside every tensor of the launch."""


@dataclass(frozen=True)
class Extent:
    """The elements of one tensor: base address, past-the-end address, item size, (size, stride in bytes) outermost
    first.
    """

    name: str
    start: int
    end: int
    itemsize: int
    dims: tuple[tuple[int, int], ...]

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> "Extent":
        itemsize = tensor.element_size()
        dims = [(n, s * itemsize) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and s > 0]
        dims.sort(key=lambda dim: -dim[1])
        last = sum((n - 1) * s for n, s in dims)
        end = tensor.data_ptr() + (last + itemsize if tensor.numel() else 0)
        return Extent(name, tensor.data_ptr(), end, itemsize, tuple(dims))

    def holds(self, addresses: np.ndarray, width: int) -> np.ndarray:
        """Which addresses are elements of this tensor; exact for views whose strides nest, which all of ours do."""
        inside, rest = self._rest(addresses, width)
        return inside & (rest == 0) & (width == self.itemsize)

    def covers(self, addresses: np.ndarray) -> np.ndarray:
        """Which bytes are of an element of this tensor, whatever the width of an access to them."""
        inside, rest = self._rest(addresses, 1)
        return inside & (rest < self.itemsize)

    def _rest(self, addresses: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Which addresses lie between the first and the last element, and how far each is past an element's begin."""
        inside = (addresses >= self.start) & (addresses + width <= self.end)
        rest = np.where(inside, addresses - self.start, 0)
        for size, stride in self.dims:
            index = np.minimum(rest // stride, size - 1)
            rest = rest - index * stride
        return inside, rest


def launch_tensors(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among a launch's arguments, and those under its tensor descriptors."""
    bases = {n: value.base if isinstance(value, TensorDescriptor) else value for n, value in arguments.items()}
    return {name: value for name, value in bases.items() if isinstance(value, torch.Tensor)}


def place_of(arguments: Mapping[str, Any], address: int) -> str:
    """An address in words, counted from where the nearest tensor begins."""
    tensors = launch_tensors(arguments)
    near = min(tensors, key=lambda name: abs(address - tensors[name].data_ptr()))
    return f"byte {address - tensors[near].data_ptr()} of {near!r}"


def _extents(arguments: Mapping[str, Any]) -> list[Extent]:
    """Of the tensors of a launch, whatever shape its descriptors claim."""
    return [Extent.of(name, value) for name, value in launch_tensors(arguments).items()]


def _place(address: int, extents: Sequence[Extent]) -> str:
    """Where it lies, by the tensor that it is in or next to."""
    near = min(extents, key=lambda e: max(e.start - address, address - e.end + 1, 0))
    byte = f"byte {address - near.start} of {near.name!r}"
    if not near.start <= address < near.end:
        return f"{byte}, which spans {near.end - near.start}"
    if near.covers(np.array([address])).any():
        return f"{byte}, whose elements have {near.itemsize}"
    return f"{byte}, between its elements, as padding between rows is"


def _refuse_unknown(kernel: Any, arguments: Mapping[str, Any]) -> None:
    """Raises TypeError for an argument that the kernel has no parameter for, which the interpreter alone lets pass."""
    names = getattr(kernel, "arg_names", arguments)
    for name in arguments:
        if name not in names:
            nearest = suggest_name(name, [one for one in names if one not in arguments])
            known = f"it has {', '.join(names)}{nearest}"
            raise TypeError(f"{kernel.__name__}() has no parameter {name!r}: {known}")


def sanitizing_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
    """The interpreter with the address and int32-overflow sanitizers on."""
    _refuse_unknown(kernel, arguments)
    extents = _extents(arguments)

    def check(addresses: np.ndarray, mask: np.ndarray, width: int, access: str) -> None:
        if access.startswith("box") and not np.any(mask):
            # The hardware skips such an access without a word: what reaches it is an index from nowhere.
            raise AddressError(f"{kernel.__name__}: {access} wholly outside its descriptor's shape")
        addresses, mask = np.broadcast_arrays(addresses, mask)
        live = np.unique(addresses[mask.astype(bool)]).astype(np.int64)
        bad = np.ones(live.shape, dtype=bool)
        for extent in extents:
            bad &= ~extent.holds(live, width)
            if not bad.any():
                return
        first = int(live[bad][0])
        lanes = f"{access} of {width} bytes outside every argument, {int(bad.sum())} lanes"
        raise AddressError(f"{kernel.__name__}: {lanes}; the first is at {_place(first, extents)}")

    with watch_accesses(check), overflow_checks():
        jit_door(kernel, grid, arguments, config)


def default_door() -> Door:
    """The sanitizing interpreter where this process interprets, else the plain launch.

    An interpreted kernel that reaches outside its tensors would otherwise take this process down with it.
    """
    return sanitizing_door if MODE == "interpret" else jit_door
