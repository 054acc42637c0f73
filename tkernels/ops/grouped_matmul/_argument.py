"""How contracts take the weights of all experts: one dense tensor, a StackedWeight or a StackedScaledWeight."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tkernels.contract import Axes, Axis, Choice, Constraint, ContractError, Int, Tensor, Value, bind_axis, is_aligned
from tkernels.inputs import dtype_name
from tkernels.quantized.codes import ORDERS
from tkernels.quantized.row_codes import BLOCK
from tkernels.quantized.stacked import StackedWeight
from tkernels.quantized.stacked_scaled import StackedScaledWeight

Weight = torch.Tensor | StackedWeight | StackedScaledWeight

DENSE_BITS = 0
"""In place of a code's bits: the weights are numbers of the activations' dtype."""


def coding_of(weight: Weight, prefix: str = "") -> dict[str, Value]:
    """The axes that say how a weight is stored: what a call binds, and what `select` is told of a model's.

    prefix: See ExpertWeights.
    """
    shared: dict[str, Value] = {"bits": DENSE_BITS, "coding": "uniform", "order": "interleaved"}
    own: dict[str, Value] = {"group_size": 0, "padding": 0, "symmetric": True, "permuted": False}
    if isinstance(weight, StackedScaledWeight):
        shared |= {"bits": 8, "coding": "e4m3"}
        own["group_size"] = BLOCK
    elif isinstance(weight, StackedWeight):
        shared = {"bits": weight.bits, "coding": weight.coding, "order": weight.order}
        own = {
            "group_size": weight.group_size,
            "padding": weight.places - weight.inputs,
            "symmetric": weight.symmetric,
            "permuted": weight.permutation is not None,
        }
    return {**shared, **{f"{prefix}{name}": value for name, value in own.items()}}


_PADDINGS = (0, 3, 11, 24, 27, 56)


BITS = Choice("bits", (8, 8, 8, 3, 2, 4, 4, *(DENSE_BITS,) * 5), "of a code; 0 of dense weights")
CODING = Choice(
    "coding",
    ("uniform", "e4m3", "e2m1", "e4m3"),
    "what codes are: integers, floats of 4 bits, or floats of 8 with a scale for each block of 128 x 128",
)
ORDER = Choice("order", ORDERS, "of the codes in a word: a checkpoint's, or as `prepare` makes it")
"""Axes that all weights of a call share. Values that are listed again are likelier draws."""


def coding_axes(inputs: Int, prefix: str = "") -> tuple[Axis, ...]:
    """The axes of `coding_of` but BITS, CODING and ORDER, beside that of a weight's inputs."""
    places = {size + padding for size in inputs.draws for padding in _PADDINGS}
    group_sizes = tuple(sorted({0, 16, 32, *(count for count in places if count % 4 == 0)}))
    return (
        Choice(f"{prefix}permuted", (True, False, False), "whether codes lie in another order than inputs"),
        inputs,
        Int(f"{prefix}padding", 0, 2**24, _PADDINGS, "places of a permutation that are no input"),
        Int(f"{prefix}group_size", 0, 2**24, group_sizes, "places that share a scale; 0 of dense weights"),
        Choice(f"{prefix}symmetric", (False, True), "whether zero-points are all in the middle and not stored"),
    )


def coding_rules(inputs: str, prefix: str = "") -> tuple[Constraint, ...]:
    """How the axes of `coding_axes` go together."""
    permuted, padding, group_size, symmetric = (
        f"{prefix}{name}" for name in ("permuted", "padding", "group_size", "symmetric")
    )
    row = "(32 if bits == 3 else 32 // (bits or 32))"  # the places that whole words stand for; 1 of dense weights
    return tuple(
        Constraint(text)
        for text in (
            f"bits or not {permuted}",
            f"{permuted} or {inputs} % {row} == 0",
            f"{permuted} or {padding} == 0",
            f"({inputs} + {padding}) % {row} == 0",
            f"({group_size} > 0) == (bits > 0)",
            f"{group_size} % {row} == 0",
            f"{group_size} == 0 or ({inputs} + {padding}) % {group_size} == 0",
            f"bits or {symmetric}",
            "bits or order == 'interleaved'",
            "coding == 'uniform' or bits == (8 if coding == 'e4m3' else 4)",
            f"coding == 'uniform' or {symmetric}",
            f"coding != 'e4m3' or not {permuted}",
            f"coding != 'e4m3' or {inputs} % {BLOCK} == 0",
            f"coding != 'e4m3' or {group_size} == {BLOCK}",
            "coding != 'e4m3' or order == 'interleaved'",
        )
    )


