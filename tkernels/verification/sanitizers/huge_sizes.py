"""Sizes at which a tensor has 2**31 elements: the first and the last programs of grids that no interpreter could walk.

An offset may be built from a size instead of a stride (`row * width` into an output), and then faked strides do not
show that it overflows. Here the size itself is that large. As with faked strides, float memory is never touched;
integer tensors keep their contents and go on in zeros (position 0, slot 0, a context of 0 tokens), of which only the
pages that are read are ever backed by memory.

What grows is the batch (T, M, B of a decode) or another size of an output (N of a matmul). Not reached: a batch that
integer tensors describe beyond one entry a member (B of a prefill, whose offsets are [B + 1]; all of copy_pages,
step_inputs and sort_by_expert, which have no float tensor of the batch's size; the sorted pairs of grouped_matmul),
pages of a cache and rows of a rotary table (which row is read is in integers that stay as they are: faked strides look
at those), weights whose class bounds them, and variants that support few rows (dequant_gemm's gemvs and split_k).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tkernels.config import Config
from tkernels.contract import Axes, Case, Contract, ContractError, Int, Tensor, Value
from tkernels.device import INTERPRETER, DeviceFacts
from tkernels.dims import Dim
from tkernels.errors import TKernelsError
from tkernels.inputs import map_tensors
from tkernels.interpreter.accesses import Access
from tkernels.interpreter.replaced import overflow_checks, replaced_methods
from tkernels.launch import Door, Run, jit_door
from tkernels.variant import Variant
from tkernels.verification.addresses import launch_tensors
from tkernels.verification.kernel_errors import describe_error
from tkernels.verification.some_programs import run_programs, three_dims
from tkernels.verification.untouched import floats_untouched, lazy_zeros, real_pointer

_ELEMENTS = 2**31

_LEAST_ROW = 3
"""Elements: with rows of fewer, the size itself would have to be near 2**31."""

_DEVICE = replace(INTERPRETER, multiprocessors=2**31 - 1)
"""So that where programs share the tiles out, each has one, the last the last. It stands for a GPU where a launcher
gives its kernels the same memory on both: scratch for each program would be as large as no GPU makes it."""

_STEPS = 4
"""Of a loop, the first and the last: where programs are as few as on a GPU, the last tile is in one's last step."""


class OversizeError(TKernelsError, RuntimeError):
    """A launch fails at a size that its contract allows and its variant says it supports."""


_GRID_LIMITS = (2**31 - 1, 65535, 65535)
"""Programs in each dim of a grid, on every NVIDIA GPU (CUDA C++ Programming Guide, "Technical Specifications")."""


def _fits(grid: tuple[int, ...]) -> bool:
    return all(n <= most for n, most in zip(grid, _GRID_LIMITS, strict=False))


def _places(contract: Contract, arguments: Mapping[str, Any]) -> list[tuple[tuple[Dim, ...], torch.Tensor | None]]:
    """(shape, argument or None for an output) of the tensors that an op's contract gives dims."""
    rules = [(rule.shape, arguments[name]) for name, rule in contract.arguments.items() if isinstance(rule, Tensor)]
    outputs = [(o.shape, None) for o in contract.outputs.values() if o.when is None or arguments[o.when]]
    return [(shape, tensor) for shape, tensor in rules if tensor is not None] + outputs


def huge_sizes(contract: Contract, arguments: Mapping[str, Any], axes: Axes) -> Iterator[tuple[str, int]]:
    """(axis, size) of every size of the batch or of an output that can grow until a float tensor has 2**31 elements.

    One that an integer tensor has other than as its leading dim cannot (a block table's width, offsets [B+1]): what
    the new entries should say is not known. Nor can one of a weight's, whose class bounds it.
    """
    places = _places(contract, arguments)
    in_outputs = {name for shape, tensor in places if tensor is None for dim in shape for name in dim.names}
    growing = [axis for axis in contract.axes if isinstance(axis, Int) and (axis.batch or axis.name in in_outputs)]
    bounded = _axes_of_weights(contract, arguments)
    for axis in growing:
        rows = [row for row in _row_sizes(axis.name, places, axes) if row >= _LEAST_ROW]
        size = _ELEMENTS // min(rows) + 2 if rows else math.inf
        if size <= axis.high and axis.name not in bounded:
            yield axis.name, int(size)


def _axes_of_weights(contract: Contract, arguments: Mapping[str, Any]) -> dict[str, Value]:
    """The axes that the weights among the arguments decide."""
    bound: dict[str, Value] = {}
    for name, rule in contract.arguments.items():
        if not isinstance(rule, Tensor) and hasattr(arguments[name], "map_tensors"):
            rule.bind(contract.name, name, arguments[name], bound, None)
    return bound


def _row_sizes(axis: str, places: Sequence[tuple[tuple[Dim, ...], torch.Tensor | None]], axes: Axes) -> list[int]:
    """The elements of each float tensor for one step of an axis; none where an integer tensor keeps it from growing."""
    rows = []
    for shape, tensor in places:
        times = [_growth(dim, axis, axes) for dim in shape if axis in dim.names]
        others = [dim.size(axes) for dim in shape if axis not in dim.names]
        if not times:
            continue
        if tensor is not None and not tensor.is_floating_point():
            if shape[0].text != axis or len(times) > 1:
                return []
            continue
        rows.append(int(np.prod(others, dtype=np.int64) * times[0]))
    return rows


