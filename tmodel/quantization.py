"""Which linear layers of a model are quantized, and at which axes kernels are called: known before weights are read."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch

from tkernels.contract import Value
from tkernels.quantized.weight import Coding
from tkernels.variant import AxisRanges
from tmodel.formats.base import QuantizationFormat, ScaledScheme, Scheme
from tmodel.json_files import ConfigError

_MAX_SECONDS = 20
"""For the names of all layers. The 36,000 of Qwen3-235B-A22B take one with the 283 expressions of its published fp8;
more is taken by expressions of which each takes milliseconds for a name."""


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
    """Linear layers with one input, computed as one: query, key and value; gate and up. Most stand alone. So do a
    layer's experts: their gates and ups, or their downs.

    Attributes:
        names: The beginning of their tensors' names, "model.layers.0.mlp.down_proj".
        outputs: N of each.
        inputs: K of all.
        bias: Whether all have one; else none has.
        transposed: Whether a dense weight is stored [K, N], as those of GPT-2 are; such a layer stands alone.
        gated: They are the gate and up projections of a SwiGLU.
        gelu: Which gelu follows, by the error function or by tanh; None is none.
        num_experts: The experts that they are of, one after the other; 0: of none.
        stacked: Whether it is one linear of every expert: a dense weight is stored [E, K, N], a bias [E, N], and the
            outputs of gate and up take turns.
        fed_by: The layer that can take the inverse of a scale of the inputs, which AWQ needs; None where none can.
    """

    names: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int
    bias: bool = False
    transposed: bool = False
    gated: bool = False
    gelu: Literal["erf", "tanh"] | None = None
    num_experts: int = 0
    stacked: bool = False
    fed_by: Feed | None = None

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Tensor name -> shape as it is stored, of the dense weights and biases [N]."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, outputs in zip(self.names, self.outputs, strict=True):
            if self.stacked:
                shapes[name] = (self.num_experts, self.inputs, outputs)
                if self.bias:
                    shapes[f"{name}_bias"] = (self.num_experts, outputs)
                continue
            shapes[f"{name}.weight"] = (self.inputs, outputs) if self.transposed else (outputs, self.inputs)
            if self.bias:
                shapes[f"{name}.bias"] = (outputs,)
        return shapes

    @property
    def num_weights(self) -> int:
        """Of all of them."""
        return sum(self.outputs) * self.inputs * (self.num_experts if self.stacked else 1)

    def title(self, start: int, stop: int) -> str:
        """The parts `start` to `stop` by the last word of their names: "q_proj+k_proj+v_proj"."""
        return "+".join(name.rpartition(".")[2] for name in self.names[start:stop])


@dataclass(frozen=True)
class Quantization:
    """A checkpoint's format, and the layers of the model that it is asked about.

    `cache_dtype` is that of keys and values where the checkpoint has scales of its own for them; None is the model's.

    Raises ConfigError, naming the layer and the rule, where a layer is of a size that its scheme cannot hold, or where
    the architecture names no layers that could be quantized.
    """

    format: QuantizationFormat
    linears: tuple[LinearShape, ...]
    cache_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not self.linears:
            raise ConfigError("quantization_config: quantized models of this architecture are not supported")
        for shape in self.linears:
            for name, outputs in zip(shape.names, shape.outputs, strict=True):
                if (scheme := self.scheme(name)) is not None:
                    self.format.check(name, scheme, outputs, shape.inputs)
            if shape.num_experts:
                self._check_experts(shape)
        for gate_up, down in pairwise(self.linears):
            (gate, *_), (first, *_) = gate_up.names, down.names
            is_mixture = gate_up.gated and gate_up.num_experts > 0
            if is_mixture and _kind_of_codes(self.scheme(gate)) != _kind_of_codes(self.scheme(first)):
                raise self._make_unlike_error(gate, first, "in codes of one kind and size")

    def _check_experts(self, shape: LinearShape) -> None:
        """Checks that a layer's experts can be one weight."""
        first, scheme = shape.names[0], self.scheme(shape.names[0])
        for name in shape.names:
            if self.scheme(name) != scheme:
                raise self._make_unlike_error(first, name, "alike")
        if isinstance(scheme, ScaledScheme) and not scheme.takes_any_inputs:
            raise ConfigError(
                f"{first}: experts whose inputs are quantized too ({scheme.codes}) are not supported; those whose "
                "weights alone are, in 2, 3, 4 or 8 bits, are, and float8_e4m3fn with a scale for each block of 128 x "
                "128 and none of the inputs that is stored"
            )
        if isinstance(scheme, Scheme) and (scheme.coding == "lookup" or scheme.sparse):
            raise ConfigError(f"{first}: experts whose codes have a table or outliers are not supported")
        if scheme is not None and shape.stacked != (isinstance(scheme, Scheme) and scheme.coding == "e2m1"):
            stored = "in one tensor" if shape.stacked else "one by one"
            raise ConfigError(
                f"{first}: experts that are stored {stored} as {scheme} are not supported; mxfp4 is where they are in "
                "one, the other methods where they are not"
            )

    def _make_unlike_error(self, one: str, other: str, how: str) -> ConfigError:
        """The error for two linears of experts; `how` they must be stored."""
        return ConfigError(
            f"{other} is stored as {self.scheme(other) or 'dense'}, but {one} as {self.scheme(one) or 'dense'}; all "
            f"experts of a layer must be stored {how}"
        )

    @cached_property
    def _schemes(self) -> dict[str, Scheme | ScaledScheme | None]:
        """Of each layer that the architecture lists; a config's expressions may make one take long."""
        begun, schemes = time.process_time(), {}
        for name in (name for shape in self.linears for name in shape.names):
            schemes[name] = self.format.scheme(name)
            if time.process_time() - begun > _MAX_SECONDS:
                raise ConfigError(
                    f"quantization_config: {len(schemes)} layers' names took {_MAX_SECONDS} s to match with its "
                    "regular expressions; those whose repeats are not nested take microseconds"
                )
        return schemes

    def scheme(self, name: str) -> Scheme | ScaledScheme | None:
        """How layer `name` is stored; None is dense. A layer that the architecture does not list is dense."""
        return self._schemes.get(name)

    def schemes(self, shape: LinearShape) -> list[Scheme | ScaledScheme | None]:
        """How each part of `shape` is stored; None is dense."""
        return [self.scheme(name) for name in shape.names]

    def is_dense(self, shape: LinearShape) -> bool:
        """Whether no part of `shape` is quantized."""
        return not any(self.schemes(shape))

    @property
    def added_bytes(self) -> int:
        """The most bytes that weights take in memory beyond those in the checkpoint: zero-points, which a checkpoint
        packs, are int16, scales of 8-bit codes are float32, and exponents, of a byte each, are 16-bit scales.
        """
        return sum(
            _added_bytes(scheme, outputs, shape.inputs) * (shape.num_experts if shape.stacked else 1)
            for shape in self.linears
            for scheme, outputs in zip(self.schemes(shape), shape.outputs, strict=True)
        )

    def kernel_axes(self, tokens: tuple[int, int]) -> dict[str, tuple[AxisRanges, ...]]:
        """The ops that quantized layers call, and the axes that they are called at.

        Args:
            tokens: The fewest and the most tokens of a call.

        Returns:
            Op -> for each kind of weight, axis -> its value or (lowest, highest).
        """
        outputs: dict[tuple[Scheme | ScaledScheme, int, bool], tuple[int, int]] = {}
        for shape in (one for one in self.linears if not one.num_experts):
            # Parts that are quantized alike become one weight, so N is anything from one part's outputs to all parts'.
            for scheme, part in zip(self.schemes(shape), shape.outputs, strict=True):
                if scheme is not None:
                    key = scheme, shape.inputs, shape.bias
                    low, high = outputs.get(key, (part, part))
                    outputs[key] = min(low, part), max(high, sum(shape.outputs))
        ways: dict[str, list[AxisRanges]] = {}
        for (scheme, inputs, bias), span in outputs.items():
            sizes: dict[str, Value | tuple[int, int]] = {"M": tokens, "N": span, "K": inputs, "bias": bias}
            ops = _scaled_ops(scheme, sizes) if isinstance(scheme, ScaledScheme) else _dequant_ops(scheme, sizes)
            for op, axes in ops.items():
                if axes not in ways.setdefault(op, []):
                    ways[op].append(axes)
        return {op: tuple(found) for op, found in ways.items()}