@dataclass(frozen=True)
class ExpertWeights:
    """The rule for experts' weights of `dims` (three of a contract's): binds these, the axes of `coding_of`, and
    `<name>_aligned`: whether all rows of their parts begin on 16 bytes.

    prefix: Before the names of those axes in which the weights of a call may differ: all but `bits`, `coding` and
        `order`.
    """

    dims: str
    prefix: str = ""

    @cached_property
    def dense(self) -> Tensor:
        return Tensor(self.dims, "weight", read_wide=True)

    @cached_property
    def parts(self) -> dict[str, Tensor]:
        """Each part's rule, of codes in words; what shapes have to do with each other the weight has seen to itself."""
        experts, outputs, _ = self.dims.split()
        return {
            "packed": Tensor(f"{experts} W {outputs}", "int32"),
            "high": Tensor(f"{experts} H3 {outputs}", "int32"),
            "scales": Tensor(f"{experts} G {outputs}", "weight"),
            "zeros": Tensor(f"{experts} G {outputs}", "int16"),
            "permutation": Tensor(f"{experts} P", "int32"),
        }

    @cached_property
    def scaled_parts(self) -> dict[str, Tensor]:
        """As `parts`, of e4m3 codes."""
        return {"values": Tensor(self.dims, "float8_e4m3fn"), "scales": Tensor("E R G", "float32")}

    def bind(self, op: str, name: str, value: Any, axes: dict[str, Value], device: torch.device | None) -> None:
        if isinstance(value, torch.Tensor):
            self.dense.bind(op, name, value, axes, device)
        elif isinstance(value, StackedWeight | StackedScaledWeight):
            own: dict[str, Value] = {}
            rules = self.parts if isinstance(value, StackedWeight) else self.scaled_parts
            for part, tensor in value.parts():
                rules[part].bind(op, f"{name}.{part}", tensor, own, device)
            for dim, size in zip(self.dense.shape, value.shape, strict=True):
                solved = dim.solve(size)
                if dim.name is None or solved is None:
                    raise ContractError(
                        f"{op}: argument {name!r} has shape {list(value.shape)}, where [{self.dims}] is needed"
                    )
                bind_axis(op, name, dim.name, solved, axes)
            if isinstance(value, StackedWeight):
                bind_axis(op, name, "weight", dtype_name(value.dtype), axes)
            elif "activation" in axes:  # which e4m3 codes become
                bind_axis(op, name, "weight", axes["activation"], axes)
            axes[f"{name}_aligned"] = all(is_aligned(part) for _, part in value.parts())
        else:
            raise ContractError(
                f"{op}: argument {name!r} must be a tensor [{self.dims}], a StackedWeight or a StackedScaledWeight, "
                f"got {type(value).__name__}"
            )
        for axis, bound in coding_of(value, self.prefix).items():
            bind_axis(op, name, axis, bound, axes)


@dataclass(frozen=True)
class ExpertsOfRows:
    """The rule for `experts` [T, K] beside an x of X rows, for each token one or each pair, which binds `per_pair`."""

    @cached_property
    def tensor(self) -> Tensor:
        return Tensor("T K", "int32")

    def bind(self, op: str, name: str, value: Any, axes: dict[str, Value], device: torch.device | None) -> None:
        self.tensor.bind(op, name, value, axes, device)
        rows, tokens, top_k = (int(axes[axis]) for axis in ("X", "T", "K"))
        if rows not in (tokens, tokens * top_k):
            raise ContractError(
                f"{op}: argument {name!r} has shape {[tokens, top_k]}, with which x has {tokens} or {tokens * top_k} "
                f"rows, not {rows}"
            )
        axes["per_pair"] = rows != tokens


def needs_interleaved(axes: Axes) -> str | None:
    """Why a variant that reads interleaved words cannot take these weights, or None where it can.

    Weights that are yet to be loaded have no order: `prepare` sees to it.
    """
    order = axes.get("order", "interleaved")
    if order == "interleaved":
        return None
    return f"its weights must be interleaved, not {order}: pass what tkernels.prepared(variant, weight) returns"


def needs_dense(axes: Axes) -> str | None:
    """Why a variant that multiplies numbers, not codes, cannot take these weights, or None where it can."""
    bits = axes.get("bits", DENSE_BITS)
    return f"its weights are dense, not codes of {bits} bits" if bits else None


def needs_codes(axes: Axes) -> str | None:
    """Why a variant that unpacks codes cannot take these weights, or None where it can."""
    if not axes.get("bits", DENSE_BITS):
        return "its weights are codes, not dense"
    if axes.get("coding", "uniform") == "e4m3":
        return "its weights are codes in words, not e4m3"
    return needs_interleaved(axes)


def needs_e4m3(axes: Axes) -> str | None:
    """Why a variant that reads e4m3 codes and scales of blocks cannot take these weights, or None where it can."""
    bits, coding = axes.get("bits", DENSE_BITS), axes.get("coding", "uniform")
    if not bits:
        return "its weights are e4m3 codes, not dense"
    return None if coding == "e4m3" else f"its weights are e4m3 codes, not {coding} ones of {bits} bits"
