"""fp8 as DeepSeek, Qwen3-FP8 and transformers write it, with a scale for each block or for each layer.

    weight           [N, K] e4m3
    weight_scale_inv [ceil(N / 128), K / 128]   W[n, k] = code * scale of its block, where weight_block_size is given;
                     [1] or []                  W[n, k] = code * scale, where it is not
    activation_scale [1] or []                  only where activation_scheme is "static"

The name says that the scale is what codes are multiplied by. AutoFP8 calls it weight_scale and the other input_scale.
Source: DeepSeek-AI, DeepSeek-V3, 2024, section 3.3.2.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from tkernels.quantized.row_codes import BLOCK
from tkernels.quantized.scaled_weight import ScaledWeight
from tmodel.formats.base import ScaledScheme, make_dense_layer_error
from tmodel.formats.patterns import find_match, find_pattern_fault
from tmodel.formats.scaled import check_scaled, make_weight, read_codes, read_input_scale, read_scales
from tmodel.weights import Checkpoint

_HEAD = "lm_head"
"""Dense whether or not it is listed: vLLM and SGLang never quantize it, and lists made for them leave it out."""


class FP8(BaseModel):
    """The settings that decide what is decoded.

    Attributes:
        activation_scheme: "dynamic": inputs find their scales, each 128 of a token its own, or each token; "static":
            one for all tokens is stored.
        weight_block_size: [128, 128], or None: a layer has one scale.
        fmt: Of the codes, by one of its two names.
        scale_fmt: Of scales in memory; "ue8m0", powers of two, is not supported.
        modules_to_not_convert: Regular expressions of dense layers; one matches a name from its beginning to its end or
            to a dot, or is the name's end. The head is dense anyway.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    method: ClassVar[str] = "fp8"

    activation_scheme: Literal["dynamic", "static"]
    weight_block_size: list[int] | None = None
    fmt: Literal["e4m3", "float8_e4m3fn"] | None = None
    scale_fmt: Literal["float"] | None = None
    modules_to_not_convert: list[str] | None = Field(
        default=None, validation_alias=AliasChoices("modules_to_not_convert", "ignored_layers")
    )

    @field_validator("weight_block_size")
    @classmethod
    def _check_block_size(cls, size: list[int] | None) -> list[int] | None:
        if size not in (None, [BLOCK, BLOCK]):
            raise ValueError(f"blocks of {size} are not supported; [{BLOCK}, {BLOCK}] are, and null: one for a layer")
        return size

    @model_validator(mode="after")
    def _check_static_and_patterns(self) -> FP8:
        if self.activation_scheme == "static" and self.weight_block_size is not None:
            raise ValueError("activation_scheme: 'static' is supported without weight_block_size; with it 'dynamic' is")
        patterns = tuple(self.modules_to_not_convert or ())
        for pattern, within in zip(patterns, _within(patterns), strict=True):
            if (fault := find_pattern_fault(pattern) or find_pattern_fault(within)) is not None:
                raise ValueError(f"modules_to_not_convert: {pattern[:80]!r}: {fault}")
        return self

    def scheme(self, layer: str) -> ScaledScheme | None:
        patterns = tuple(self.modules_to_not_convert or ())
        if layer == _HEAD or layer.endswith(patterns):
            return None
        if find_match(_within(patterns), layer, "modules_to_not_convert") is not None:
            return None
        return ScaledScheme("float8_e4m3fn", self.weight_block_size is not None, self.activation_scheme == "static")

    def check(self, layer: str, scheme: Any, outputs: int, inputs: int) -> None:
        scheme.check_inputs(layer, inputs)

    def _require_quantized(self, layer: str) -> ScaledScheme:
        scheme = self.scheme(layer)
        if scheme is None:
            raise make_dense_layer_error(layer)
        return scheme

    def read(self, checkpoint: Checkpoint, layer: str, outputs: int, inputs: int) -> ScaledWeight:
        scheme = self._require_quantized(layer)
        codes = read_codes(checkpoint, f"{layer}.weight", (outputs, inputs), scheme)
        name = _first_present(checkpoint, layer, "weight_scale_inv", "weight_scale")
        if scheme.blocked:
            shape = (-(-outputs // BLOCK), inputs // BLOCK)
            scales = read_scales(checkpoint, name, shape, f"[ceil(N / {BLOCK}), K / {BLOCK}]")
        else:
            scales = read_scales(checkpoint, name, (1,), "[1]")
        input_scale = None
        if scheme.static:
            input_scale = read_input_scale(
                checkpoint, _first_present(checkpoint, layer, "activation_scale", "input_scale")
            )
        return make_weight(scheme, codes, scales, input_scale)

    def encode(self, layer: str, weight: ScaledWeight) -> dict[str, torch.Tensor]:
        scheme = self._require_quantized(layer)
        check_scaled(layer, weight, scheme)
        scales = weight.scales
        if not scheme.blocked:
            if not bool((scales == scales[0]).all()):
                raise ValueError(f"{layer}: its outputs have scales of their own, but the format holds one for all")
            scales = scales[0].clone()
        tensors = {"weight": weight.values, "weight_scale_inv": scales}
        return tensors if weight.input_scale is None else {**tensors, "activation_scale": weight.input_scale[0].clone()}

    def config(self) -> dict[str, Any]:
        return {"quant_method": self.method, **self.model_dump()}


@lru_cache
def _within(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """For each pattern what matches the names that it matches, and names below these."""
    return tuple(rf"(?:{pattern})(?:$|\.|(?<=\.))" for pattern in patterns)


def _first_present(checkpoint: Checkpoint, layer: str, *names: str) -> str:
    """The tensor of `layer` under the first of `names` that the checkpoint has; under the first where it has none."""
    return next((f"{layer}.{name}" for name in names if f"{layer}.{name}" in checkpoint), f"{layer}.{names[0]}")
