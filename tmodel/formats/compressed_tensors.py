"""compressed-tensors, as llm-compressor writes it for vLLM.

Format "pack-quantized", weights alone in codes:

    weight_packed     [N, ceil(K * bits / 32)] int32   codes along K, a stream of bits
    weight_scale      [N, G]                           W[n, k] = (code - zero) * scale
    weight_zero_point [ceil(N * bits / 32), G] int32   zero-points along N; only where it is asymmetric
    weight_g_idx      [K] int32                        the group of each input; only of activation ordering by group
    weight_shape      [2] integer                      (N, K)

compressed-tensors calls codes and zero-points signed, and stores them with 2**(bits - 1) added. Here they stay so.

Formats "int-quantized", "float-quantized" and "naive-quantized", weights and inputs in codes of 8 bits:

    weight            [N, K] int8 or e4m3fn
    weight_scale      [N, 1]                           W[n, k] = code * scale; strategy "channel"
                      [1]                              strategy "tensor"
                      [ceil(N / 128), K / 128]         strategy "block"
    input_scale       [1]                              only where the inputs' scale is static
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tkernels.quantized.row_codes import BLOCK
from tkernels.quantized.scaled_weight import ScaledWeight
from tkernels.quantized.slicing import zeros_of
from tkernels.quantized.weight import QuantizedWeight, unpack_codes
from tmodel.formats.base import (
    CodesName,
    ScaledScheme,
    Scheme,
    check_bits,
    check_group_size,
    check_scheme,
    check_zeros_fit,
    compute_group_indices,
    drop_symmetric_zeros,
    invert_permutation,
    make_dense_layer_error,
    pack_by_parts,
    read_permutation,
    read_values,
    read_words,
)
from tmodel.formats.bitstream import num_words, pack_stream, unpack_stream
from tmodel.formats.patterns import find_match, find_pattern_fault
from tmodel.formats.scaled import (
    check_scaled,
    make_weight,
    read_codes,
    read_input_scale,
    read_scales,
    read_zero_points,
)
from tmodel.weights import Checkpoint

_CLASS = "Linear"
"""The class of every linear layer, which targets and ignored layers may name in place of layers."""

PACKED = "pack-quantized"
_EIGHT_BITS = ("int-quantized", "float-quantized", "naive-quantized")
_EACH_ITS_OWN = "mixed-precision"
"""The format of a file whose groups name theirs."""
_CODES: dict[str, CodesName] = {"int": "int8", "float": "float8_e4m3fn"}


class Weights(BaseModel):
    """A group's `weights`.

    Attributes:
        num_bits: Of a code.
        type: "int", or "float", which is e4m3.
        symmetric: All zero-points are 2**(bits - 1), and none is stored.
        strategy: "group"; or "channel": all inputs share a scale; of 8-bit formats also "tensor" and "block".
        group_size: Inputs that share a scale.
        block_structure: Outputs and inputs that share a scale.
        actorder: "group" stores codes by input and the group of each; "weight" ("static") changed only how the
            quantizer chose the codes.
        dynamic: false.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    num_bits: int
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Literal["group", "channel", "tensor", "block"]
    group_size: int | None = None
    block_structure: list[int] | None = None
    actorder: Literal["group", "weight", "dynamic", "static"] | bool | None = None
    dynamic: Literal[False] = False

    @field_validator("num_bits", mode="before")
    @classmethod
    def _check_num_bits(cls, num_bits: Any) -> int:
        return check_bits(num_bits)

    @model_validator(mode="after")
    def _check_group_size(self) -> Weights:
        check_group_size(self.inputs_per_group, self.num_bits)
        if self.strategy == "group" and self.group_size is None:
            raise ValueError("strategy 'group' needs a group_size")
        return self

    @property
    def inputs_per_group(self) -> int:
        """Inputs that share a scale; -1 is all."""
        return -1 if self.strategy != "group" or self.group_size is None else self.group_size

    @property
    def has_group_indices(self) -> bool:
        """Whether the checkpoint stores each input's group."""
        return self.actorder in ("group", "dynamic", True)


