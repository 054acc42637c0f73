"""Every tensor of a call lies flush against a page that nobody may touch: an overrun by one element is a SIGSEGV.

What the address sanitizer does for Triton's accesses, this does for everything, torch functions included, with nothing
in between that could be wrong. Each call runs in a forked child, so that a crash is a finding and not the end.
"""

import ctypes
import mmap
import signal
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from tkernels.config import Config
from tkernels.contract import Case
from tkernels.device import device_facts
from tkernels.inputs import map_tensors, tensors_in, whole_storage
from tkernels.isolation import Tell, run_forked
from tkernels.launch import jit_door
from tkernels.variant import Variant
from tkernels.verification.calls import Place, call
from tkernels.verification.kernel_errors import describe_error
from tkernels.verification.sanitizers.base import Sanitizer

SECONDS = 60.0
"""Of one call, which takes a fraction of one: a child that takes longer does not end."""

_PROT_NONE = 0
Edge = Literal["start", "end"]


def guarded_bytes(count: int, edge: Edge, align: int = 1) -> torch.Tensor:
    """uint8 [count] between two untouchable pages, as near to the one at `edge` as a multiple of `align` comes."""
    pages = -(-count // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for page in (base, base + (pages + 1) * mmap.PAGESIZE):
        if protect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect failed")
    offset = mmap.PAGESIZE + ((pages * mmap.PAGESIZE - count) // align * align if edge == "end" else 0)
    return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=offset)


def guarding(edge: Edge, align: int = 1) -> Place:
    """Copies a contiguous tensor into guarded memory."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 0:
            return tensor
        return guarded_bytes(tensor.nbytes, edge, align).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    return place


def guarded_inputs(inputs: Mapping[str, Any], edge: Edge, align: int = 1) -> dict[str, Any]:
    """Copies of the tensors with the same strides; of each storage, the bytes from its first to its last element.

    Views of one storage stay so: only what lies outside all of them is out of bounds. `align` (bytes) is what the
    first element's address is a multiple of, at the price of as much less one byte that lies beyond the last.
    """
    spans: dict[int, tuple[int, int]] = {}
    for tensor in tensors_in(inputs):
        if tensor.numel():
            key, width = tensor.untyped_storage().data_ptr(), tensor.element_size()
            first = int(tensor.storage_offset()) * width
            last = first + width * int(1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))
            low, high = spans.get(key, (first, last))
            spans[key] = min(low, first), max(high, last)
    copies: dict[int, torch.Tensor] = {}

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 0:
            return tensor
        storage = tensor.untyped_storage()
        low, high = spans[storage.data_ptr()]
        if storage.data_ptr() not in copies:
            whole = whole_storage(tensor, torch.uint8)
            copies[storage.data_ptr()] = guarded_bytes(high - low, edge, align).copy_(whole[low:high])
        typed = copies[storage.data_ptr()].view(tensor.dtype)
        return typed.as_strided(
            tensor.shape, tensor.stride(), typed.storage_offset() + tensor.storage_offset() - low // typed.itemsize
        )

    return map_tensors(inputs, placed)


def crash_of(function: Callable[[], None], seconds: float = SECONDS) -> str | None:
    """Runs a function in a forked child; says how it ended where it did not return. Its exceptions are crashes too."""

    def work(tell: Tell) -> None:
        torch.set_num_threads(1)  # the threads of the parent's pool are not in this process
        try:
            function()
        except Exception as error:
            tell(describe_error(error)[:4000])

    raised: list[str] = []
    ending = run_forked(work, raised.append, seconds)
    if ending.timed_out:
        return f"did not end within {seconds:g} s"
    if ending.signal:
        return f"died of {signal.Signals(ending.signal).name}"
    return raised[0] if raised else ending.death


def _run(variant: Variant, case: Case, config: Config | None) -> str | None:
    edges: tuple[Edge, ...] = ("end", "start")
    for edge in edges:
        why = crash_of(lambda edge=edge: _call_guarded(variant, case, config, edge))  # type: ignore[misc]
        if why is not None:
            side = "after" if edge == "end" else "before"
            return f"with an untouchable page right {side} every tensor, it {why}"
    return None


def _call_guarded(variant: Variant, case: Case, config: Config | None, edge: Edge) -> None:
    inputs = guarded_inputs(case.inputs, edge)
    axes, device = case.contract.bind_axes(case.contract.bind_arguments((), inputs))
    align = 1
    if variant.unsupported_reason(axes, device, device_facts(device)):  # as by tensor descriptors, which need 16 bytes
        align = 16
        inputs = guarded_inputs(case.inputs, edge, align)
    # No check of addresses before an access: the page itself is what judges.
    call(variant, inputs, config, door=jit_door, place=guarding(edge, align))


SANITIZER = Sanitizer("guard", "an access just before or after a tensor, by a crash at an untouchable page", _run)
