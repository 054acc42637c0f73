"""MXFP4 as gpt-oss has it: experts' weights as 4-bit floats, with a power of two for every 32 inputs.

    <layer>_blocks [E, N, K / 32, 16] uint8   two e2m1 codes a byte, the one of the even input below
    <layer>_scales [E, N, K / 32]     uint8   the exponent of a power of two, plus 127 (E8M0)

Only experts are quantized. Source: Open Compute Project, Microscaling Formats (MX) Specification 1.0, 2023, section
5.4; transformers' `Mxfp4Config`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, field_validator

from tkernels.quantized.weight import QuantizedWeight, sequential
from tmodel.formats.base import Scheme, check_scheme, make_dense_layer_error
from tmodel.formats.patterns import find_match, find_pattern_fault
from tmodel.weights import Checkpoint

_BLOCK = 32
"""Inputs that share an exponent."""
_BIAS = 127
_NAN = 255
_SCHEME = Scheme(4, _BLOCK, "e2m1")


class MXFP4(BaseModel):
    """The settings that decide what is decoded.

    Attributes:
        modules_to_not_convert: Regular expressions, each of which matches the beginning of dense layers' names.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    method: ClassVar[str] = "mxfp4"

    modules_to_not_convert: list[str] | None = None

    @field_validator("modules_to_not_convert")
    @classmethod
    def _check_patterns(cls, patterns: list[str] | None) -> list[str] | None:
        for pattern in patterns or ():
            if (fault := find_pattern_fault(pattern)) is not None:
                raise ValueError(f"{pattern[:80]!r}: {fault}")
        return patterns

    def scheme(self, layer: str) -> Scheme | None:
        if ".experts." not in layer:
            return None
        listed = find_match(self.modules_to_not_convert or (), layer, "modules_to_not_convert")
        return _SCHEME if listed is None else None

    def check(self, layer: str, scheme: Any, outputs: int, inputs: int) -> None:
        scheme.check_inputs(layer, inputs)

    def read(self, checkpoint: Checkpoint, layer: str, outputs: int, inputs: int) -> QuantizedWeight:
        """Reads a layer that is stored alone, without the dim of experts."""
        (weight,) = self._read(checkpoint, layer, (), outputs, inputs)
        return weight

    def read_experts(
        self, checkpoint: Checkpoint, layer: str, num_experts: int, outputs: int, inputs: int
    ) -> Iterator[QuantizedWeight]:
        yield from self._read(checkpoint, layer, (num_experts,), outputs, inputs)

    def _read(
        self, checkpoint: Checkpoint, layer: str, leading: tuple[int, ...], outputs: int, inputs: int
    ) -> Iterator[QuantizedWeight]:
        if self.scheme(layer) is None:
            raise make_dense_layer_error(layer)
        groups, experts = inputs // _BLOCK, "E, " if leading else ""
        shapes = {"blocks": (*leading, outputs, groups, _BLOCK // 2), "scales": (*leading, outputs, groups)}
        layouts = {"blocks": f"[{experts}N, K / 32, 16]", "scales": f"[{experts}N, K / 32]"}
        blocks, exponents = (
            checkpoint.raw(f"{layer}_{part}", shape, (torch.uint8,), f"where {layouts[part]} = {{}} is expected")
            for part, shape in shapes.items()
        )
        wrong = exponents == _NAN
        if bool(wrong.any()):
            raise checkpoint.error(f"{layer}_scales", f"has a NaN (255) at {wrong.nonzero()[0].tolist()}")
        yield from map(_decoded, blocks.view(-1, outputs, inputs // 2), exponents.view(-1, outputs, groups))

    def encode(self, layer: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        scheme = self.scheme(layer)
        if scheme is None:
            raise make_dense_layer_error(layer)
        check_scheme(weight, layer, scheme)
        assert weight.scales is not None, "of this coding"
        mantissas, exponents = torch.frexp(weight.scales.t().float())  # [N, K / 32], of a power of two 0.5 and one more
        if not bool((mantissas == 0.5).all()):
            raise ValueError(f"{layer}: its scales are not all powers of two, which alone the format holds")
        blocks = sequential(weight).packed.t().contiguous().view(torch.uint8)  # [N, K / 2]
        codes = exponents + _BIAS - 1
        return {"blocks": blocks.unflatten(1, (-1, _BLOCK // 2)), "scales": codes.to(torch.uint8)}

    def config(self) -> dict[str, Any]:
        return {"quant_method": self.method, **self.model_dump()}


def _decoded(blocks: torch.Tensor, exponents: torch.Tensor) -> QuantizedWeight:
    """An expert's weight of bytes [N, K / 2] and exponents [N, K / 32]."""
    words = blocks.contiguous().view(torch.int32)  # [N, K / 8], the first code in the lowest bits
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - _BIAS)  # [N, K / 32]
    return QuantizedWeight(words.t().contiguous(), scales.t().contiguous(), None, 4, _BLOCK, e2m1=True)