class Activations(BaseModel):
    """A group's `input_activations`.

    Attributes:
        num_bits: Of a code.
        type: "int", or "float", which is e4m3.
        symmetric: No zero-points.
        strategy: "token": each has a scale of its own; "tensor": all have one; "group": so many inputs of each token.
        group_size: Inputs of a token that share a scale.
        dynamic: Scales are found while the model runs; else they are stored.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    num_bits: Literal[8] = 8
    type: Literal["int", "float"] = "int"
    symmetric: Literal[True] = True
    strategy: Literal["token", "tensor", "group"]
    group_size: int | None = None
    dynamic: bool = False


class Group(BaseModel):
    """Layers that share settings. `format` is what the file's is where it is None."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    targets: list[str]
    weights: Weights
    input_activations: Activations | None = None
    output_activations: None = None
    format: Literal["pack-quantized", "int-quantized", "float-quantized", "naive-quantized"] | None = None

    def check_format(self, name: str) -> None:
        """Checks that the settings are some that format `name` stores and the kernels compute.

        Raises:
            ValueError: They are not; the message begins with the setting's name.
        """
        if name == PACKED:
            self._check_packed()
        else:
            self._check_eight_bits()

    def _check_packed(self) -> None:
        if self.weights.type != "int":
            raise ValueError(f"weights.type: format {PACKED!r} is supported with 'int', got {self.weights.type!r}")
        if self.weights.strategy not in ("group", "channel"):
            given = f"got {self.weights.strategy!r}"
            raise ValueError(f"weights.strategy: format {PACKED!r} is supported with 'group' or 'channel', {given}")
        if self.input_activations is not None:
            raise ValueError(f"input_activations: format {PACKED!r} is supported without; its inputs are not quantized")

    def _check_eight_bits(self) -> None:
        weights, inputs = self.weights, self.input_activations
        if weights.num_bits != 8 or not weights.symmetric or weights.has_group_indices:
            raise ValueError(f"weights: outside {PACKED!r} 8 bits are supported, symmetric and in the inputs' order")
        if inputs is None:
            raise ValueError(
                f"input_activations: weights alone are supported in format {PACKED!r}; in others the inputs must be "
                "quantized too, and these are not"
            )
        if inputs.type != weights.type:
            raise ValueError(f"input_activations.type: {inputs.type!r} with weights of type {weights.type!r}")
        by_row = weights.strategy in ("channel", "tensor")
        by_block = (weights.type, weights.strategy, weights.block_structure) == ("float", "block", [BLOCK, BLOCK])
        supported = {
            ("token", True): by_row,
            ("tensor", False): by_row,
            ("group", True): by_block and inputs.group_size == BLOCK,
        }
        if not supported.get((inputs.strategy, inputs.dynamic), False):
            how = "dynamic" if inputs.dynamic else "static"
            raise ValueError(
                f"weights.strategy {weights.strategy!r} with {how} input_activations.strategy {inputs.strategy!r}: "
                "supported are 'channel' and 'tensor' with dynamic 'token' or static 'tensor', and of type 'float' "
                f"'block' of [{BLOCK}, {BLOCK}] with dynamic 'group' of {BLOCK}"
            )

    def scheme(self, name: str) -> Scheme | ScaledScheme:
        """How layers of the group are stored in format `name`."""
        weights, inputs = self.weights, self.input_activations
        if name == PACKED or inputs is None:
            size = weights.inputs_per_group
            return Scheme(weights.num_bits, size, permuted=weights.has_group_indices and size != -1)
        return ScaledScheme(_CODES[weights.type], weights.strategy == "block", not inputs.dynamic)


