"""Telling that a device had too little memory for a step from every other failure."""

from __future__ import annotations

import torch

_CPU_ALLOCATOR = "DefaultCPUAllocator: "  # what torch's allocator of a CPU says ends with the memory it was asked for


def explain_exhaustion(error: RuntimeError) -> str | None:
    """Why there was too little memory on the device, in torch's words; None where `error` is another failure."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return text.partition(" GPU ")[0].strip()  # the rest is on other processes and settings
    _, found, asked = text.partition(_CPU_ALLOCATOR)
    return asked.splitlines()[0].strip() if found else None
