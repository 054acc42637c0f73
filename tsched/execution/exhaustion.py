"""Telling that a device had too little memory for a step from every other failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")

_CPU_ALLOCATOR = "DefaultCPUAllocator: "  # what torch's allocator of a CPU says ends with the memory it was asked for
_NUMPY = "Unable to allocate "  # numpy's, which shares a CPU's memory
# What says so without torch's allocator: pinned memory, a kernel's own stack, a library's handle.
_OTHERS = ("CUDA error: out of memory", "Triton Error [CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, slots=True)
class Exhaustion:
    """The device had too little memory for something; `why` is what its allocator says."""

    why: str


def attempt(
    act: Callable[ParametersT, ResultT], *arguments: ParametersT.args, **named: ParametersT.kwargs
) -> ResultT | Exhaustion:
    """What `act` returns, or that the device had too little memory for it. Other exceptions pass through."""
    try:
        return act(*arguments, **named)
    except (RuntimeError, MemoryError) as error:
        if (why := explain_exhaustion(error)) is None:
            raise
        return Exhaustion(why)


def explain_exhaustion(error: BaseException) -> str | None:
    """Why there was too little memory on the device, in its allocator's words; None where `error` is another failure.

    A recording that fails says so itself, in an error raised while the allocator's was handled.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return text.partition(" GPU ")[0].strip()  # the rest is on other processes and settings
    if isinstance(error, MemoryError) and text.startswith(_NUMPY):
        return text
    _, found, asked = text.partition(_CPU_ALLOCATOR)
    if found:
        return asked.splitlines()[0].strip()
    if any(other in text for other in _OTHERS):
        return text.splitlines()[0]
    return None if error.__context__ is None else explain_exhaustion(error.__context__)