def fuses_swiglu(shape: LinearShape, quantization: Quantization | None) -> bool:
    """Whether one kernel computes the projections of `shape` and their SwiGLU: weights are dense and without bias."""
    return (
        shape.gated
        and not shape.num_experts
        and not shape.bias
        and (quantization is None or quantization.is_dense(shape))
    )


def fuses_gelu(shape: LinearShape, quantization: Quantization | None) -> bool:
    """Whether one kernel computes the projection of `shape` and the gelu that follows: the weight is dense."""
    return shape.gelu is not None and (quantization is None or quantization.is_dense(shape))


def _kind_of_codes(scheme: Scheme | ScaledScheme | None) -> Any:
    """What gates and ups must share with downs."""
    return (scheme.bits, scheme.coding) if isinstance(scheme, Scheme) else scheme


def count_weight_bytes(shape: LinearShape, quantization: Quantization | None, element_bytes: int) -> int:
    """The bytes of the weights of `shape` in memory, biases aside; dense ones have elements of `element_bytes`."""
    stored = [None] * len(shape.names) if quantization is None else quantization.schemes(shape)
    each = sum(
        element_bytes * outputs * shape.inputs if scheme is None else scheme.weight_bytes(outputs, shape.inputs)
        for scheme, outputs in zip(stored, shape.outputs, strict=True)
    )
    return each * (shape.num_experts if shape.stacked else 1)


