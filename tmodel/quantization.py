"""Which linear layers of a model are quantized, and at which axes kernels are called: known before weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tkernels.contract import Value
from tkernels.variant import AxisRanges
from tmodel.formats.base import QuantizationFormat, Scheme
from tmodel.json_files import ConfigError


@dataclass(frozen=True)
class Feed:
    """The norm or linear layer whose output channels become a linear layer's inputs, through nothing but products.

    Nothing else reads these channels. So dividing its rows and multiplying the inputs by the same numbers cancels out.

    Attributes:
        name: The beginning of its tensors' names, "model.layers.0.mlp.up_proj".
        rows: The rows of its weight and bias that compute the inputs, run by run in the inputs' order; one row may
            compute several inputs. Empty: row i computes input i.
    """

    name: str
    rows: tuple[range, ...] = ()


@dataclass(frozen=True)
class LinearShape:
    """Linear layers with one input, computed as one: query, key and value; gate and up. Most stand alone.

    Attributes:
        names: The beginning of their tensors' names, "model.layers.0.mlp.down_proj".
        outputs: N of each.
        inputs: K of all.
        bias: Whether all have one; else none has.
        transposed: Whether a dense weight is stored [K, N], as those of GPT-2 are; such a layer stands alone.
        gated: They are the gate and up projections of a SwiGLU.
        gelu: Which gelu follows, by the error function or by tanh; None is none.
        fed_by: The layer that can take the inverse of a scale of the inputs, which AWQ needs; None where none can.
    """

    names: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int
    bias: bool = False
    transposed: bool = False
    gated: bool = False
    gelu: Literal["erf", "tanh"] | None = None
    fed_by: Feed | None = None

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Tensor name -> shape as it is stored, of the dense weights and biases [N]."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, outputs in zip(self.names, self.outputs, strict=True):
            shapes[f"{name}.weight"] = (self.inputs, outputs) if self.transposed else (outputs, self.inputs)
            if self.bias:
                shapes[f"{name}.bias"] = (outputs,)
        return shapes

    def title(self, start: int, stop: int) -> str:
        """The parts `start` to `stop` by the last word of their names: "q_proj+k_proj+v_proj"."""
        return "+".join(name.rpartition(".")[2] for name in self.names[start:stop])


@dataclass(frozen=True)
class Quantization:
    """A checkpoint's format, and the layers of the model that it is asked about.

    Raises ConfigError, naming the layer and the rule, where a layer is of a size that its scheme cannot hold, or where
    the architecture names no layers that could be quantized.
    """

    format: QuantizationFormat
    linears: tuple[LinearShape, ...]

    def __post_init__(self) -> None:
        if not self.linears:
            raise ConfigError("quantization_config: quantized models of this architecture are not supported")
        for shape in self.linears:
            for name, outputs in zip(shape.names, shape.outputs, strict=True):
                if self.format.scheme(name) is not None:
                    self.format.check(name, outputs, shape.inputs)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(name for shape in self.linears for name in shape.names)

    def scheme(self, name: str) -> Scheme | None:
        """How layer `name` is stored; None is dense. A layer that the architecture does not list is dense."""
        return self.format.scheme(name) if name in self._names else None

    def schemes(self, shape: LinearShape) -> list[Scheme | None]:
        """How each part of `shape` is stored; None is dense."""
        return [self.scheme(name) for name in shape.names]

    def is_dense(self, shape: LinearShape) -> bool:
        """Whether no part of `shape` is quantized."""
        return not any(self.schemes(shape))

    @property
    def zeros_bytes(self) -> int:
        """The most bytes that zero-points take in memory, as int16; a checkpoint packs them."""
        return sum(
            2 * outputs * scheme.num_groups(shape.inputs)
            for shape in self.linears
            for scheme, outputs in zip(self.schemes(shape), shape.outputs, strict=True)
            if scheme is not None and scheme.coding == "uniform"
        )

    def kernel_axes(self, tokens: tuple[int, int]) -> tuple[AxisRanges, ...]:
        """The axes that dequant_gemm is called at.

        Args:
            tokens: The fewest and the most tokens of a call.

        Returns:
            For each kind of weight, axis -> its value or (lowest, highest).
        """
        outputs: dict[tuple[Scheme, int, bool], tuple[int, int]] = {}
        for shape in self.linears:
            # Parts that are quantized alike become one weight, so N is anything from one part's outputs to all parts'.
            for scheme, part in zip(self.schemes(shape), shape.outputs, strict=True):
                if scheme is not None:
                    key = scheme, shape.inputs, shape.bias
                    low, high = outputs.get(key, (part, part))
                    outputs[key] = min(low, part), max(high, sum(shape.outputs))
        return tuple(_axes(scheme, inputs, bias, tokens, span) for (scheme, inputs, bias), span in outputs.items())


def fuses_swiglu(shape: LinearShape, quantization: Quantization | None) -> bool:
    """Whether one kernel computes the projections of `shape` and their SwiGLU: weights are dense and without bias."""
    return shape.gated and not shape.bias and (quantization is None or quantization.is_dense(shape))


def fuses_gelu(shape: LinearShape, quantization: Quantization | None) -> bool:
    """Whether one kernel computes the projection of `shape` and the gelu that follows: the weight is dense."""
    return shape.gelu is not None and (quantization is None or quantization.is_dense(shape))


def _axes(scheme: Scheme, inputs: int, bias: bool, tokens: tuple[int, int], outputs: tuple[int, int]) -> AxisRanges:
    axes: dict[str, Value | tuple[int, int]] = {
        "M": tokens,
        "N": outputs,
        "K": inputs,
        "padding": 0,
        "bits": scheme.bits,
        "coding": scheme.coding,
        "group_size": inputs if scheme.group_size == -1 else scheme.group_size,
        # Only the tensors tell these, so both values are possible.
        "symmetric": (False, True) if scheme.coding == "uniform" else False,
        "permuted": (False, True) if scheme.permuted else False,
        "sparse": (False, True) if scheme.sparse else False,
        "bias": bias,
    }
    return axes
