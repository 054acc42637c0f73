"""Which linear layers of a model are quantized, and what that asks of the kernels: known before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass

from tkernels.contract import Value
from tkernels.variant import AxisRanges
from tmodel.config import ConfigError
from tmodel.formats.base import QuantizationFormat, Scheme


@dataclass(frozen=True)
class LinearShape:
    """Linear layers of the same input, computed as one: query, key and value; gate and up; most stand alone.

    names: as the checkpoint's tensors begin ("model.layers.0.mlp.down_proj"). outputs: of each. bias: all have one, or
    none. gated: they are the gate and the up projection of a SwiGLU.
    """

    names: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int
    bias: bool = False
    gated: bool = False

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

    def _schemes(self, shape: LinearShape) -> list[Scheme | None]:
        return [self.format.scheme(name) for name in shape.names]

    def is_dense(self, shape: LinearShape) -> bool:
        """Whether no part of it is quantized."""
        return not any(self._schemes(shape))

    @property
    def gate_ups(self) -> tuple[bool, bool]:
        """(some layer's gate and up are dense both, some other's are not)."""
        dense = {self.is_dense(shape) for shape in self.linears if shape.gated}
        return True in dense, False in dense

    @property
    def zeros_bytes(self) -> int:
        """Of all zero-points as they are kept, at most: int16, where a checkpoint packs them."""
        return sum(
            2 * outputs * scheme.groups(shape.inputs)
            for shape in self.linears
            for scheme, outputs in zip(self._schemes(shape), shape.outputs, strict=True)
            if scheme is not None and scheme.coding == "uniform"
        )

    def kernel_axes(self, tokens: tuple[int, int]) -> tuple[AxisRanges, ...]:
        """What dequant_gemm is called at, by kinds of weights: for each an axis's value, or (low, high)."""
        outputs: dict[tuple[Scheme, int, bool], tuple[int, int]] = {}
        for shape in self.linears:
            # Parts that agree are one weight, so any outputs from one part's to all parts' may come.
            for scheme, part in zip(self._schemes(shape), shape.outputs, strict=True):
                if scheme is not None:
                    key = scheme, shape.inputs, shape.bias
                    low, high = outputs.get(key, (part, part))
                    outputs[key] = min(low, part), max(high, sum(shape.outputs))
        return tuple(_axes(scheme, inputs, bias, tokens, span) for (scheme, inputs, bias), span in outputs.items())


def _axes(scheme: Scheme, inputs: int, bias: bool, tokens: tuple[int, int], outputs: tuple[int, int]) -> AxisRanges:
    axes: dict[str, Value | tuple[int, int]] = {
        "M": tokens,
        "N": outputs,
        "K": inputs,
        "padding": 0,
        "bits": scheme.bits,
        "coding": scheme.coding,
        "group_size": inputs if scheme.group_size == -1 else scheme.group_size,
        # What only the tensors tell may come either way.
        "symmetric": (False, True) if scheme.coding == "uniform" else False,
        "permuted": (False, True) if scheme.permuted else False,
        "sparse": (False, True) if scheme.sparse else False,
        "bias": bias,
    }
    return axes
