"""auto-round's own config over tensors of GPTQ or AWQ (`quant_method: auto-round`).

Source: Cheng et al., 2024, "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs".

    packing_format                                           tensors
    auto_round:auto_gptq, auto_round:gptq, auto              GPTQ's, zero-points as format v1 stores them, no g_idx
    auto_round, auto_round:gptqmodel, :exllamav2, :tritonv2  GPTQ's, zero-points as format v2 stores them, no g_idx
    auto_round:auto_awq, auto_round:awq                      AWQ's, version gemm
    auto_round:fp8                                           those of fp8, and fp8's fields are in the config too

So a config is read as the GPTQ, AWQ or fp8 settings that say the same. In files of 2024 the field is called `backend`,
the method intel/auto-round, and a kernel's name may follow (auto_round:gptq:exllamav2).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from tmodel.formats.awq import AWQ
from tmodel.formats.base import drop_nulls, parse_settings
from tmodel.formats.fp8 import FP8
from tmodel.formats.gptq import GPTQ
from tmodel.formats.overrides import Dynamic
from tmodel.formats.patterns import find_pattern_fault
from tmodel.formats.unsupported import UNSUPPORTED
from tmodel.json_files import ConfigError

Packing = Literal["gptq", "gptq_v2", "awq"]
_PACKINGS: dict[str, Packing] = {
    **dict.fromkeys(("auto_gptq", "gptq", "auto"), "gptq"),
    **dict.fromkeys(("auto_round", "gptqmodel", "exllamav2", "tritonv2"), "gptq_v2"),
    **dict.fromkeys(("auto_awq", "awq"), "awq"),
}
"""The first part of a packing format's name that says something -> whose tensors these are."""

_FP8_PACKING = "auto_round:fp8"

_DENSE_BITS = 16
"""A layer of as many bits is not quantized."""

_FLOATING = {"nv_fp": "nvfp4", "mx_fp": "mxfp4"}
"""The beginning of a data_type -> the format's name."""


