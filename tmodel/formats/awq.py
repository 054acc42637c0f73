"""AWQ, version "gemm", as AutoAWQ writes it: Lin et al., 2024, "AWQ".

    qweight [K, N / 8] int32   4-bit codes along N
    qzeros  [G, N / 8] int32   zero-points along N, as they are
    scales  [G, N]             W[n, k] = (code - zero) * scale of group k // group_size

AutoAWQ interleaves the eight codes of a word: nibble i, from the lowest, holds column _COLUMNS[i].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from tkernels.quantized.codes import pack, unpack
from tkernels.quantized.slicing import zeros_of
from tkernels.quantized.weight import QuantizedWeight, unpack_codes
from tmodel.formats.base import (
    Scheme,
    check_bits,
    check_group_size,
    check_scheme,
    check_zeros_fit,
    drop_symmetric_zeros,
    make_dense_layer_error,
    pack_by_parts,
    read_values,
    read_words,
    refuse_adapter,
)
from tmodel.formats.overrides import Dynamic, check_dynamic, find_override, override
from tmodel.json_files import ConfigError
from tmodel.weights import Checkpoint

_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]
_NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]
"""The nibble that holds each column."""
_OVERRIDES = ("bits", "group_size", "zero_point", "pack_dtype")


class AWQ(BaseModel):
    """The settings that decide what is decoded. AutoAWQ's own quant_config.json names some otherwise (w_bit).

    Attributes:
        bits: Of a code; 4.
        group_size: Inputs that share a scale; -1 is all.
        version: The packing, by AutoAWQ's name of the setting; "gemm".
        format: The same by transformers' name.
        checkpoint_format: The same by GPTQModel's name.
        zero_point: Whether weights are asymmetric. Where false, stored zero-points must be those of a symmetric weight.
        modules_to_not_convert: Parts of names; a layer whose name contains one is dense.
        lm_head: Whether the head is quantized too.
        dynamic: What differs from layer to layer, see `overrides`; GPTQModel writes sym there for zero_point.
        pack_dtype: "int32".
        adapter: None; a LoRA that GPTQModel keeps beside the weights is not applied.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    method: ClassVar[str] = "awq"

    bits: int = Field(validation_alias=AliasChoices("bits", "w_bit"))
    group_size: int = Field(validation_alias=AliasChoices("group_size", "q_group_size"))
    version: str = "gemm"
    format: None = None
    checkpoint_format: None = None
    zero_point: bool = True
    modules_to_not_convert: list[str] | None = None
    lm_head: bool = False
    dynamic: Dynamic | None = None
    pack_dtype: Literal["int32"] = "int32"
    adapter: None = None

    @field_validator("bits", mode="before")
    @classmethod
    def _check_bits(cls, bits: Any) -> int:
        return check_bits(bits, (4,))

    @field_validator("version", "format", "checkpoint_format", mode="before")
    @classmethod
    def _check_packing(cls, name: Any, info: ValidationInfo) -> str | None:
        is_version = info.field_name == "version"
        if (name is not None or is_version) and str(name).lower() != "gemm":
            raise ValueError(f"the packing of {info.field_name} {name!r} is not supported; 'gemm' is")
        return "gemm" if is_version else None

    @field_validator("adapter", mode="before")
    @classmethod
    def _check_adapter(cls, adapter: Any) -> None:
        refuse_adapter(adapter)

    @model_validator(mode="after")
    def _check_groups_and_overrides(self) -> AWQ:
        check_group_size(self.group_size, self.bits)
        check_dynamic(self.dynamic, self._apply_overrides)
        return self

    def _apply_overrides(self, overrides: Mapping[str, Any]) -> AWQ:
        # Stored zero-points are read whatever sym says; where it is false they may differ from the middle.
        by_sym = {"zero_point": True} if overrides.get("sym") is False else {}
        rest = {key: value for key, value in overrides.items() if key != "sym"}
        return override(self, {**by_sym, **rest}, _OVERRIDES)

    def find_settings(self, layer: str) -> AWQ | None:
        """The settings of one layer with overrides applied; None where it is dense."""
        if layer == "lm_head" and not self.lm_head:
            return None
        if any(part in layer for part in self.modules_to_not_convert or ()):
            return None
        found = find_override(self.dynamic, layer)
        if found is None:
            return self
        is_dense, overrides = found
        return None if is_dense else self._apply_overrides(overrides)

    def scheme(self, layer: str) -> Scheme | None:
        settings = self.find_settings(layer)
        return None if settings is None else Scheme(settings.bits, settings.group_size)

    def _require_quantized(self, layer: str) -> tuple[AWQ, Scheme]:
        settings, scheme = self.find_settings(layer), self.scheme(layer)
        if settings is None or scheme is None:
            raise make_dense_layer_error(layer)
        return settings, scheme

    def check(self, layer: str, scheme: Any, outputs: int, inputs: int) -> None:
        scheme.check_inputs(layer, inputs)
        if outputs % 8:
            raise ConfigError(f"{layer}: {outputs} outputs do not fill whole words of 8 codes")

    def read(self, checkpoint: Checkpoint, layer: str, outputs: int, inputs: int) -> QuantizedWeight:
        settings, scheme = self._require_quantized(layer)
        groups = scheme.num_groups(inputs)
        words = read_words(checkpoint, f"{layer}.qweight", (inputs, outputs // 8), "[K, N / 8]")
        scales = read_values(checkpoint, f"{layer}.scales", (groups, outputs), "[K / group_size, N]")
        if not settings.zero_point and f"{layer}.qzeros" not in checkpoint:
            zeros = None
        else:
            stored = read_words(checkpoint, f"{layer}.qzeros", (groups, outputs // 8), "[K / group_size, N / 8]")
            zeros = drop_symmetric_zeros(_unpack_interleaved(stored), 4)
        if zeros is not None and not settings.zero_point:
            raise checkpoint.error(
                f"{layer}.qzeros",
                f"holds zero-points from {int(zeros.min())} to {int(zeros.max())}, but zero_point is false: all must "
                "be 8, or the tensor absent",
            )
        packed, _ = pack_by_parts(
            lambda part: _unpack_interleaved(words[:, part.start // 8 : part.stop // 8]), outputs, self.bits
        )
        return QuantizedWeight(packed, scales, zeros, self.bits, inputs // groups)

    def encode(self, layer: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        scheme, zeros = self._require_quantized(layer)[1], zeros_of(weight)
        check_scheme(weight, layer, scheme)
        check_zeros_fit(layer, zeros, 4)
        assert weight.scales is not None, "the scheme is uniform"
        return {
            "qweight": _pack_interleaved(unpack_codes(weight)),
            "qzeros": _pack_interleaved(zeros),
            "scales": weight.scales,
        }

    def config(self) -> dict[str, Any]:
        return {"quant_method": self.method, **self.model_dump(exclude_none=True)}


def _unpack_interleaved(words: torch.Tensor) -> torch.Tensor:
    """Words [rows, N / 8] int32 -> codes [rows, N] uint8, in the order of the columns."""
    return unpack(words, 1).unflatten(1, (-1, 8))[..., _NIBBLES].flatten(1)


def _pack_interleaved(codes: torch.Tensor) -> torch.Tensor:
    """Codes [rows, N] -> words [rows, N / 8] int32, interleaved as AutoAWQ reads them."""
    return pack(codes.unflatten(1, (-1, 8))[..., _COLUMNS].flatten(1), 1)
