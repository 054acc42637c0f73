"""The interface of a quantization method: one function from a decoder layer and its calibration to codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from tkernels.names import suggest_name
from tkernels.quantized.scaled_weight import ScaledWeight
from tkernels.quantized.weight import QuantizedWeight
from tmodel.formats import QuantizationFormat
from tmodel.formats.base import parse_settings
from tmodel.json_files import ConfigError
from tmodel.quantization import LinearShape
from tmodel.quantizers.layers import TransformersLayers, Weights
from tmodel.quantizers.unfinished import QuantizerError

Walk = Literal["none", "forward", "backward"]


@dataclass(frozen=True)
class Layer:
    """One dense decoder layer, and what the walk over the model brings to it.

    Attributes:
        index: Which layer it is.
        groups: Its linears in the order of computation; the linears of one shape share an input, see
            layers.layer_groups.
        weights: By the names of layers.Weights, float32.
        dtype: Of the checkpoint; tensors that stay dense keep it.
        layers: Computes the layer; None, as the two below, where the method's walk is "none".
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

    def require_calibration(self) -> tuple[TransformersLayers, torch.Tensor]:
        """(what computes the layer, its input [n, S, H]), for a method whose walk is not "none"."""
        assert self.layers is not None, "a method without a walk calibrates nothing"
        assert self.hidden is not None, "a walk brings each layer's input"
        return self.layers, self.hidden


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer after quantization.

    Attributes:
        linears: Every linear of its groups, by name.
        changed: Tensors that stay dense and have new values.
        carry: [n, S, H], what the next layer of the walk gets: hidden states for the layer after in a forward walk,
            gradients for the layer before in a backward walk; None where the walk is "none".
    """

    linears: Mapping[str, QuantizedWeight] | Mapping[str, ScaledWeight]
    changed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    carry: torch.Tensor | None = None


class Options(BaseModel):
    """What a method may be told besides bits and group size. Each method declares its own, and what it does untold."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Method:
    """How codes are chosen, and the format that holds them.

    Attributes:
        name: Of the method, as users type it.
        bits: Sizes of a code that it can write.
        format: (bits, group size) -> the format of its checkpoints.
        grouped: Whether it takes a group size other than -1.
        walk: The order of the layers; "forward" is from the first to the last, with hidden states, "backward" from the
            last to the first, with gradients too.
        quantize: (layer, bits, group size) -> the quantized layer.
        options: What `format` and `quantize` were made with.
        configure: Other options -> the method with these; None where it has none.
    """

    name: str
    bits: tuple[int, ...]
    format: Callable[[int, int], QuantizationFormat]
    grouped: bool
    walk: Walk
    quantize: Callable[[Layer, int, int], QuantizedLayer]
    options: Options = field(default_factory=Options)
    configure: Callable[[Any], Method] | None = None

    def with_options(self, given: Mapping[str, Any]) -> Method:
        """The method with some of its options given by name.

        Raises:
            QuantizerError: It has no such option, or the option no such value; the message lists what there is.
        """
        known = list(type(self.options).model_fields)
        for name in given:
            if name not in known:
                there = f"its options are {', '.join(known)}" if known else "it has no options"
                raise QuantizerError(f"{self.name} has no option {name!r}: {there}{suggest_name(name, known)}")
        if not given or self.configure is None:
            return self
        try:
            return self.configure(parse_settings(type(self.options), {**self.options.model_dump(), **given}))
        except ConfigError as error:
            raise QuantizerError(f"{self.name}'s options: {error}") from None
