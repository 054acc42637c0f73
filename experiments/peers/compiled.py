"""torch.compile of an op's plain definition: what a project gets that writes no kernel at all."""

import inspect
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from tkernels.contract import Axes
from tkernels.device import DeviceFacts
from tkernels.variant import Variant


def compiled_variant(function: Callable[..., Any]) -> Variant:
    """The variant that is torch.compile of an op's plain definition."""
    call = _compiled(function)
    return Variant(wins="a peer", function=call, supports=supports, deterministic=True, batch_invariant=False)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of tensors [T, ...] (and numbers), compiled on its first call of each kind: dtypes, and which of the
    tensors are dense. T is dynamic, as an engine's batches are; other sizes are taken as they come, and become dynamic
    once they change.
    """
    assert isinstance(function, FunctionType)
    plain = function
    names = tuple(inspect.signature(plain).parameters)
    kinds: dict[tuple[Any, ...], Callable[..., Any]] = {}

    @wraps(plain)
    def call(*given: Any, **named: Any) -> Any:
        arguments = (*given, *(named[name] for name in names[len(given) :]))
        tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
        kind = tuple((one.dtype, one.is_contiguous()) for one in tensors)
        if kind not in kinds:
            # Dynamo gives up on a code object after some recompilations, and would then run it as it is. A copy is
            # another code object; `fullgraph` makes giving up an error.
            copy = FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__)
            kinds[kind] = torch.compile(copy, fullgraph=True)
            for one in tensors:
                if one.dim() > 1:
                    torch._dynamo.maybe_mark_dynamic(one, 0)
        return kinds[kind](*arguments)

    return call


def wide(x: torch.Tensor) -> torch.Tensor:
    """x as it is computed with: in float32 at least, which costs nothing where operations are fused."""
    return x if x.dtype == torch.float64 else x.float()


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    """What torch.compile needs: a GPU that Triton knows, or a C++ compiler and Python's headers on a CPU."""
    if device.arch.startswith("sm_"):
        capability = int("".join(filter(str.isdigit, device.arch.removeprefix("sm_"))))
        return None if capability >= 70 else f"torch.compile needs sm_70 or later, this is {device.arch}"
    if device.arch.startswith("gfx"):
        return None
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"torch.compile needs a C++ compiler on a CPU, and there is no {compiler}"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "torch.compile needs Python's headers on a CPU, and Python.h is not there"
    return None
