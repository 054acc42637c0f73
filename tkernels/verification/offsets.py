"""int32 offsets into large tensors, found without allocating one: by faked strides.

The launcher sees tensors whose outer strides are faked to 2**30 elements, so that index 2 lies at 2**31, and the
interpreter checks every integer +, - and *. Float data is not touched at all (loads give zeros, stores go nowhere). The
integer tensors, which steer the kernel, keep their contents, in an address space as large as their strides, of which
only the pages that hold an element are ever backed by memory.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from tkernels.config import Config
from tkernels.contract import Axes, Case, Int
from tkernels.device import INTERPRETER
from tkernels.inputs import map_tensors, tensors_in
from tkernels.interpreter.replaced import overflow_checks
from tkernels.launch import Kernel, Run, jit_door
from tkernels.tuning import NEAREST
from tkernels.variant import Variant
from tkernels.verification.untouched import floats_untouched, lazy_zeros, real_pointer

FAKED_STRIDE = 2**30
"""Below 2**31, or Triton would pass the stride itself as int64 and hide the fault."""


_WIDEST_DEVICE = replace(INTERPRETER, multiprocessors=1024)
"""More than any GPU has."""

_STEPS = (16, 64, 256, 1024, 2**63)
"""Sizes up to which a launcher may choose one way and another beyond."""


def _faked_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """FAKED_STRIDE for every dim but the last."""
    return (*[FAKED_STRIDE] * (tensor.dim() - 1), 1) if tensor.dim() > 1 else tensor.stride()


def _fake_strides(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same shape on faked strides; an integer tensor with its contents there."""
    if tensor.is_floating_point():
        return torch.empty_strided(tensor.shape, _faked_strides(tensor), dtype=tensor.dtype, device="meta")
    if tensor.dim() < 2 or tensor.numel() == 0:
        return tensor
    # A dim of one or two keeps its stride: index 1 overflows nothing, and what a kernel computes for its other, masked,
    # rows reaches no memory.
    pairs = zip(tensor.shape, tensor.stride(), _faked_strides(tensor), strict=True)
    strides = [faked if n > 2 else real for n, real, faked in pairs]
    elements = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
    return lazy_zeros(elements, tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor)


def _fake_parts(value: Any) -> Any:
    """A tensor, or a weight whose tensors are faked one by one: one whose span its class bounds stays as it is.

    A QuantizedWeight refuses a packed part of 2**31 words, so no kernel can meet such a stride.
    """
    if isinstance(value, torch.Tensor):
        return _fake_strides(value)
    for wanted in range(len(tensors_in({"weight": value}))):
        seen = itertools.count()

        def one(tensor: torch.Tensor, wanted: int = wanted, seen: Iterator[int] = seen) -> torch.Tensor:
            return _fake_strides(tensor) if next(seen) == wanted else tensor

        with suppress(ValueError):
            value = value.map_tensors(one)
    return value


def _large_buffers(variant: Variant, axes: Axes, config: Config) -> set[str]:
    """The buffers of a workspace that have 2**31 elements or more at some sizes: each size is grown in steps, with the
    others as they are and at the largest that the op allows. Scratch for each program of a device is none of these, and
    its strides are as they are.
    """
    largest = {axis.name: axis.high for axis in variant.contract.axes if isinstance(axis, Int) and axis.name in axes}
    found: set[str] = set()
    for others, (name, high), step in itertools.product(({}, largest), largest.items(), _STEPS):
        try:
            buffers = variant.workspace({**axes, **others, name: min(step, high)}, config, _WIDEST_DEVICE)
        except Exception:  # sizes that do not go together: all that is known is how large they are here
            return {*variant.workspace(axes, config, _WIDEST_DEVICE)}
        found |= {key for key, one in buffers.items() if math.prod(one.shape) >= 2 * FAKED_STRIDE}
    return found


def check_offsets(variant: Variant, case: Case, config: Config) -> None:
    """Runs a Triton variant on faked strides; raises InterpreterError where an int32 offset overflows.

    A dim is exercised only from size 3 on: index 2 is the first that a faked stride carries past 2**31.
    """
    contract = case.contract
    real = contract.bind_arguments((), case.inputs)
    axes, device = contract.bind_axes(real)
    arguments = {name: _fake_parts(value) if tensors_in({name: value}) else value for name, value in real.items()}
    outputs = map_tensors(contract.allocate_outputs(axes, real, device), _fake_strides)

    def faking_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        with floats_untouched(arguments, lambda *access: None), overflow_checks():  # only loops without end are stopped
            jit_door(kernel, grid, map_tensors(arguments, real_pointer), config)

    def launch(run: Run, *args: Any, **kwargs: Any) -> None:
        assert variant.launch is not None
        large = _large_buffers(variant, axes, config)
        faked = {name: _fake_strides(t) if name in large else t for name, t in run.workspace.items()}
        variant.launch(replace(run, workspace=faked), *args, **kwargs)

    kernel = Kernel(replace(variant, launch=launch), NEAREST, {}, faking_door)
    kernel.launch_into(outputs, arguments, axes, device, INTERPRETER, config)