class CompressedTensors(BaseModel):
    """The settings that decide what is decoded.

    A target or an ignored layer is a name, or "re:" and a regular expression that matches from a name's beginning, or
    the class "Linear".
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    method: ClassVar[str] = "compressed-tensors"

    config_groups: dict[str, Group] = Field(min_length=1)
    ignore: list[str] = []
    format: str = "pack-quantized"
    transform_config: dict[str, Any] | None = None
    sparsity_config: dict[str, Any] | None = None

    @field_validator("format")
    @classmethod
    def _check_format(cls, name: str) -> str:
        if name not in (supported := (PACKED, *_EIGHT_BITS, _EACH_ITS_OWN)):
            raise ValueError(f"{name!r} is not supported; {', '.join(map(repr, supported))} are")
        return name

    @model_validator(mode="after")
    def _check_groups(self) -> CompressedTensors:
        for name, group in self.config_groups.items():
            where = f"config_groups.{name}"
            if group.format is None and self.format == _EACH_ITS_OWN:
                raise ValueError(f"{where}: format {_EACH_ITS_OWN!r} needs a format of each group")
            try:
                group.check_format(group.format or self.format)
            except ValueError as error:
                raise ValueError(f"{where}.{error}") from None
        return self

    @model_validator(mode="after")
    def _check_transforms_and_patterns(self) -> CompressedTensors:
        if (self.transform_config or {}).get("config_groups"):
            raise ValueError("transform_config: transformed activations are not supported")
        if (self.sparsity_config or {}).get("format", "dense") != "dense":
            raise ValueError("sparsity_config: only 'dense' is supported")
        for pattern in (*self.ignore, *(target for group in self.config_groups.values() for target in group.targets)):
            expression = pattern.removeprefix("re:") if pattern.startswith("re:") else ""
            if (fault := find_pattern_fault(expression)) is not None:
                raise ValueError(f"{pattern[:80]!r}: {fault}")
        return self

    def find_group(self, layer: str) -> Group | None:
        """The settings of a layer; None where it is dense. A name wins over a pattern, and a pattern over a class."""
        if _rank_match(self.ignore, layer, "ignore"):
            return None
        ranked = [
            (_rank_match(group.targets, layer, f"config_groups.{name}.targets"), group)
            for name, group in self.config_groups.items()
        ]
        rank, group = max(ranked, key=lambda pair: pair[0])  # of equal ranks the first wins
        return group if rank else None

    def scheme(self, layer: str) -> Scheme | ScaledScheme | None:
        group = self.find_group(layer)
        return None if group is None else group.scheme(group.format or self.format)

    def _require_quantized(self, layer: str) -> tuple[Weights, Scheme | ScaledScheme]:
        group, scheme = self.find_group(layer), self.scheme(layer)
        if group is None or scheme is None:
            raise make_dense_layer_error(layer)
        return group.weights, scheme

    def check(self, layer: str, scheme: Any, outputs: int, inputs: int) -> None:
        scheme.check_inputs(layer, inputs)

    def read(self, checkpoint: Checkpoint, layer: str, outputs: int, inputs: int) -> QuantizedWeight | ScaledWeight:
        weights, scheme = self._require_quantized(layer)
        if isinstance(scheme, ScaledScheme):
            return _read_eight_bits(checkpoint, layer, (outputs, inputs), weights, scheme)
        return self._read_packed(checkpoint, layer, outputs, inputs, weights, scheme)

    @staticmethod
    def _read_packed(
        checkpoint: Checkpoint, layer: str, outputs: int, inputs: int, weights: Weights, scheme: Scheme
    ) -> QuantizedWeight:
        bits, groups = weights.num_bits, scheme.num_groups(inputs)
        shape = checkpoint.raw(f"{layer}.weight_shape", (2,), (torch.int64, torch.int32), "where [2] = {} is expected")
        if shape.tolist() != [outputs, inputs]:
            raise checkpoint.error(
                f"{layer}.weight_shape", f"is {shape.tolist()}, config.json asks for {[outputs, inputs]}"
            )
        packed_shape = (outputs, num_words(inputs, bits))
        words = read_words(checkpoint, f"{layer}.weight_packed", packed_shape, f"[N, K * {bits} / 32]")
        scales = read_values(checkpoint, f"{layer}.weight_scale", (outputs, groups), "[N, K / group_size]")
        for name, expected, why in (
            ("weight_zero_point", not weights.symmetric, "symmetric is true; asymmetric weights have zero-points"),
            (
                "weight_g_idx",
                weights.has_group_indices,
                f"actorder is {weights.actorder!r}; 'group' gives each input its group",
            ),
        ):
            if not expected and f"{layer}.{name}" in checkpoint:
                raise checkpoint.error(f"{layer}.{name}", f"contradicts quantization_config, whose {why}")
        zeros = None
        if not weights.symmetric:
            stored = read_words(
                checkpoint,
                f"{layer}.weight_zero_point",
                (num_words(outputs, bits), groups),
                f"[N * {bits} / 32, K / group_size]",
            )
            zeros = drop_symmetric_zeros(unpack_stream(stored, 0, bits, outputs).t(), bits)  # [N, G] -> [G, N]
        permutation = None
        if weights.has_group_indices:
            permutation = read_permutation(checkpoint, f"{layer}.weight_g_idx", inputs, inputs // groups)
        scales = scales.t().contiguous()  # [G, N]
        if permutation is None and bits != 3:  # QuantizedWeight has the same words, transposed
            return QuantizedWeight(words.t().contiguous(), scales, zeros, bits, inputs // groups)
        places = slice(None) if permutation is None else permutation.long()
        packed, high = pack_by_parts(
            lambda part: unpack_stream(words[part], 1, bits, inputs).t()[places], outputs, bits
        )
        return QuantizedWeight(packed, scales, zeros, bits, inputs // groups, high=high, permutation=permutation)

    def encode(self, layer: str, weight: QuantizedWeight | ScaledWeight) -> dict[str, torch.Tensor]:
        weights, scheme = self._require_quantized(layer)
        if isinstance(weight, ScaledWeight) or isinstance(scheme, ScaledScheme):
            return _encode_eight_bits(layer, weight, weights, scheme)
        check_scheme(weight, layer, scheme)
        assert weight.scales is not None, "the scheme is uniform"
        bits = weights.num_bits
        codes = unpack_codes(weight)[invert_permutation(weight)]  # [K, N]
        tensors = {
            "weight_packed": pack_stream(codes.t(), 1, bits),
            "weight_scale": weight.scales.t().contiguous(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if weights.has_group_indices:
            tensors["weight_g_idx"] = compute_group_indices(weight)
        if weights.symmetric:
            if weight.zeros is not None:
                raise ValueError(f"{layer}: it has zero-points, but symmetric is true")
            return tensors
        zeros = zeros_of(weight)
        check_zeros_fit(layer, zeros, bits)
        return tensors | {"weight_zero_point": pack_stream(zeros.t(), 0, bits)}

    def config(self) -> dict[str, Any]:
        return {
            "quant_method": self.method,
            "quantization_status": "compressed",
            **self.model_dump(exclude={"transform_config", "sparsity_config"}),
        }


def make_w8a8(codes: Literal["int", "float"]) -> CompressedTensors:
    """The settings of 8-bit weights with a scale for each output and inputs with one for each token; the head is dense.

    Args:
        codes: "int", or "float", which is e4m3.
    """
    name: Literal["int-quantized", "float-quantized"] = "int-quantized" if codes == "int" else "float-quantized"
    group = Group(
        targets=[_CLASS],
        weights=Weights(num_bits=8, type=codes, strategy="channel"),
        input_activations=Activations(type=codes, strategy="token", dynamic=True),
        format=name,
    )
    return CompressedTensors(config_groups={"group_0": group}, ignore=["lm_head"], format=name)


def _read_eight_bits(
    checkpoint: Checkpoint, layer: str, shape: tuple[int, int], weights: Weights, scheme: ScaledScheme
) -> ScaledWeight:
    """The weight [N, K] of a layer in one of the 8-bit formats."""
    outputs, inputs = shape
    scales_of = {
        "channel": ((outputs, 1), "[N, 1]"),
        "tensor": ((1,), "[1]"),
        "block": ((-(-outputs // BLOCK), inputs // BLOCK), f"[ceil(N / {BLOCK}), K / {BLOCK}]"),
    }
    codes = read_codes(checkpoint, f"{layer}.weight", shape, scheme)
    scales = read_scales(checkpoint, f"{layer}.weight_scale", *scales_of[weights.strategy])
    input_scale = read_input_scale(checkpoint, f"{layer}.input_scale") if scheme.static else None
    for name in ("weight_zero_point", "input_zero_point"):
        read_zero_points(checkpoint, f"{layer}.{name}")
    return make_weight(scheme, codes, scales, input_scale)


def _encode_eight_bits(
    layer: str, weight: QuantizedWeight | ScaledWeight, weights: Weights, scheme: Scheme | ScaledScheme
) -> dict[str, torch.Tensor]:
    """The inverse of `_read_eight_bits`."""
    if not isinstance(weight, ScaledWeight) or not isinstance(scheme, ScaledScheme):
        raise ValueError(f"{layer}: a {type(weight).__name__}, which a layer of {scheme} is not")
    check_scaled(layer, weight, scheme)
    scales = weight.scales
    if weights.strategy == "tensor":
        if not bool((scales == scales[0]).all()):
            raise ValueError(f"{layer}: its outputs have scales of their own, but the format holds one for all")
        scales = scales[:1]
    elif weights.strategy == "channel":
        scales = scales.unsqueeze(1)
    tensors = {"weight": weight.values, "weight_scale": scales}
    return tensors if weight.input_scale is None else {**tensors, "input_scale": weight.input_scale}


def _rank_match(targets: Sequence[str], layer: str, field: str) -> int:
    """How the targets in `field` match a layer: 3 by name, 2 by a pattern, 1 by its class, 0 not at all."""
    if layer in targets:
        return 3
    if find_match(_expressions(tuple(targets)), layer, field) is not None:
        return 2
    return int(_CLASS in targets)


@lru_cache
def _expressions(targets: tuple[str, ...]) -> tuple[str, ...]:
    """The regular expressions among targets."""
    return tuple(target.removeprefix("re:") for target in targets if target.startswith("re:"))
