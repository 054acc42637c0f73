"""What a quantization method is: one function from a decoder layer, and what it is shown of its use, to codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from tkernels.quantized.weight import QuantizedWeight
from tmodel.formats import QuantizationFormat
from tmodel.quantizers.decoder import Decoder

Walk = Literal["none", "forward", "backward"]


@dataclass(frozen=True)
class Layer:
    """One decoder layer, dense, and what the walk over the model brings to it.

    weights: by the names of decoder.Weights, float32. dtype: of the checkpoint, which the tensors that stay dense keep.
    hidden: [n, S, H], the layer's input in the calibration windows; None where the method's walk is "none".
    gradient: [n, S, H], of each window's loss by the layer's output; only where the walk is "backward".
    """

    index: int
    weights: Mapping[str, torch.Tensor]
    decoder: Decoder
    dtype: torch.dtype
    hidden: torch.Tensor | None = None
    gradient: torch.Tensor | None = None


@dataclass(frozen=True)
class QuantizedLayer:
    """linears: by the names of decoder.LINEARS. changed: tensors that stay dense and have new values. carry: [n, S, H],
    what the next layer of the walk gets, the one after or the one before; None where the walk is "none".
    """

    linears: Mapping[str, QuantizedWeight]
    changed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    carry: torch.Tensor | None = None


@dataclass(frozen=True)
class Method:
    """How codes are chosen, and what they are written as.

    bits: those that it can write. format(bits, group_size): that of its checkpoints. grouped: whether it takes a group
    size other than -1. walk: the order of the layers; "forward" is from the first to the last, with hidden states,
    "backward" from the last to the first, with gradients too. quantize(layer, bits, group_size).
    """

    name: str
    bits: tuple[int, ...]
    format: Callable[[int, int], QuantizationFormat]
    grouped: bool
    walk: Walk
    quantize: Callable[[Layer, int, int], QuantizedLayer]
