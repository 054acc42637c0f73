"""What a quantization method is: one function from a decoder layer, and what it is shown of its use, to codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from tkernels.quantized.weight import QuantizedWeight
from tmodel.formats import QuantizationFormat
from tmodel.quantization import LinearShape
from tmodel.quantizers.layers import TransformersLayers, Weights

Walk = Literal["none", "forward", "backward"]


@dataclass(frozen=True)
class Layer:
    """One decoder layer, dense, and what the walk over the model brings to it.

    Attributes:
        index: which layer it is.
        groups: its linears in the order of computation, those of a shape sharing one input; see layers.layer_groups.
        weights: by the names of layers.Weights, float32.
        dtype: of the checkpoint, which the tensors that stay dense keep.
        layers: computes it; None where the method's walk is "none", as are the two below.
        hidden: [n, S, H], the layer's input in the calibration windows.
        gradient: [n, S, H], of each window's loss by the layer's output; only where the walk is "backward".
    """

    index: int
    groups: Sequence[LinearShape]
    weights: Weights
    dtype: torch.dtype
    layers: TransformersLayers | None = None
    hidden: torch.Tensor | None = None
    gradient: torch.Tensor | None = None

    def in_use(self) -> tuple[TransformersLayers, torch.Tensor]:
        """What computes the layer, and its input; of a method that walks."""
        assert self.layers is not None, "a method without a walk calibrates nothing"
        assert self.hidden is not None, "a walk brings each layer's input"
        return self.layers, self.hidden


@dataclass(frozen=True)
class QuantizedLayer:
    """What became of a layer.

    Attributes:
        linears: every linear of its groups, by name.
        changed: tensors that stay dense and have new values.
        carry: [n, S, H], what the next layer of the walk gets, the one after or the one before; None where the walk is
            "none".
    """

    linears: Mapping[str, QuantizedWeight]
    changed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    carry: torch.Tensor | None = None


@dataclass(frozen=True)
class Method:
    """How codes are chosen, and what they are written as.

    Attributes:
        name: as it is asked for.
        bits: those that it can write.
        format: (bits, group size) -> the format of its checkpoints.
        grouped: whether it takes a group size other than -1.
        walk: the order of the layers; "forward" is from the first to the last, with hidden states, "backward" from the
            last to the first, with gradients too.
        quantize: (layer, bits, group size) -> what becomes of the layer.
    """

    name: str
    bits: tuple[int, ...]
    format: Callable[[int, int], QuantizationFormat]
    grouped: bool
    walk: Walk
    quantize: Callable[[Layer, int, int], QuantizedLayer]
