"""How contracts take the weights of all experts: one dense tensor, or a StackedWeight."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tkernels.contract import Axes, ContractError, Tensor, Value, bind_axis, is_aligned
from tkernels.device import DeviceFacts
from tkernels.inputs import dtype_name
from tkernels.quantized.stacked import StackedWeight

DENSE_BITS = 0
"""In place of a code's bits: the weights are numbers of the activations' dtype."""


def coding_of(weight: torch.Tensor | StackedWeight) -> dict[str, Value]:
    """The axes that say how a weight is stored: what a call binds, and what `select` is told of a model's."""
    if isinstance(weight, StackedWeight):
        return {
            "bits": weight.bits,
            "group_size": weight.group_size,
            "padding": weight.places - weight.inputs,
            "symmetric": weight.symmetric,
            "permuted": weight.permutation is not None,
            "order": weight.order,
        }
    return {"bits": DENSE_BITS, "group_size": 0, "padding": 0, "symmetric": True, "permuted": False,
            "order": "interleaved"}  # fmt: skip


@dataclass(frozen=True)
class ExpertWeights:
    """The rule for experts' weights of `dims` (three of a contract's): binds these, the axes of `coding_of` (with
    `prefix` before their names), and `<name>_aligned`: whether all rows of their parts begin on 16 bytes.
    """

    dims: str
    prefix: str = ""

    @cached_property
    def dense(self) -> Tensor:
        return Tensor(self.dims, "weight", read_wide=True)

    @cached_property
    def parts(self) -> dict[str, Tensor]:
        """Each part's rule; what shapes have to do with each other the weight has seen to itself."""
        experts, outputs, _ = self.dims.split()
        return {
            "packed": Tensor(f"{experts} W {outputs}", "int32"),
            "high": Tensor(f"{experts} H3 {outputs}", "int32"),
            "scales": Tensor(f"{experts} G {outputs}", "weight"),
            "zeros": Tensor(f"{experts} G {outputs}", "int16"),
            "permutation": Tensor(f"{experts} P", "int32"),
        }

    def bind(self, op: str, name: str, value: Any, axes: dict[str, Value], device: torch.device | None) -> None:
        if isinstance(value, torch.Tensor):
            self.dense.bind(op, name, value, axes, device)
        elif isinstance(value, StackedWeight):
            own: dict[str, Value] = {}
            for part, tensor in value.parts():
                self.parts[part].bind(op, f"{name}.{part}", tensor, own, device)
            for dim, size in zip(self.dense.shape, value.shape, strict=True):
                solved = dim.solve(size)
                if dim.name is None or solved is None:
                    raise ContractError(
                        f"{op}: argument {name!r} has shape {list(value.shape)}, where [{self.dims}] is needed"
                    )
                bind_axis(op, name, dim.name, solved, axes)
            bind_axis(op, name, "weight", dtype_name(value.dtype), axes)
            axes[f"{name}_aligned"] = all(is_aligned(part) for _, part in value.parts())
        else:
            raise ContractError(
                f"{op}: argument {name!r} must be a tensor [{self.dims}] or a StackedWeight, got {type(value).__name__}"
            )
        axes |= {f"{self.prefix}{axis}": bound for axis, bound in coding_of(value).items()}


def needs_interleaved(axes: Axes, device: DeviceFacts) -> str | None:
    """Why a variant that reads interleaved words cannot take these weights, or None where it can.

    Weights that are yet to be loaded have no order: `prepare` sees to it.
    """
    if axes.get("order", "interleaved") == "interleaved":
        return None
    return f"its weights must be interleaved, not {axes['order']}: pass what tkernels.prepared(variant, weight) returns"
