"""What a quantized checkpoint's format says and does, and the checks that the formats share.

A format is one file of this folder: what its config promises for each linear layer, how the layer's tensors become a
QuantizedWeight, and how one is written. It knows no model: a layer is a name, so many outputs N and inputs K.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tkernels.quantized.codes import BITS, codes_per_row, pack_codes
from tkernels.quantized.weight import Coding, QuantizedWeight
from tmodel.json_files import ConfigError
from tmodel.weights import Checkpoint

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_PARTS = 8
"""A layer is unpacked in so many parts: 2-bit codes, a byte each, take four times the memory of their words."""
Parsed = TypeVar("Parsed", bound=BaseModel)


class FormatWarning(UserWarning):
    """A checkpoint's words say something else than its metadata, and the words were believed."""


@dataclass(frozen=True)
class Scheme:
    """How a linear layer is stored, as far as its config tells before any tensor is read.

    group_size: -1 is all inputs. permuted, sparse: its codes may lie in another order than the inputs; weights may be
    kept beside the codes.
    """

    bits: int
    group_size: int = -1
    coding: Coding = "uniform"
    permuted: bool = False
    sparse: bool = False

    def groups(self, inputs: int) -> int:
        """G, for `inputs` that the scheme can hold."""
        return 1 if self.group_size == -1 else inputs // self.group_size

    def check_inputs(self, layer: str, inputs: int) -> None:
        """ConfigError where `layer`, of so many inputs, cannot be stored like this."""
        row = codes_per_row(self.bits)
        if inputs % row:
            raise ConfigError(
                f"{layer}: its {inputs} inputs are no multiple of {row}, the codes of {self.bits} bits in a row of "
                "words"
            )
        if self.group_size != -1 and inputs % self.group_size:
            raise ConfigError(f"{layer}: group_size {self.group_size} does not divide its {inputs} inputs")


