"""Launches whose tensors are far larger than memory: floats are never touched, integers lie in lazily backed zeros."""

import ctypes
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

from tkernels.inputs import tensors_in
from tkernels.interpreter.accesses import Access, watch_accesses
from tkernels.interpreter.replaced import replaced_methods

_COPIED = 2**24
"""Bytes of a storage from which on the interpreter is not given the storage itself."""

_MAP_NORESERVE = 0x4000
"""Linux's on every architecture that Triton runs on; Python 3.11's mmap has no name for it."""


def lazy_zeros(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros [elements] in address space of which only the pages that are touched get memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)


def real_pointer(tensor: torch.Tensor) -> torch.Tensor:
    """What stands for a tensor in a launch that leaves float memory untouched."""
    if tensor.device.type == "meta":  # never touched: any address of the right type will do
        return torch.empty(1, dtype=tensor.dtype)
    if tensor.untyped_storage().nbytes() < _COPIED:
        return tensor
    # Only its address: the interpreter copies every argument's storage onto itself, and this one has gigabytes.
    element = (ctypes.c_char * tensor.element_size()).from_address(tensor.data_ptr())
    return torch.frombuffer(element, dtype=tensor.dtype)


@contextmanager
def floats_untouched(arguments: Mapping[str, Any], watch: Access) -> Iterator[None]:
    """Only the integer tensors of a launch have memory: other loads and atomics give zeros, other stores go nowhere.

    Args:
        arguments: The launch's, before `real_pointer`. A view of floats as integers has no memory either.
        watch: Sees every access. Where there is no memory, addresses mean nothing: they are on faked strides, or
            counted from a pointer to one element.
    """
    builder = triton_interpreter.interpreter_builder
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas
    kept = [one for one in tensors_in(arguments) if one.device.type != "meta" and not one.is_floating_point()]
    spans = [(one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()) for one in kept]

    def is_unreal(pointers: Any, mask: np.ndarray | None = None) -> bool:
        if pointers.get_element_ty().is_floating():
            return True
        addresses, live = np.broadcast_arrays(pointers.data, True if mask is None else mask)
        addresses = addresses[live.astype(bool)].astype(np.int64)
        if not len(addresses):
            return False
        low, high = int(addresses.min()), int(addresses.max())
        return not any(start <= low and high < start + count for start, count in spans)

    def zero_load(ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        nowhere = triton_interpreter.TensorHandle(np.zeros(ptrs.data.shape, dtype=bool), tl.int1)
        return load(ptrs, nowhere if is_unreal(ptrs, mask.data) else mask, *rest, **options)

    def no_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return None if is_unreal(ptrs, mask.data) else store(ptrs, value, mask, *rest)

    def zeros_before(ptr: Any, values: Any) -> Any:
        shape = np.broadcast_shapes(np.shape(ptr.data), np.shape(values.data))
        return triton_interpreter.TensorHandle(np.zeros(shape, dtype=values.data.dtype), values.dtype.scalar)

    def no_rmw(op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        return zeros_before(ptr, val) if is_unreal(ptr, mask.data) else rmw(op, ptr, val, mask, *rest)

    def no_cas(ptr: Any, cmp: Any, val: Any, *rest: Any) -> Any:
        return zeros_before(ptr, val) if is_unreal(ptr) else cas(ptr, cmp, val, *rest)

    untouched = replaced_methods(
        create_masked_load=zero_load,
        create_masked_store=no_store,
        create_atomic_rmw=no_rmw,
        create_atomic_cas=no_cas,
    )
    with untouched, watch_accesses(watch):
        yield
