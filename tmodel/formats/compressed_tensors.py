"""compressed-tensors, format "pack-quantized", as llm-compressor writes it for vLLM.

    weight_packed     [N, ceil(K * bits / 32)] int32   codes along K, a stream of bits
    weight_scale      [N, G]                           W[n, k] = (code - zero) * scale
    weight_zero_point [ceil(N * bits / 32), G] int32   zero-points along N; only where it is asymmetric
    weight_g_idx      [K] int32                        the group of each input; only of activation ordering by group
    weight_shape      [2] integer                      (N, K)

compressed-tensors calls codes and zero-points signed, and stores them with 2**(bits - 1) added. Here they stay so.
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
from tmodel.weights import Checkpoint

_CLASS = "Linear"
"""The class of every linear layer, which targets and ignored layers may name in place of layers."""


class Weights(BaseModel):
    """A group's `weights`.

    Attributes:
        num_bits: Of a code.
        type: "int".
        symmetric: All zero-points are 2**(bits - 1), and none is stored.
        strategy: "group", or "channel": all inputs share a scale.
        group_size: Inputs that share a scale.
        actorder: "group" stores codes by input and the group of each; "weight" ("static") changed only how the
            quantizer chose the codes.
        dynamic: false.
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
        return -1 if self.strategy == "channel" or self.group_size is None else self.group_size

    @property
    def has_group_indices(self) -> bool:
        """Whether the checkpoint stores each input's group."""
        return self.actorder in ("group", "dynamic", True)


class Group(BaseModel):
    """Layers that share settings. Only formats that are not supported quantize activations."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    targets: list[str]
    weights: Weights
    input_activations: None = None
    output_activations: None = None
    format: Literal["pack-quantized"] | None = None


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
        if name != "pack-quantized":
            raise ValueError(f"{name!r} is not supported; 'pack-quantized' is")
        return name

    @model_validator(mode="after")
    def _check_transforms_and_patterns(self) -> CompressedTensors:
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

    def find_weights(self, layer: str) -> Weights | None:
        """The settings of a layer; None where it is dense. A name wins over a pattern, and a pattern over a class."""
        if any(_rank_match(pattern, layer) for pattern in self.ignore):
            return None
        ranked = [
            (_rank_match(target, layer), group.weights)
            for group in self.config_groups.values()
            for target in group.targets
        ]
        rank, weights = max(ranked, key=lambda pair: pair[0], default=(0, None))  # of equal ranks the first wins
        return weights if rank else None

    def scheme(self, layer: str) -> Scheme | None:
        weights = self.find_weights(layer)
        if weights is None:
            return None
        group_size = weights.inputs_per_group
        return Scheme(weights.num_bits, group_size, permuted=weights.has_group_indices and group_size != -1)

    def _require_quantized(self, layer: str) -> tuple[Weights, Scheme]:
        weights, scheme = self.find_weights(layer), self.scheme(layer)
        if weights is None or scheme is None:
            raise make_dense_layer_error(layer)
        return weights, scheme

    def check(self, layer: str, outputs: int, inputs: int) -> None:
        scheme = self.scheme(layer)
        if scheme is not None:
            scheme.check_inputs(layer, inputs)

    def read(self, checkpoint: Checkpoint, layer: str, outputs: int, inputs: int) -> QuantizedWeight:
        weights, scheme = self._require_quantized(layer)
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

    def encode(self, layer: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        weights, scheme = self._require_quantized(layer)
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


def _rank_match(pattern: str, layer: str) -> int:
    """How a target matches a layer: 3 by name, 2 by a pattern, 1 by its class, 0 not at all."""
    if pattern.startswith("re:"):
        return 2 if re.match(pattern.removeprefix("re:"), layer) else 0
    return 3 if pattern == layer else int(pattern == _CLASS)