class Layers(BaseModel):
    """Which layers are quantized, and how they differ, whatever the tensors are.

    Attributes:
        extra_config: What differs from layer to layer: a layer's name, or a regular expression that is searched in
            names, -> settings. A name wins over an expression, the first expression over later ones; 16 bits are dense.
        blocks: Beginnings of the names of quantized layers; None is all but the head. Others are quantized where
            extra_config names them.
        modules_to_not_convert: Regular expressions that are searched in names of dense layers.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    extra_config: Dynamic | None = None
    blocks: list[str] | None = Field(
        default=None,
        validation_alias=AliasChoices("block_name_to_quantize", "to_quant_block_names", "quant_block_list"),
    )
    modules_to_not_convert: list[str] | None = None

    @field_validator("blocks", mode="before")
    @classmethod
    def _flatten_blocks(cls, given: Any) -> Any:
        """One name, several between commas, or lists of names within a list."""
        if isinstance(given, str):
            return given.split(",")
        nested = given if isinstance(given, list) else [given]
        return [name for part in nested for name in (part if isinstance(part, list) else [part])]

    @model_validator(mode="after")
    def _check_patterns(self) -> Self:
        for pattern in (*(self.extra_config or {}), *(self.modules_to_not_convert or ())):
            if (fault := find_pattern_fault(pattern)) is not None:
                raise ValueError(f"{pattern[:80]!r}: {fault}")
        return self


class EightBits(Layers):
    """The settings of packing format auto_round:fp8; the rest are fp8's own, by fp8's names."""

    bits: Literal[8]
    data_type: Literal["fp"]
    act_bits: Literal[8]

    def as_stored(self, raw: Mapping[str, Any]) -> FP8:
        """The settings of fp8 that `raw`, the whole config, holds.

        Raises:
            ConfigError: They are not supported, or a layer has others.
        """
        dense = [f".*(?:{pattern}).*" for pattern in self.modules_to_not_convert or ()]
        for name, overrides in (self.extra_config or {}).items():
            bits = overrides.get("bits")
            if bits is None or bits < _DENSE_BITS:
                raise ConfigError(
                    f"extra_config[{name!r}]: {_FP8_PACKING!r} is supported where layers differ in being dense, with "
                    f"bits {_DENSE_BITS}; got bits {bits}"
                )
            dense.append(f".*(?:{name}).*")
        if self.blocks is not None:
            dense.append(f"(?!{'|'.join(map(re.escape, self.blocks))}).*")
        return parse_settings(FP8, {**raw, "modules_to_not_convert": dense or None})


class AutoRound(Layers):
    """The settings that decide what is decoded.

    Attributes:
        bits: Of a code.
        group_size: Inputs that share a scale; -1 is all.
        sym: All zero-points are 2**(bits - 1).
        packing: Whose tensors these are, from `packing_format`.
        data_type: "int".
        act_bits: Of activations; more than 8 means that they are not quantized.
    """

    method: ClassVar[str] = "auto-round"
    old_method: ClassVar[str] = "intel/auto-round"

    bits: int
    group_size: int
    sym: bool = True
    packing: Packing = Field(default="gptq", validation_alias=AliasChoices("packing_format", "backend"))
    data_type: str = "int"
    act_bits: int = _DENSE_BITS

    @field_validator("packing", mode="before")
    @classmethod
    def _check_packing(cls, name: Any) -> Packing:
        parts = name.replace("-", "_").split(":") if isinstance(name, str) else []
        said = parts[1] if parts[0:1] == ["auto_round"] and len(parts) > 1 else next(iter(parts), None)
        if said not in _PACKINGS:
            raise ValueError(
                f"{name!r} is not supported; supported are auto_round:auto_gptq, auto_round:gptqmodel, "
                f"auto_round:auto_awq, {_FP8_PACKING} and auto_round"
            )
        return _PACKINGS[said]

    @model_validator(mode="after")
    def _check_layers(self) -> AutoRound:
        _check_types(self.model_dump())
        for name, settings in (self.extra_config or {}).items():
            try:
                _check_types(drop_nulls(settings))
            except ValueError as error:
                raise ValueError(f"extra_config[{name!r}]: {error}") from None
        return self

    def as_stored(self) -> GPTQ | AWQ:
        """The settings of the format whose tensors the checkpoint holds.

        Raises:
            ConfigError: That format does not hold such bits or groups.
        """
        stored: type[GPTQ] | type[AWQ] = AWQ if self.packing == "awq" else GPTQ
        settings = self._name_settings({"bits": self.bits, "group_size": self.group_size, "sym": self.sym})
        head = (self.extra_config or {}).get("lm_head")
        whole = {
            **settings,
            "lm_head": head is not None and not self._is_dense(head),
            **({} if self.packing == "awq" else {"checkpoint_format": self.packing}),
        }
        dynamic: Dynamic = {f"-:.*?(?:{pattern})": {} for pattern in self.modules_to_not_convert or ()}
        for name, overrides in sorted((self.extra_config or {}).items(), key=lambda item: _is_expression(item[0])):
            if self._is_dense(overrides):
                dynamic[f"-:.*?(?:{name})"] = {}
            elif overrides:
                dynamic[f"+:.*?(?:{name})"] = self._name_settings(drop_nulls(overrides))
                try:
                    parse_settings(stored, {**whole, **dynamic[f"+:.*?(?:{name})"]})
                except ConfigError as error:
                    raise ConfigError(f"extra_config[{name!r}]: {error}") from None
        if self.blocks is not None:
            dynamic[f"-:(?!{'|'.join(map(re.escape, [*self.blocks, 'lm_head']))})"] = {}
        return parse_settings(stored, {**whole, "dynamic": dynamic or None})

    def _is_dense(self, overrides: Mapping[str, Any]) -> bool:
        bits = overrides.get("bits")
        return (self.bits if bits is None else bits) >= _DENSE_BITS

    def _name_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What decides, by the stored format's names of it."""
        named = {key: settings[key] for key in ("bits", "group_size", "sym") if key in settings}
        if self.packing == "awq" and "sym" in named:
            named["zero_point"] = not named.pop("sym")
        return named


def parse_auto_round(raw: Mapping[str, Any]) -> GPTQ | AWQ | FP8:
    """Parses the `quantization_config` of auto-round.

    Returns:
        The settings of the format whose tensors the checkpoint holds.

    Raises:
        ConfigError: A setting is missing, wrong or not supported.
    """
    if raw.get("packing_format") == _FP8_PACKING:
        return parse_settings(EightBits, raw).as_stored(raw)
    return parse_settings(AutoRound, raw).as_stored()


def _is_expression(name: str) -> bool:
    """Whether a key of extra_config is no layer's name."""
    return re.fullmatch(r"[\w.-]+", name) is None


def _check_types(settings: Mapping[str, Any]) -> None:
    """Checks that weights are integers, and activations are not quantized.

    Raises:
        ValueError: They are something else.
    """
    bits, data_type, act_bits = (settings.get(key) for key in ("bits", "data_type", "act_bits"))
    if bits is not None and type(bits) is not int:
        raise ValueError(f"bits: must be an integer, got {bits!r}")
    if bits is not None and bits >= _DENSE_BITS:
        return
    for beginning, name in _FLOATING.items():
        if str(data_type).startswith(beginning):
            raise ValueError(f"data_type {data_type!r}: {UNSUPPORTED[name]}")
    if data_type not in (None, "int"):
        raise ValueError(f"data_type {data_type!r} is not supported; 'int' is")
    if act_bits is not None and not (type(act_bits) is int and act_bits > 8):
        raise ValueError(f"act_bits {act_bits!r}: quantized activations are not supported here; 16 are")
