"""What a launcher asks for at a case, without any kernel run: whether a fault in host code shows there at all."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tkernels.config import Config
from tkernels.contract import Axes, Case
from tkernels.device import INTERPRETER, device_facts
from tkernels.inputs import clone_inputs, tensors_in
from tkernels.variant import Variant
from tkernels.verification.calls import bits, call
from tkernels.verification.sanitizers.base import sanitized, unfit_reason
from tkernels.verification.sanitizers.suite import SANITIZERS

_CLAIMS = ("order", "batch", "race")
"""The sanitizers that see what a value does not: sums that are cut elsewhere, programs that share a place."""
_CLAIM_DRAWS = 4


@dataclass(frozen=True)
class Tried:
    """A case with the axes that it binds, and what a variant launches there: how many programs, and all in words."""

    case: Case
    config: Config
    axes: Axes
    programs: int
    launches: str


def tried(variant: Variant, case: Case, config: Config) -> Tried:
    """What a variant launches at a case."""
    axes, _ = case.contract.bind_axes(case.contract.bind_arguments((), case.inputs))
    programs: list[int] = []
    launches = described_launches(variant, case, config, programs)
    return Tried(case, config, axes, sum(programs), launches)


def supports_case(variant: Variant, case: Case) -> bool:
    """Whether a variant takes a case in the interpreter."""
    axes, device = case.contract.bind_axes(case.contract.bind_arguments((), case.inputs))
    return variant.unsupported_reason(axes, device, INTERPRETER) is None


def broken_claim(variant: Variant, seed: int) -> dict[str, Any] | None:
    """A claim that a variant does not keep, as a worker's answer; None where none is found."""
    for name in _CLAIMS:
        if unfit_reason(SANITIZERS[name], variant) is None:
            for finding in sanitized(SANITIZERS[name], variant, _CLAIM_DRAWS, seed):
                if finding is not None:
                    return {"verdict": "claim", "reason": f"{name}: {finding.message}"}
    return None


def described_launches(variant: Variant, case: Case, config: Config, programs: list[int] | None = None) -> str:
    """The workspace, and each launch with its grid and arguments, of one call; an exception in its place.

    Two calls on the same case that are described alike do the same, as far as their kernels are the same.

    Args:
        programs: Where the number of each launch's programs goes.
    """
    inputs = clone_inputs(case.inputs)  # what a launcher does to its tensors itself is done, whatever the door does
    origins = {tensor.untyped_storage().data_ptr(): f"input {n}" for n, tensor in enumerate(tensors_in(inputs))}
    kept: list[torch.Tensor] = []
    found: list[str] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        origins[tensor.untyped_storage().data_ptr()] = f"made {len(kept)}"
        kept.append(tensor)
        return tensor

    def door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        if programs is not None:
            programs.append(math.prod(grid))
        given = {name: _described(value, origins) for name, value in sorted(arguments.items())}
        found.append(f"{kernel.__name__} {tuple(grid)} {given} {config}")

    try:
        axes, device = case.contract.bind_axes(case.contract.bind_arguments((), case.inputs))
        found.append(str(variant.workspace(axes, config, device_facts(device))))
        call(variant, inputs, config, door=door, place=keep)
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    return "\n".join(found)


def _described(value: Any, origins: Mapping[int, str]) -> str:
    if isinstance(value, torch.Tensor):
        origin = origins.get(value.untyped_storage().data_ptr()) or _contents(value)
        return f"{origin} {value.dtype} {list(value.shape)} {value.stride()} +{value.storage_offset()}"
    if isinstance(value, TensorDescriptor):
        return f"{_described(value.base, origins)} {value.shape} {value.strides} {value.block_shape}"
    return repr(value)


def _contents(tensor: torch.Tensor) -> str:
    """Of a tensor that the launcher made itself."""
    return sha256(bits(tensor).numpy().tobytes()).hexdigest()[:16]
