"""Indices of int64 that an int32 cannot hold: the same call, with every index 2**32 further on in a larger tensor.

A cache of so many slots is address space of which only the pages that are touched get memory, so that the kernel runs
as it is, and a row is where its slot says or it is not. 2**32 further on is where a narrowed index says nothing of it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tkernels.config import Config
from tkernels.contract import Case, Contract, Int, Tensor
from tkernels.device import INTERPRETER
from tkernels.errors import TKernelsError
from tkernels.inputs import clone_inputs, map_tensors
from tkernels.launch import Kernel, jit_door
from tkernels.tuning import NEAREST
from tkernels.variant import Variant
from tkernels.verification.calls import bits, call
from tkernels.verification.untouched import lazy_zeros, real_pointer

_FURTHER = 2**32

_MOST_BYTES = 2**44
"""Of address space, of which a process has 2**47 bytes."""


class FarIndexError(TKernelsError, RuntimeError):
    """What belongs to an index beyond 2**32 is not there."""


def check_far_indices(variant: Variant, case: Case, config: Config) -> None:
    """Runs a Triton variant with indices beyond 2**32 where its contract has such, and compares what it writes there
    with what it writes at the case's own; raises FarIndexError where these differ.
    """
    contract = case.contract
    real = contract.bind_arguments((), case.inputs)
    for name, rule in contract.arguments.items():
        if not isinstance(rule, Tensor) or not rule.indexes or real[name] is None:
            continue
        dims = rule.indexes.split()
        indexed = [one for one in contract.writes if _begins_with(contract, one, dims) and real[one] is not None]
        if indexed and bool((real[name] >= 0).any()):
            _compare(variant, real, name, indexed, dims, config)


def _begins_with(contract: Contract, name: str, dims: Sequence[str]) -> bool:
    rule = contract.arguments[name]
    return isinstance(rule, Tensor) and rule.dims.split()[: len(dims)] == list(dims)


def _grown(contract: Contract, shape: Sequence[int], dims: Sequence[str]) -> list[int] | None:
    """The shape of a tensor with room for indices that lie `_FURTHER`; None where its rules leave none."""
    axis = contract.axis_by_name[dims[0]]
    first = shape[0] + -(-_FURTHER // math.prod(shape[1 : len(dims)]))
    most = axis.high if isinstance(axis, Int) else 0
    return [first, *shape[1:]] if first <= most else None


def _compare(
    variant: Variant, real: dict[str, Any], index: str, written: Sequence[str], dims: Sequence[str], config: Config
) -> None:
    """Raises where a call with far indices writes other rows than one with the case's own."""
    contract = variant.contract
    shapes = {name: _grown(contract, real[name].shape, dims) for name in written}
    size = {name: math.prod(shape or ()) * real[name].element_size() for name, shape in shapes.items()}
    if None in shapes.values() or max(size.values()) > _MOST_BYTES:
        return
    near, far = clone_inputs(real), clone_inputs(real)
    call(variant, near, config)
    kept = real[index] >= 0
    far[index][kept] += _FURTHER
    for name, shape in shapes.items():
        whole = lazy_zeros(size[name], torch.uint8).view(real[name].dtype)
        far[name] = whole.view(tuple(shape or ()))
    axes, device = contract.bind_axes(far)
    if variant.unsupported_reason(axes, device, INTERPRETER):
        return

    def door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        jit_door(kernel, grid, map_tensors(arguments, real_pointer), config)

    Kernel(variant, NEAREST, {}, door).launch_into(
        contract.allocate_outputs(axes, far, device), far, axes, device, INTERPRETER, config
    )
    for name in written:
        rows, far_rows = near[name].flatten(0, len(dims) - 1), far[name].flatten(0, len(dims) - 1)
        if not torch.equal(bits(rows[real[index][kept]]), bits(far_rows[far[index][kept]])):
            raise FarIndexError(
                f"{name!r} is not written where {index!r} says, beyond 2**32: what holds it has 64 bits, .to(tl.int64)"
            )