def _growth(dim: Dim, axis: str, axes: Axes) -> float:
    """What an entry of a shape grows by with one step of an axis, far out where its constants do not count."""
    return dim.size({**axes, axis: _ELEMENTS}) / _ELEMENTS


def _allocate_huge(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Floats without memory, integers of lazily backed zeros."""
    if dtype.is_floating_point:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")
    return lazy_zeros(max(1, math.prod(shape)), dtype)[: math.prod(shape)].view(tuple(shape))


def _grow_tensor(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of another size; integers [n, ...] have their contents first."""
    if not tensor.is_floating_point():
        if list(tensor.shape) == list(shape):
            return tensor
        whole = _allocate_huge(shape, tensor.dtype)
        whole[: tensor.shape[0]] = tensor
        return whole
    rows = zip(shape[1:], tensor.stride()[1:], strict=True)
    if list(tensor.shape[1:]) == list(shape[1:]) and all(tensor.stride(0) >= n * step for n, step in rows):
        return torch.empty_strided(tuple(shape), tensor.stride(), dtype=tensor.dtype, device="meta")
    return _allocate_huge(shape, tensor.dtype)


def _grow_arguments(contract: Contract, arguments: Mapping[str, Any], axes: Axes) -> dict[str, Any]:
    grown = {}
    for name, rule in contract.arguments.items():
        value = arguments[name]
        if isinstance(rule, Tensor) and value is not None:
            value = _grow_tensor(value, [dim.size(axes) for dim in rule.shape])
        elif hasattr(value, "map_tensors"):
            value = value.map_tensors(lambda part: _grow_tensor(part, part.shape))
        grown[name] = value
    return grown


def _ends_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
    """Interprets the first and the last programs of each dim of a grid, each until it has made enough accesses."""
    pointers = map_tensors(arguments, real_pointer)

    def run_one(watch: Access) -> None:
        with floats_untouched(arguments, watch), overflow_checks():
            jit_door(kernel, (1, 1, 1), pointers, config)

    run_programs(grid, itertools.product(*(dict.fromkeys((0, n - 1)) for n in three_dims(grid))), run_one)


def _walking_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
    """The same for as few programs as a GPU has room for, which walk the tiles: each loop's first and last steps."""

    def ends(values: range) -> Sequence[int]:
        return values if len(values) <= 2 * _STEPS else [*values[:_STEPS], *values[-_STEPS:]]

    with replaced_methods(loop_values=ends):
        _ends_door(kernel, grid, arguments, config)


def _batch_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
    """The same for a batch that is huge, whose grid must be one that can be launched. The other sizes are a model's,
    and with the interpreter's small tiles their grids are larger than a GPU's.
    """
    if not _fits(grid):
        raise OversizeError(f"{kernel.__name__}: a grid of {grid}; at most {_GRID_LIMITS} can be launched")
    _ends_door(kernel, grid, arguments, config)


def _stands_for_a_gpu(launch: Callable[[DeviceFacts, Door], None]) -> bool:
    """Whether kernels are given tensors of the same shapes on `_DEVICE`, and a grid that can be launched if it can be
    on a device of a few multiprocessors.
    """
    seen: list[list[tuple[bool, Mapping[str, Any]]]] = []
    for device in (INTERPRETER, _DEVICE):
        noted: list[tuple[bool, Mapping[str, Any]]] = []

        def note(
            kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config, noted: Any = noted
        ) -> None:
            noted.append((_fits(grid), {name: one.shape for name, one in launch_tensors(arguments).items()}))

        launch(device, note)
        seen.append(noted)
    return seen[0] == seen[1]


def check_sizes(variant: Variant, case: Case, config: Config) -> dict[str, int]:
    """Runs a Triton variant at each huge size that it supports, and returns them by axis.

    Raises OversizeError where the launch fails, as by an int32 offset that overflows.
    """
    ran = {}
    contract = case.contract
    real = contract.bind_arguments((), case.inputs)
    before, device = contract.bind_axes(real)
    for name, size in huge_sizes(contract, real, before):
        axes = {**before, name: size}
        try:
            contract.check_axes(axes)
        except ContractError:
            continue
        if variant.unsupported_reason(axes, device, _DEVICE):
            continue
        arguments = _grow_arguments(contract, real, axes)
        outputs = map_tensors(
            contract.allocate_outputs(axes, arguments, torch.device("meta")),
            lambda one: _allocate_huge(one.shape, one.dtype),
        )

        def launch(
            device: DeviceFacts, door: Door, axes: Axes = axes, out: Any = outputs, given: Any = arguments
        ) -> None:
            buffers = variant.workspace(axes, config, device).items()
            workspace = {key: _allocate_huge(buffer.shape, buffer.dtype) for key, buffer in buffers}
            variant.run_launcher(Run(device, axes, config, workspace, door), out, given)

        try:
            if _stands_for_a_gpu(launch):
                launch(_DEVICE, _batch_door if contract.axis_by_name[name].batch else _ends_door)
            else:
                launch(INTERPRETER, _walking_door)
        except Exception as error:
            raise OversizeError(f"at {name} = {size}: {describe_error(error)}") from error
        ran[name] = size
    return ran
