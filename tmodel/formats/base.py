"""The interface of a quantized checkpoint's format, and the checks that the formats share.

A format is one file of this folder. It says how its config stores each linear layer, reads the layer's tensors as a
QuantizedWeight, and writes one. It knows no model: a layer is a name, N outputs and K inputs.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tkernels.inputs import dtype_of
from tkernels.quantized.codes import BITS, codes_per_row, pack_codes
from tkernels.quantized.row_codes import BLOCK
from tkernels.quantized.scaled_weight import ScaledWeight
from tkernels.quantized.weight import Coding, QuantizedWeight
from tmodel.json_files import ConfigError
from tmodel.weights import Checkpoint

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_PARTS = 8
"""A layer is unpacked in this many parts: 2-bit codes, a byte each, take four times the memory of their words."""
CodesName = Literal["int8", "float8_e4m3fn"]
Parsed = TypeVar("Parsed", bound=BaseModel)


class FormatWarning(UserWarning):
    """A checkpoint's words contradict its metadata, and the reader trusts the words."""


@dataclass(frozen=True)
class Scheme:
    """How a linear layer is stored, as far as the config tells before any tensor is read.

    Attributes:
        bits: Of a code.
        group_size: Inputs that share a scale; -1 is all.
        coding: "uniform" (scale and zero-point), "e2m1" (floats and a scale) or "lookup" (a table).
        permuted: The codes may lie in another order than the inputs.
        sparse: Some weights may be kept beside the codes.
    """

    bits: int
    group_size: int = -1
    coding: Coding = "uniform"
    permuted: bool = False
    sparse: bool = False

    def __str__(self) -> str:
        groups = "one group" if self.group_size == -1 else f"groups of {self.group_size}"
        codes = {"uniform": "", "e2m1": "e2m1 ", "lookup": "table "}[self.coding]
        order = ", in the order of activations" if self.permuted else ""
        return f"{codes}codes of {self.bits} bits in {groups}{order}{', with outliers' if self.sparse else ''}"

    def num_groups(self, inputs: int) -> int:
        """G, the groups of `inputs` that `check_inputs` accepts."""
        return 1 if self.group_size == -1 else inputs // self.group_size

    def weight_bytes(self, outputs: int, inputs: int) -> int:
        """The bytes of the weight [outputs, inputs] in memory, as far as the config tells: codes and a table, or 16-bit
        scales and, of uniform codes, an int16 zero-point for each.
        """
        of_groups = self.num_groups(inputs) * (4 if self.coding == "uniform" else 2)
        beside = 2 * 2**self.bits if self.coding == "lookup" else of_groups
        return outputs * (self.bits * inputs // 8 + beside)

    def check_inputs(self, layer: str, inputs: int) -> None:
        """Checks that a layer of `inputs` inputs can be stored in this scheme.

        Args:
            layer: Its name, for the message.
            inputs: K.

        Raises:
            ConfigError: The codes do not fill whole rows of words, or the group size does not divide the inputs.
        """
        row = codes_per_row(self.bits)
        if inputs % row:
            raise ConfigError(
                f"{layer}: its {inputs} inputs are no multiple of {row}, the codes of {self.bits} bits in a row of "
                "words"
            )
        if self.group_size != -1 and inputs % self.group_size:
            raise ConfigError(f"{layer}: group_size {self.group_size} does not divide its {inputs} inputs")


@dataclass(frozen=True)
class ScaledScheme:
    """How a linear layer of 8-bit codes is stored and its inputs are quantized.

    Attributes:
        codes: The dtype of the weight's codes and of the inputs'.
        blocked: A scale belongs to a block of 128 x 128 of the weight, and to 128 inputs of a token; else to an output,
            and to a token.
        static: The inputs' scale is stored, one for all tokens; else it is found for each.
    """

    codes: CodesName
    blocked: bool = False
    static: bool = False

    def __str__(self) -> str:
        scale = f"block of {BLOCK} x {BLOCK}" if self.blocked else "output"
        return f"{self.codes} with a scale for each {scale}{' and one of the inputs' if self.static else ''}"

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.codes)

    @property
    def takes_any_inputs(self) -> bool:
        """Whether nothing but the weight's own codes and scales decides what it is: inputs may stay in 16 bits."""
        return self.blocked and not self.static

    def num_scales(self, outputs: int, inputs: int) -> int:
        """The scales that the weight [outputs, inputs] has in memory."""
        return -(-outputs // BLOCK) * (inputs // BLOCK) if self.blocked else outputs

    def weight_bytes(self, outputs: int, inputs: int) -> int:
        """The bytes of the weight [outputs, inputs] in memory: codes and float32 scales."""
        return outputs * inputs + 4 * self.num_scales(outputs, inputs)

    def check_inputs(self, layer: str, inputs: int) -> None:
        """Checks that a layer of `inputs` inputs can be stored in this scheme.

        Args:
            layer: Its name, for the message.
            inputs: K.

        Raises:
            ConfigError: Blocks do not fill its inputs.
        """
        if self.blocked and inputs % BLOCK:
            raise ConfigError(f"{layer}: its {inputs} inputs are no multiple of {BLOCK}, the inputs of a block")


class QuantizationFormat(Protocol):
    """A format with the settings of one checkpoint. Compared by value."""

    @property
    def method(self) -> str:
        """The `quant_method` of its config."""
        ...

    def scheme(self, layer: str) -> Scheme | ScaledScheme | None:
        """How `layer` ("model.layers.0.mlp.down_proj") is stored; None where it is dense."""
        ...

    def check(self, layer: str, scheme: Any, outputs: int, inputs: int) -> None:
        """Checks that the format can store `layer`, [outputs, inputs], in `scheme`, which is its own.

        Raises:
            ConfigError: It cannot store a layer of this size.
        """
        ...

    def read(self, checkpoint: Checkpoint, layer: str, outputs: int, inputs: int) -> QuantizedWeight | ScaledWeight:
        """Reads the weight [N = outputs, K = inputs] of a quantized layer.

        Returns:
            The weight on the checkpoint's device: a QuantizedWeight in sequential order, its scales in the dtype that
            the file has; of a ScaledScheme a ScaledWeight.

        Raises:
            WeightError: A tensor is missing, has another shape or dtype, or holds an impossible value. The message
                names file, tensor and rule.
            ValueError: The format keeps the layer dense.
        """
        ...

    def encode(self, layer: str, weight: Any) -> dict[str, torch.Tensor]:
        """The inverse of `read`, bit for bit, for the kind of weight that the format reads.

        Returns:
            The last part of a tensor's name ("qweight") -> the tensor.

        Raises:
            ValueError: The weight does not match `scheme(layer)`, or the format cannot hold it.
        """
        ...

    def config(self) -> dict[str, Any]:
        """The mapping to write as `quantization_config` into config.json."""
        ...


@runtime_checkable
class ExpertsFormat(QuantizationFormat, Protocol):
    """A format that holds the weights of all experts of a layer in one tensor."""

    def read_experts(
        self, checkpoint: Checkpoint, layer: str, num_experts: int, outputs: int, inputs: int
    ) -> Iterator[QuantizedWeight]:
        """Reads the weights [N = outputs, K = inputs] of a layer's experts, one after the other.

        Raises:
            WeightError: As `read`.
            ValueError: The format keeps the layer dense.
        """
        ...


def parse_settings(kind: type[Parsed], raw: Mapping[str, Any]) -> Parsed:
    """Parses `raw` as a format's settings of class `kind`; a field that is null is as good as absent.

    Raises:
        ConfigError: Fields are wrong; the message lists every one.
    """
    try:
        return kind.model_validate(drop_nulls(raw))
    except ValidationError as error:
        raise ConfigError("; ".join(map(_describe_error, error.errors()))) from error


def drop_nulls(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` without the fields that are null, which tools write for settings that were left alone."""
    return {key: value for key, value in raw.items() if value is not None}


def refuse_adapter(adapter: Any) -> None:
    """Checks that a checkpoint has no LoRA adapter: its weights without it are another model.

    Raises:
        ValueError: It has one.
    """
    if adapter is not None:
        raise ValueError(
            f"the weights come with a LoRA adapter, which is not applied here, got {reprlib.repr(adapter)}; merge it "
            "into the dense model and quantize that, or set adapter to null to serve the weights without it"
        )


def _describe_error(error: ErrorDetails) -> str:
    """One of pydantic's errors: the field first, then what is wrong and, where the message lacks it, what was given."""
    field = "".join(f"{part}: " for part in (".".join(map(str, error["loc"])),) if part)
    if error["type"] == "value_error":
        return field + error["msg"].removeprefix("Value error, ")
    given = "" if error["type"] == "missing" else f", got {reprlib.repr(error['input'])}"
    return f"{field}{error['msg']}{given}"


def check_bits(bits: Any, supported: Sequence[int] = BITS) -> int:
    """Returns `bits`, an integer among `supported`.

    Raises:
        ValueError: It is not.
    """
    choice = f"supported are {', '.join(map(str, supported))}"
    if type(bits) is not int:  # JSON's true is no number
        raise ValueError(f"must be an integer, got {bits!r}; {choice}")
    if bits in supported:
        return bits
    note = ": 5 to 7 bits come in another packing (planar), which is not" if 5 <= bits <= 7 else ""
    raise ValueError(f"{bits} bits; {choice}{note}")


def check_group_size(group_size: int, bits: int) -> None:
    """Checks that groups of `group_size` inputs, -1 for all, fill whole rows of words at `bits` a code.

    Raises:
        ValueError: They do not.
    """
    if group_size != -1 and (group_size < 1 or group_size % codes_per_row(bits)):
        raise ValueError(
            f"group_size {group_size}; supported are -1 (all inputs) and multiples of {codes_per_row(bits)} "
            f"at {bits} bits, such as 32, 64 and 128"
        )


def read_words(checkpoint: Checkpoint, name: str, shape: Sequence[int], layout: str) -> torch.Tensor:
    """Reads packed codes, an int32 tensor.

    Args:
        checkpoint: Where they are.
        name: Of the tensor.
        shape: That it must have.
        layout: The shape in symbols, for the message: "[K / 8, N]".

    Raises:
        WeightError: The tensor is missing or has another shape or dtype.
    """
    return checkpoint.raw(name, shape, (torch.int32,), f"where {layout} = {{}} is expected")


def read_values(checkpoint: Checkpoint, name: str, shape: Sequence[int], layout: str) -> torch.Tensor:
    """Reads scales, a table or outliers, in the float dtype that the file has. Arguments as for `read_words`.

    Raises:
        WeightError: The tensor is missing, has another shape, holds no floats, or a value that is not finite.
    """
    values = checkpoint.raw(name, shape, FLOATS, f"where {layout} = {{}} is expected")
    checkpoint.require_finite(name, values)
    return values


def pack_by_parts(
    codes: Callable[[slice], torch.Tensor], outputs: int, bits: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Packs codes for a sequential QuantizedWeight, with one part of the outputs unpacked at a time.

    Args:
        codes: A slice of n outputs, which begins at a multiple of 8 -> its codes [Kp, n] uint8.
        outputs: N.
        bits: Of a code.

    Returns:
        (`packed`, `high`) of the QuantizedWeight.
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


def read_permutation(checkpoint: Checkpoint, name: str, inputs: int, group_size: int) -> torch.Tensor | None:
    """Reads the group of each input and sorts the inputs by it.

    Activation order: Frantar et al., 2023, "GPTQ", section 3.3 of the repository's README (`--act-order`).

    Args:
        checkpoint: Where the tensor is.
        name: Of the tensor, [K] int32 or int64, the group of each input.
        inputs: K.
        group_size: Inputs of a group.

    Returns:
        [K] int32, the input at each place, where a group's inputs lie side by side in ascending order; None where that
        is the identity.

    Raises:
        WeightError: The tensor names a group that does not exist, or gives one more or fewer inputs than group_size.
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


def compute_group_indices(weight: QuantizedWeight) -> torch.Tensor:
    """[K] int32: the group of each input's scale, which a checkpoint calls g_idx."""
    places = torch.arange(weight.places, dtype=torch.int32, device=weight.device) // weight.group_size
    return places if weight.permutation is None else places[invert_permutation(weight)]


def invert_permutation(weight: QuantizedWeight) -> torch.Tensor:
    """[K] int64: the place of each input's code.

    Raises:
        ValueError: Some places are padding, which no checkpoint has.
    """
    if weight.places != weight.inputs:
        raise ValueError(f"a checkpoint has no padding: {weight.places} places for {weight.inputs} inputs")
    if weight.permutation is None:
        return torch.arange(weight.inputs, device=weight.device)
    return torch.argsort(weight.permutation.long())


def check_scheme(weight: QuantizedWeight, layer: str, scheme: Scheme) -> None:
    """Checks that the weight of `layer` is stored as `scheme` says.

    Raises:
        ValueError: Its bits, group size or coding differ, or it has a permutation or outliers that the scheme lacks.
    """
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


def drop_symmetric_zeros(zeros: torch.Tensor, bits: int) -> torch.Tensor | None:
    """Zero-points [G, N] as int16; None where all of them are 2**(bits - 1) and need not be kept."""
    return None if bool((zeros == 2 ** (bits - 1)).all()) else zeros.short().contiguous()


def check_zeros_fit(layer: str, zeros: torch.Tensor, bits: int, added: int = 0) -> None:
    """Checks that zero-points fit `bits` once `added` is taken off to store them.

    Raises:
        ValueError: They do not.
    """
    low, high = int(zeros.min()), int(zeros.max())
    if low < added or high >= 2**bits + added:
        raise ValueError(
            f"{layer}: zero-points from {low} to {high}; {added} to {2**bits - 1 + added} can be held at {bits} bits"
        )


def make_dense_layer_error(layer: str) -> ValueError:
    """The error for a layer that the format keeps dense and a caller reads or writes as a quantized one."""
    return ValueError(f"{layer}: the format keeps this layer dense")
