"""The gated MLP: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from tmodel.layers import GateUp, JoinedLinear, Linear, SplitGateUp
from tmodel.linear_reader import LinearReader
from tmodel.quantization import Feed, LinearShape


@dataclass(frozen=True)
class GatedMLP:
    """A SwiGLU between two projections of H to I and one back.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.

    Attributes:
        hidden_size: H.
        intermediate_size: I.
        bias: Whether the three projections have one.
    """

    hidden_size: int
    intermediate_size: int
    bias: bool = False

    block: ClassVar[str] = "mlp"
    """What the names of a layer's tensors call it."""

    def routers(self, name: str) -> tuple[()]:
        """None: it is the same for every token."""
        return ()

    def linears(self, name: str, fed_by: Feed) -> tuple[LinearShape, LinearShape]:
        """The joint gate and up projection, whose inputs `fed_by` makes, and the down projection; `name` is the
        MLP's own.
        """
        width = self.intermediate_size
        gate_up = (f"{name}.gate_proj", f"{name}.up_proj")
        up = Feed(f"{name}.up_proj")
        return (
            LinearShape(gate_up, (width, width), self.hidden_size, self.bias, gated=True, fed_by=fed_by),
            LinearShape((f"{name}.down_proj",), (self.hidden_size,), width, self.bias, fed_by=up),
        )

    def build(self, name: str, fed_by: Feed, reader: LinearReader) -> MLPLayer:
        """The layer with its weights out of the checkpoint."""
        gate_up, down = self.linears(name, fed_by)
        return MLPLayer(reader.gate_up(gate_up), reader.linear(down))


@dataclass(frozen=True, slots=True)
class MLPLayer:
    """A layer's gated MLP with its weights."""

    gate_up: GateUp | SplitGateUp  # H -> I
    down: Linear | JoinedLinear  # I -> H

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H] -> [T, H]."""
        return self.down(self.gate_up(hidden))  # [T, H] -> [T, I] -> [T, H]
