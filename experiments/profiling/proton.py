"""Ranges as scopes of Proton, Triton's own profiler, which attributes kernels to them by CUPTI or roctracer."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from experiments.planning.plan import Plan
from experiments.stages.steady import open_steady
from tkernels.ranges import SILENCE, CapturedRanges, Category


def unavailable(device: torch.device) -> str | None:
    """Why Proton has nothing to tell here, or None."""
    if device.type != "cuda":
        return f"Triton's profiler reads a GPU's counters (CUPTI, roctracer), and the device is {device}"
    try:
        import_module("triton.profiler")
    except ImportError as error:
        return f"this Triton was built without its profiler: {error}"
    return None


class ProtonRange:
    __slots__ = ("_name", "_profiler")

    def __init__(self, profiler: Any, name: str) -> None:
        self._profiler, self._name = profiler, name

    def __enter__(self) -> None:
        self._profiler.enter_scope(self._name)

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        self._profiler.exit_scope(self._name)

    def carrying(self, request_ids: Sequence[int]) -> "ProtonRange":
        """Without the requests: a scope of each name is one line of Proton's tree."""
        return self


class ProtonRanges:
    """Every range as a scope of `profiler`, the module triton.profiler."""

    listening = True

    def __init__(self, profiler: Any) -> None:
        self._profiler = profiler

    def named(self, name: str, category: Category, *, launches: bool = True) -> ProtonRange:
        return ProtonRange(self._profiler, name)

    def captured(self) -> CapturedRanges:
        return SILENCE


def profile_with_proton(plan: Plan, out: Path, profiler: Any) -> Path:
    """A steady round of the first arm; returns Proton's file. Steps are launched one by one and graphs are not
    recorded: a scope is open while its kernels are launched, which a replay does not do.
    """
    steady = open_steady(plan, ProtonRanges(profiler), overlap=False, cuda_graphs=False)
    steady.serve()
    profiler.start(str(out / "proton"), context="shadow", data="tree", hook="triton")
    try:
        steady.serve()
    finally:
        profiler.finalize()
    return out / "proton.hatchet"