def _added_bytes(scheme: Scheme | ScaledScheme | None, outputs: int, inputs: int) -> int:
    if isinstance(scheme, ScaledScheme):
        return 4 * scheme.num_scales(outputs, inputs)
    if scheme is None or scheme.coding == "lookup":
        return 0
    return (2 if scheme.coding == "uniform" else 1) * outputs * scheme.num_groups(inputs)


def _dequant_ops(scheme: Scheme, sizes: AxisRanges) -> dict[str, AxisRanges]:
    axes = {"coding": scheme.coding, "sparse": (False, True) if scheme.sparse else False}
    return {"dequant_gemm": {**sizes, **axes, **coding_axes(scheme, sizes["K"])}}


def coding_axes(scheme: Scheme, inputs: Value | tuple[int, int]) -> dict[str, Value | tuple[int, int]]:
    """The axes of a weight that is stored in `scheme`, with `inputs` inputs."""
    symmetric: dict[Coding, Value | tuple[int, int]] = {"uniform": (False, True), "e2m1": True, "lookup": False}
    return {
        "padding": 0,
        "bits": scheme.bits,
        "group_size": inputs if scheme.group_size == -1 else scheme.group_size,
        # Only the tensors tell these, so both values are possible.
        "symmetric": symmetric[scheme.coding],
        "permuted": (False, True) if scheme.permuted else False,
    }


def _scaled_ops(scheme: ScaledScheme, sizes: AxisRanges) -> dict[str, AxisRanges]:
    inputs = {name: sizes[name] for name in ("M", "K")}
    if scheme.blocked:
        return {"quantize_groups": inputs, "block_scaled_matmul": {**sizes, "codes": scheme.codes}}
    return {
        "quantize_tokens": {**inputs, "codes": scheme.codes, "static_scale": scheme.static},
        "scaled_matmul": {**sizes, "codes": scheme.codes},
    }
