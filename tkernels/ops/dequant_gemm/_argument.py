"""How dequant_gemm's contract takes a QuantizedWeight."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tkernels.contract import Axes, ContractError, Tensor, Value, bind_axis, is_aligned
from tkernels.device import DeviceFacts
from tkernels.inputs import dtype_name
from tkernels.quantized.weight import QuantizedWeight


def axes_of(weight: QuantizedWeight) -> dict[str, Value]:
    """The contract's axes that a weight decides: what a call binds, and what `select` is told of a model's weights."""
    outputs, inputs = weight.shape
    return {
        "N": outputs,
        "K": inputs,
        "padding": weight.places - inputs,
        "bits": weight.bits,
        "coding": weight.coding,
        "group_size": weight.group_size,
        "weight": dtype_name(weight.dtype),
        "symmetric": weight.symmetric,
        "permuted": weight.permutation is not None,
        "sparse": weight.outliers is not None,
        "order": weight.order,
    }


@dataclass(frozen=True)
class QuantizedWeightArgument:
    """The rule for a QuantizedWeight: binds the axes of `axes_of`, and `<name>_aligned`: whether all rows of its parts
    begin on 16 bytes. Sees that they are on one device.
    """

    @cached_property
    def parts(self) -> dict[str, Tensor]:
        """Each part's rule; what shapes have to do with each other the weight has seen to itself."""
        return {
            "packed": Tensor("W N", "int32"),
            "high": Tensor("H N", "int32"),
            "scales": Tensor("G N", "weight"),
            "zeros": Tensor("G N", "int16"),
            "table": Tensor("L N", "weight"),
            "permutation": Tensor("P", "int32"),
            "outliers.rows": Tensor("N+1", "int32"),
            "outliers.cols": Tensor("E", "int32"),
            "outliers.vals": Tensor("E", "weight"),
        }

    def bind(self, op: str, name: str, value: Any, axes: dict[str, Value], device: torch.device | None) -> None:
        if not isinstance(value, QuantizedWeight):
            raise ContractError(f"{op}: argument {name!r} must be a QuantizedWeight, got {type(value).__name__}")
        for part, tensor in value.parts():
            self.parts[part].bind(op, f"{name}.{part}", tensor, axes, device)
        # Where nothing is permuted the words' rows say how many inputs there are.
        source = "packed" if value.permutation is None else "permutation"
        for axis, bound in axes_of(value).items():
            bind_axis(op, f"{name}.{source}" if axis == "K" else name, axis, bound, axes)
        axes[f"{name}_aligned"] = all(is_aligned(part) for _, part in value.own_parts())


def needs_interleaved(axes: Axes, device: DeviceFacts) -> str | None:
    """Why a variant that reads interleaved words cannot take this weight, or None where it can.

    A weight that is yet to be loaded has no order: `prepare` sees to it.
    """
    if axes.get("order", "interleaved") == "interleaved":
        return None
    return f"its weight must be interleaved, not {axes['order']}: pass what tkernels.prepared(variant, weight) returns"
