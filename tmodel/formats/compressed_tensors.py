"""compressed-tensors, format "pack-quantized", as llm-compressor writes it for vLLM.

    weight_packed     [N, ceil(K * bits / 32)] int32   codes along K, a stream of bits
    weight_scale      [N, G]                           W[n, k] = (code - zero) * scale
    weight_zero_point [ceil(N * bits / 32), G] int32   zero-points along N; only where it is asymmetric
    weight_g_idx      [K] int32                        the group of each input; only of activation ordering by group
    weight_shape      [2] integer                      (N, K)

Codes and zero-points are signed there and stored with 2**(bits - 1) added: as they are here.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tkernels.quantized.slicing import zeros_of
from tkernels.quantized.weight import QuantizedWeight, unpack_codes
from tmodel.formats.base import (
    Scheme,
    by_input,
    check_bits,
    check_fit,
    check_group_size,
    dense_layer,
    group_of_each_input,
    packed_by_parts,
    places_by_group,
    read_values,
    read_words,
    require,
    unless_symmetric,
)
from tmodel.formats.bitstream import num_words, pack_stream, unpack_stream
from tmodel.weights import Checkpoint

_CLASS = "Linear"
"""The class of every layer that is read here, which targets and ignored layers may name in place of layers."""


class Weights(BaseModel):
    """A group's `weights`. actorder: "group" stores codes by input and the group of each; "weight" ("static") changed
    only how the codes were found.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    num_bits: int
    type: Literal["int"] = "int"
    symmetric: bool = True
    strategy: Literal["group", "channel"]
    group_size: int | None = None
    actorder: Literal["group", "weight", "dynamic", "static"] | bool | None = None
    dynamic: Literal[False] = False

    @field_validator("num_bits", mode="before")
    @classmethod
    def _num_bits(cls, num_bits: Any) -> int:
        return check_bits(num_bits)

    @model_validator(mode="after")
    def _consistent(self) -> Weights:
        check_group_size(self.groups_of, self.num_bits)
        if self.strategy == "group" and self.group_size is None:
            raise ValueError("strategy 'group' needs a group_size")
        return self

    @property
    def groups_of(self) -> int:
        return -1 if self.strategy == "channel" or self.group_size is None else self.group_size

    @property
    def by_group(self) -> bool:
        return self.actorder in ("group", "dynamic", True)


