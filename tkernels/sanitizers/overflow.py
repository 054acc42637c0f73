"""int32 offsets into large tensors, found without allocating one.

The launcher sees tensors whose outer strides are faked to 2**30 elements, so that index 2 lies at 2**31, and the
interpreter checks every integer +, - and *. Float data is not touched at all (loads give zeros, stores go nowhere); the
integer tensors, which steer the kernel, keep their real contents and strides.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

from tkernels.config import Config
from tkernels.contract import Case
from tkernels.device import INTERPRETER
from tkernels.inputs import map_tensors
from tkernels.interpreter import overflow_checks, replaced_methods, watch_accesses
from tkernels.launch import Kernel, jit_door
from tkernels.tuning import NEAREST
from tkernels.variant import Variant

FAKED_STRIDE = 2**30
"""Below 2**31, or Triton would pass the stride itself as int64 and hide the fault."""


def _faked(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same shape whose strides, but for the last, are FAKED_STRIDE; an integer tensor as it is."""
    if not tensor.is_floating_point():
        return tensor
    if tensor.dim() < 2:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    strides = [FAKED_STRIDE] * (tensor.dim() - 1) + [1]
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")


@contextmanager
def _floats_untouched() -> Iterator[None]:
    builder = triton_interpreter.interpreter_builder
    load, store = builder.create_masked_load, builder.create_masked_store

    def is_float(pointers: Any) -> bool:
        return bool(pointers.get_element_ty().is_floating())

    def zero_load(ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        nowhere = triton_interpreter.TensorHandle(np.zeros(ptrs.data.shape, dtype=bool), tl.int1)
        return load(ptrs, nowhere if is_float(ptrs) else mask, *rest, **options)

    def no_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return None if is_float(ptrs) else store(ptrs, value, mask, *rest)

    with replaced_methods(create_masked_load=zero_load, create_masked_store=no_store), watch_accesses(_anything):
        yield


def _anything(addresses: np.ndarray, mask: np.ndarray, width: int, access: str) -> None:
    """Addresses on faked strides mean nothing; only loops without end are stopped."""


def check_offsets(variant: Variant, case: Case, config: Config) -> None:
    """Runs a Triton variant on faked strides; raises InterpreterError where an int32 offset overflows.

    A dim is exercised only from size 3 on: index 2 is the first that a faked stride carries past 2**31.
    """
    contract = case.contract
    real = contract.bind_arguments((), case.inputs)
    axes, device = contract.bind_axes(real)
    arguments = map_tensors(real, _faked)
    outputs = map_tensors(contract.allocate_outputs(axes, real, device), _faked)

    def real_pointer(tensor: torch.Tensor) -> torch.Tensor:
        # Float memory is never touched, so any address of the right type will do.
        return torch.empty(1, dtype=tensor.dtype) if tensor.device.type == "meta" else tensor

    def faking_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        with _floats_untouched(), overflow_checks():
            jit_door(kernel, grid, map_tensors(arguments, real_pointer), config)

    Kernel(variant, NEAREST, {}, faking_door).launch_into(outputs, arguments, axes, device, INTERPRETER, config)