class QuantizationFormat(Protocol):
    """A format with the settings of one checkpoint. Compared by value."""

    @property
    def method(self) -> str:
        """The `quant_method` of its config."""
        ...

    def scheme(self, layer: str) -> Scheme | None:
        """How `layer` ("model.layers.0.mlp.down_proj") is stored; None is dense."""
        ...

    def check(self, layer: str, outputs: int, inputs: int) -> None:
        """Raise ConfigError where a quantized layer of this size cannot be stored in the format."""
        ...

    def read(self, checkpoint: Checkpoint, layer: str, outputs: int, inputs: int) -> QuantizedWeight:
        """The weight of a quantized `layer`, in sequential order, on the checkpoint's device, its scales as stored.

        WeightError names file, tensor and rule where one is missing, of another shape or dtype, or has a value that
        cannot be meant.
        """
        ...

    def encode(self, layer: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        """The tensors of `layer` by the last part of their names, which `read` reads as the same weight bit for bit.

        ValueError where the weight is not what `scheme` promises, or is nothing that the format can hold.
        """
        ...

    def config(self) -> dict[str, Any]:
        """The mapping to write as `quantization_config` into config.json."""
        ...


def parse_settings(kind: type[Parsed], raw: Mapping[str, Any]) -> Parsed:
    """`raw` as a format's settings; ConfigError lists every field that is wrong."""
    try:
        return kind.model_validate(dict(raw))
    except ValidationError as error:
        raise ConfigError("; ".join(map(_describe_error, error.errors()))) from error


def _describe_error(error: ErrorDetails) -> str:
    """One of pydantic's errors with the field first and, where it is not said already, what was given."""
    field = "".join(f"{part}: " for part in (".".join(map(str, error["loc"])),) if part)
    if error["type"] == "value_error":
        return field + error["msg"].removeprefix("Value error, ")
    given = "" if error["type"] == "missing" else f", got {reprlib.repr(error['input'])}"
    return f"{field}{error['msg']}{given}"


def check_bits(bits: Any, supported: Sequence[int] = BITS) -> int:
    choice = f"supported are {', '.join(map(str, supported))}"
    if type(bits) is not int:  # JSON's true is no number
        raise ValueError(f"must be an integer, got {bits!r}; {choice}")
    if bits in supported:
        return bits
    note = ": 5 to 7 bits come in another packing (planar), which is not" if 5 <= bits <= 7 else ""
    raise ValueError(f"{bits} bits; {choice}{note}")


def check_group_size(group_size: int, bits: int) -> None:
    if group_size != -1 and (group_size < 1 or group_size % codes_per_row(bits)):
        raise ValueError(
            f"group_size {group_size}; supported are -1 (all inputs) and multiples of {codes_per_row(bits)} "
            f"at {bits} bits, such as 32, 64 and 128"
        )


def read_words(checkpoint: Checkpoint, name: str, shape: Sequence[int], layout: str) -> torch.Tensor:
    """Packed codes: int32. `layout` says in symbols what the shape is made of."""
    return checkpoint.raw(name, shape, (torch.int32,), f"where {layout} = {{}} is expected")


def read_values(checkpoint: Checkpoint, name: str, shape: Sequence[int], layout: str) -> torch.Tensor:
    """Scales, tables, outliers: floating, and finite throughout."""
    values = checkpoint.raw(name, shape, FLOATS, f"where {layout} = {{}} is expected")
    checkpoint.require_finite(name, values)
    return values


def packed_by_parts(
    codes: Callable[[slice], torch.Tensor], outputs: int, bits: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`packed` and `high` of a sequential QuantizedWeight from `codes` of outputs, [Kp, n] for a slice of n.

    Slices begin at multiples of 8. No more than one of them is unpacked at a time.
    """
    step = -(-outputs // (8 * _PARTS)) * 8
    packed = high = None
    for part in (slice(start, min(start + step, outputs)) for start in range(0, outputs, step)):
        words, its_high = pack_codes(codes(part), bits)
        if packed is None:
            packed = words.new_empty((words.shape[0], outputs))
            high = None if its_high is None else words.new_empty((its_high.shape[0], outputs))
        packed[:, part] = words
        if high is not None and its_high is not None:
            high[:, part] = its_high
    assert packed is not None, "a layer has outputs"
    return packed, high


def places_by_group(checkpoint: Checkpoint, name: str, inputs: int, group_size: int) -> torch.Tensor | None:
    """The permutation [K] int32 that brings the inputs of one group side by side, in their own order, from the group of
    each input, tensor `name` [K]; None where they lie like that already.

    Activation order: Frantar et al., 2023, "GPTQ", section 3.3 of the repository's README (`--act-order`).
    """
    groups = inputs // group_size
    group_of = checkpoint.raw(name, (inputs,), (torch.int32, torch.int64), "where [K] = {} is expected")
    low, high = int(group_of.min()), int(group_of.max())
    if low < 0 or high >= groups:
        raise checkpoint.error(name, f"names group {low if low < 0 else high}; there are {groups}, counted from 0")
    counts = torch.bincount(group_of.long(), minlength=groups)
    if not bool((counts == group_size).all()):
        odd = int((counts != group_size).nonzero()[0])
        raise checkpoint.error(
            name, f"gives group {odd} {int(counts[odd])} inputs; each of {groups} must have group_size = {group_size}"
        )
    order = torch.argsort(group_of, stable=True).int()  # [K]
    return None if torch.equal(order, torch.arange(inputs, dtype=torch.int32, device=order.device)) else order


def group_of_each_input(weight: QuantizedWeight) -> torch.Tensor:
    """[K] int32: the group that each input's scale belongs to, what a checkpoint calls g_idx."""
    places = torch.arange(weight.places, dtype=torch.int32, device=weight.device) // weight.group_size
    return places if weight.permutation is None else places[by_input(weight)]


def by_input(weight: QuantizedWeight) -> torch.Tensor:
    """[K] int64: the place of each input's code. ValueError where places are padding, which no checkpoint has."""
    if weight.places != weight.inputs:
        raise ValueError(f"a checkpoint has no padding: {weight.places} places for {weight.inputs} inputs")
    if weight.permutation is None:
        return torch.arange(weight.inputs, device=weight.device)
    return torch.argsort(weight.permutation.long())


def require(weight: QuantizedWeight, layer: str, scheme: Scheme) -> None:
    """Raise ValueError where the weight of `layer` is none of the scheme."""
    group_size = weight.inputs if scheme.group_size == -1 else scheme.group_size
    if (weight.bits, weight.group_size, weight.coding) != (scheme.bits, group_size, scheme.coding):
        raise ValueError(
            f"{layer}: {weight.coding} codes of {weight.bits} bits in groups of {weight.group_size}, but the format "
            f"holds {scheme.coding} ones of {scheme.bits} in groups of {group_size}"
        )
    if weight.permutation is not None and not scheme.permuted:
        raise ValueError(f"{layer}: its codes are permuted, which the format does not hold")
    if weight.outliers is not None and not scheme.sparse:
        raise ValueError(f"{layer}: it has outliers, which the format does not hold")


def unless_symmetric(zeros: torch.Tensor, bits: int) -> torch.Tensor | None:
    """Zero-points [G, N] as int16; None where all of them are 2**(bits - 1) and need not be kept."""
    return None if bool((zeros == 2 ** (bits - 1)).all()) else zeros.short().contiguous()


def check_fit(layer: str, zeros: torch.Tensor, bits: int, added: int = 0) -> None:
    """Raise ValueError where zero-points, stored less `added`, do not fit `bits`."""
    low, high = int(zeros.min()), int(zeros.max())
    if low < added or high >= 2**bits + added:
        raise ValueError(
            f"{layer}: zero-points from {low} to {high}; {added} to {2**bits - 1 + added} can be held at {bits} bits"
        )


def dense_layer(layer: str) -> ValueError:
    """What to raise where a layer that the format keeps dense is read or written as a quantized one."""
    return ValueError(f"{layer}: the format keeps this layer dense")