class Group(BaseModel):
    """Layers of one kind. Activations are quantized in other formats, and only there."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    targets: list[str]
    weights: Weights
    input_activations: None = None
    output_activations: None = None
    format: Literal["pack-quantized"] | None = None


class CompressedTensors(BaseModel):
    """The settings that decide what is decoded.

    Targets and ignored layers are names, "re:" and a regular expression that matches from a name's beginning, or the
    class "Linear".
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    method: ClassVar[str] = "compressed-tensors"

    config_groups: dict[str, Group] = Field(min_length=1)
    ignore: list[str] = []
    format: str = "pack-quantized"
    kv_cache_scheme: None = None
    transform_config: dict[str, Any] | None = None
    sparsity_config: dict[str, Any] | None = None

    @field_validator("format")
    @classmethod
    def _format(cls, name: str) -> str:
        if name != "pack-quantized":
            raise ValueError(f"{name!r} is not supported; 'pack-quantized' is")
        return name

    @model_validator(mode="after")
    def _consistent(self) -> CompressedTensors:
        if (self.transform_config or {}).get("config_groups"):
            raise ValueError("transform_config: transformed activations are not supported")
        if (self.sparsity_config or {}).get("format", "dense") != "dense":
            raise ValueError("sparsity_config: only 'dense' is supported")
        for pattern in (*self.ignore, *(target for group in self.config_groups.values() for target in group.targets)):
            try:
                re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
            except re.error as error:
                raise ValueError(f"{pattern!r}: {error}") from None
        return self

    def weights(self, layer: str) -> Weights | None:
        """The settings of a layer; None where it is dense. A name stands before a pattern, that before a class."""
        if any(_precision(pattern, layer) for pattern in self.ignore):
            return None
        ranked = [
            (_precision(target, layer), group.weights)
            for group in self.config_groups.values()
            for target in group.targets
        ]
        rank, weights = max(ranked, key=lambda pair: pair[0], default=(0, None))  # the first of equals
        return weights if rank else None

    def scheme(self, layer: str) -> Scheme | None:
        mine = self.weights(layer)
        if mine is None:
            return None
        return Scheme(mine.num_bits, mine.groups_of, permuted=mine.by_group and mine.groups_of != -1)

    def _quantized(self, layer: str) -> tuple[Weights, Scheme]:
        mine, scheme = self.weights(layer), self.scheme(layer)
        if mine is None or scheme is None:
            raise dense_layer(layer)
        return mine, scheme

    def check(self, layer: str, outputs: int, inputs: int) -> None:
        scheme = self.scheme(layer)
        if scheme is not None:
            scheme.check_inputs(layer, inputs)

    def read(self, checkpoint: Checkpoint, layer: str, outputs: int, inputs: int) -> QuantizedWeight:
        mine, scheme = self._quantized(layer)
        bits, groups = mine.num_bits, scheme.groups(inputs)
        shape = checkpoint.raw(f"{layer}.weight_shape", (2,), (torch.int64, torch.int32), "where [2] = {} is expected")
        if shape.tolist() != [outputs, inputs]:
            raise checkpoint.error(
                f"{layer}.weight_shape", f"is {shape.tolist()}, config.json asks for {[outputs, inputs]}"
            )
        packed_shape = (outputs, num_words(inputs, bits))
        words = read_words(checkpoint, f"{layer}.weight_packed", packed_shape, f"[N, K * {bits} / 32]")
        scales = read_values(checkpoint, f"{layer}.weight_scale", (outputs, groups), "[N, K / group_size]")
        for name, expected, why in (
            ("weight_zero_point", not mine.symmetric, "symmetric is true; asymmetric weights have zero-points"),
            ("weight_g_idx", mine.by_group, f"actorder is {mine.actorder!r}; 'group' gives each input its group"),
        ):
            if not expected and f"{layer}.{name}" in checkpoint:
                raise checkpoint.error(f"{layer}.{name}", f"contradicts quantization_config, whose {why}")
        zeros = None
        if not mine.symmetric:
            stored = read_words(
                checkpoint,
                f"{layer}.weight_zero_point",
                (num_words(outputs, bits), groups),
                f"[N * {bits} / 32, K / group_size]",
            )
            zeros = unless_symmetric(unpack_stream(stored, 0, bits, outputs).t(), bits)  # [N, G] -> [G, N]
        permutation = None
        if mine.by_group:
            permutation = places_by_group(checkpoint, f"{layer}.weight_g_idx", inputs, inputs // groups)
        scales = scales.t().contiguous()  # [G, N]
        if permutation is None and bits != 3:  # the words are those of QuantizedWeight, stood up
            return QuantizedWeight(words.t().contiguous(), scales, zeros, bits, inputs // groups)
        places = slice(None) if permutation is None else permutation.long()
        packed, high = packed_by_parts(
            lambda part: unpack_stream(words[part], 1, bits, inputs).t()[places], outputs, bits
        )
        return QuantizedWeight(packed, scales, zeros, bits, inputs // groups, high=high, permutation=permutation)

    def encode(self, layer: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        mine, scheme = self._quantized(layer)
        require(weight, layer, scheme)
        assert weight.scales is not None, "the scheme is uniform"
        bits = mine.num_bits
        codes = unpack_codes(weight)[by_input(weight)]  # [K, N]
        tensors = {
            "weight_packed": pack_stream(codes.t(), 1, bits),
            "weight_scale": weight.scales.t().contiguous(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if mine.by_group:
            tensors["weight_g_idx"] = group_of_each_input(weight)
        if mine.symmetric:
            if weight.zeros is not None:
                raise ValueError(f"{layer}: it has zero-points, but symmetric is true")
            return tensors
        zeros = zeros_of(weight)
        check_fit(layer, zeros, bits)
        return tensors | {"weight_zero_point": pack_stream(zeros.t(), 0, bits)}

    def config(self) -> dict[str, Any]:
        return {
            "quant_method": self.method,
            "quantization_status": "compressed",
            **self.model_dump(exclude={"kv_cache_scheme", "transform_config", "sparsity_config"}),
        }


def _precision(pattern: str, layer: str) -> int:
    """How precisely a target means a layer: 3 by name, 2 by a pattern, 1 by its class; 0 not at all."""
    if pattern.startswith("re:"):
        return 2 if re.match(pattern.removeprefix("re:"), layer) else 0
    return 3 if pattern == layer else int(pattern == _CLASS)
