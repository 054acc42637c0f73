"""Telling that a device had too little memory for a step from every other failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")

_CPU_ALLOCATOR = "DefaultCPUAllocator: "  # what torch's allocator of a CPU says ends with the memory it was asked for


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
    except RuntimeError as error:
        if (why := explain_exhaustion(error)) is None:
            raise
        return Exhaustion(why)


def explain_exhaustion(error: RuntimeError) -> str | None:
    """Why there was too little memory on the device, in torch's words; None where `error` is another failure."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return text.partition(" GPU ")[0].strip()  # the rest is on other processes and settings
    _, found, asked = text.partition(_CPU_ALLOCATOR)
    return asked.splitlines()[0].strip() if found else None
