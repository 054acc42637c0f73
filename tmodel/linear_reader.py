"""Reads linear layers from a checkpoint, dense or quantized, and prepares each for its kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tkernels import KernelSet, PrepareReport, prepared
from tkernels.launch import Kernel
from tkernels.quantized import scaled_weight, slicing
from tkernels.quantized.scaled_weight import ScaledWeight
from tkernels.quantized.stacked import StackedWeight, stack
from tkernels.quantized.stacked_scaled import StackedScaledWeight, stack_scaled
from tkernels.quantized.weight import QuantizedWeight, dequantize
from tkernels.ranges import Range
from tkernels.variant import Variant, as_it_is
from tmodel.formats.base import ExpertsFormat, QuantizationFormat, ScaledScheme, Scheme
from tmodel.layers import ExpertsMLP, GateUp, JoinedLinear, Linear, MatmulGelu, ScaledMatmul, SplitGateUp, SplitGelu
from tmodel.quantization import LinearShape, Quantization, fuses_gelu, fuses_swiglu
from tmodel.weights import Checkpoint, WeightError


class LinearReader:
    """Reads layers by their shapes; `report` adds up the cost of preparing quantized ones.

    Parts of a shape that are quantized alike become one weight. Where they differ (in bits, group size or permutation,
    or one is dense) each run of equal parts stays a layer of its own. The checkpoint's layout of a weight is dropped
    before the next shape is read, so a device holds two layouts of one shape at most.

    Args:
        checkpoint: What is read.
        kernels: That the layers call.
        quantization: Of the checkpoint; None where it is dense.
    """

    def __init__(self, checkpoint: Checkpoint, kernels: KernelSet, quantization: Quantization | None) -> None:
        self.checkpoint = checkpoint
        self.kernels = kernels
        self.quantization = quantization
        self.report = PrepareReport()

    def linear(self, shape: LinearShape) -> Linear | JoinedLinear:
        """Reads the linears of `shape` as one layer, x [T, K] -> [T, sum of outputs].

        Raises:
            WeightError: A tensor is missing, damaged, or contradicts the configuration.
        """
        if self.quantization is None or self.quantization.is_dense(shape):
            return self._dense(shape, 0, len(shape.names))
        parts, start = [], 0
        held: list[QuantizedWeight | ScaledWeight] = []  # the run of equally quantized parts that ends at `index`
        for index in range(len(shape.names)):
            weight = self._quantized(self.quantization, shape, index)
            if held and (weight is None or not _fit_together(held[-1], weight)):
                parts.append(self._prepare_layer(shape, start, index, held))
                start, held = index, []
            if weight is None:
                parts.append(self._dense(shape, index, index + 1))
                start = index + 1
            else:
                held.append(weight)
            weight = None  # `held` alone keeps it, so joining the run frees it
        if held:
            parts.append(self._prepare_layer(shape, start, len(shape.names), held))
        return parts[0] if len(parts) == 1 else JoinedLinear(tuple(parts))

    def gate_up(self, shape: LinearShape) -> GateUp | SplitGateUp:
        """Reads the gate and up projections of `shape`, with the SwiGLU over them: x [T, H] -> [T, I].

        Raises:
            WeightError: As `linear`.
        """
        if fuses_swiglu(shape, self.quantization):
            return GateUp(self.kernels.gate_up_swiglu, self._dense_weight(shape, 0, len(shape.names)))
        return SplitGateUp(self.linear(shape), self.kernels.swiglu)

    def router(self, shape: LinearShape) -> Linear:
        """Reads a linear that is always dense, H -> E: where the checkpoint has it in codes, they are decoded.

        Raises:
            WeightError: As `linear`.
        """
        (name,), (outputs,), checkpoint = shape.names, shape.outputs, self.checkpoint
        quantization_format = None if self.quantization is None else self.quantization.format
        scheme = None if quantization_format is None else quantization_format.scheme(name)
        if quantization_format is None or scheme is None or name not in checkpoint.coded_layers:
            return self._dense(shape, 0, 1)
        quantization_format.check(name, scheme, outputs, shape.inputs)
        weight = self._read(quantization_format, scheme, shape, 0)
        decode: Any = dequantize if isinstance(weight, QuantizedWeight) else scaled_weight.dequantize
        dense = decode(weight, checkpoint.dtype).contiguous()
        return Linear(self._range(shape, 0, 1), self.kernels.matmul, dense, self._bias(shape, 0, 1))

    def experts(self, gate_up: LinearShape, down: LinearShape, limit: float | None) -> ExpertsMLP:
        """Reads the projections of a layer's experts, each kind into one weight: x [T, H] -> [T, H].

        Args:
            gate_up: The gates and up projections.
            down: The down projections.
            limit: Of SwiGLU's clamped form; None is the other form.

        Raises:
            WeightError: As `linear`; or the experts' weights are of different structures.
        """
        return ExpertsMLP(
            self.kernels.moe_mlp,
            self._stacked(gate_up),
            self._stacked(down),
            self._stacked_bias(gate_up),
            self._stacked_bias(down),
            limit,
        )

    def _stacked(self, shape: LinearShape) -> torch.Tensor | StackedWeight | StackedScaledWeight:
        """[E, outputs of an expert, inputs], written expert by expert."""
        experts, parts = shape.num_experts, len(shape.names)
        if self.quantization is None or self.quantization.is_dense(shape):
            if shape.stacked:
                return self._turned(shape)
            return self._dense_weight(shape, 0, parts).view(experts, -1, shape.inputs)
        weights: Any  # of one class
        if shape.stacked:
            weights = self._experts_of_one(self.quantization, shape)
        else:
            weights = (self._expert(self.quantization, shape, number, parts // experts) for number in range(experts))
        is_scaled = isinstance(self.quantization.scheme(shape.names[0]), ScaledScheme)
        try:
            stacked: Any = (stack_scaled if is_scaled else stack)(weights, experts)
        except WeightError:
            raise  # of one tensor, which it names
        except ValueError as error:
            raise WeightError(f"{self.checkpoint.directory}: {shape.names[0]} and the others: {error}") from error
        variant = preparing_variant(self.kernels.moe_mlp)
        made, report = prepared(variant, stacked)
        del stacked
        self.report += report
        _return_freed_memory()
        kept: StackedWeight | StackedScaledWeight = made
        return kept

    def _turned(self, shape: LinearShape) -> torch.Tensor:
        """The dense [E, K, N] of a checkpoint as [E, N, K]; both are in memory meanwhile."""
        (name,), (outputs,) = shape.names, shape.outputs
        stored = self.checkpoint.tensor(name, (shape.num_experts, shape.inputs, outputs))
        weight = stored.new_empty((shape.num_experts, outputs, shape.inputs))
        for turned, one in zip(weight, stored, strict=True):
            turned.copy_((_in_halves(one) if shape.gated else one).t())
        del stored, one
        _return_freed_memory()
        return weight

    def _experts_of_one(self, quantization: Quantization, shape: LinearShape) -> Iterator[QuantizedWeight]:
        """Each expert's weight out of a tensor that holds all of them."""
        (name,), (outputs,), reader = shape.names, shape.outputs, quantization.format
        assert isinstance(reader, ExpertsFormat), "Quantization has seen to it"
        if name in self.checkpoint:
            raise self.checkpoint.error(name, "is dense, but quantization_config says that the layer is not")
        for weight in reader.read_experts(self.checkpoint, name, shape.num_experts, outputs, shape.inputs):
            cast = self._cast_weight(name, weight)
            yield cast.map_tensors(_in_halves) if shape.gated else cast

    def _stacked_bias(self, shape: LinearShape) -> torch.Tensor | None:
        """[E, outputs of an expert]."""
        if not shape.bias:
            return None
        (name,), (outputs,) = shape.names, shape.outputs
        bias = self.checkpoint.tensor(f"{name}_bias", (shape.num_experts, outputs))
        return _in_halves(bias) if shape.gated else bias

    def _expert(
        self, quantization: Quantization, shape: LinearShape, number: int, parts: int
    ) -> QuantizedWeight | ScaledWeight:
        """Expert `number`'s weight, of so many parts."""
        held: list[Any] = []
        for index in range(number * parts, (number + 1) * parts):
            weight = self._quantized(quantization, shape, index)
            assert weight is not None, "Quantization has seen to it"
            if held and (reason := _room_of(weight).incompatible_reason(held[0], weight)):
                raise WeightError(f"{self.checkpoint.directory}: {shape.names[index]} and its gate differ: {reason}")
            held.append(weight)
        return _join(held)

    def gelu(self, shape: LinearShape) -> MatmulGelu | SplitGelu:
        """Reads the projection of `shape`, with the gelu that follows: x [T, H] -> [T, I].

        Raises:
            WeightError: As `linear`.
        """
        tanh, parts = shape.gelu == "tanh", len(shape.names)
        if fuses_gelu(shape, self.quantization):
            weight, bias = self._dense_weight(shape, 0, parts), self._bias(shape, 0, parts)
            return MatmulGelu(self.kernels.matmul_gelu, weight, bias, tanh)
        return SplitGelu(self.linear(shape), self.kernels.gelu, tanh)

    def embedding_and_head(
        self, name: str, head: LinearShape, *, tied: bool
    ) -> tuple[torch.Tensor, Linear | JoinedLinear]:
        """Reads the token embedding and the head that turns hidden states into logits.

        Args:
            name: Tensor of the embedding, [V, H].
            head: Shape of the head, x [T, H] -> [T, V].
            tied: Whether the head's weight is the embedding.

        Returns:
            The embedding [V, H], and the head.

        Raises:
            WeightError: As `linear`; or both are tied, stored, and different.
        """
        size = (head.outputs[0], head.inputs)
        if not tied:
            return self.checkpoint.tensor(name, size), self.linear(head)
        stored = f"{head.names[0]}.weight"
        if name in self.checkpoint or stored not in self.checkpoint:
            embedding = self.checkpoint.tensor(name, size)
            self.checkpoint.require_equal(stored, embedding)
        else:  # of tensors that share memory some tools keep the other name (AutoAWQ 0.2.7)
            embedding = self.checkpoint.tensor(stored, size)
        return embedding, Linear(self._range(head, 0, 1), self.kernels.matmul, embedding)

    def _dense(self, shape: LinearShape, start: int, stop: int) -> Linear:
        weight, bias = self._dense_weight(shape, start, stop), self._bias(shape, start, stop)
        return Linear(self._range(shape, start, stop), self.kernels.matmul, weight, bias)

    def _range(self, shape: LinearShape, start: int, stop: int) -> Range:
        return self.kernels.ranges.named(shape.title(start, stop), "part")

    def _dense_weight(self, shape: LinearShape, start: int, stop: int) -> torch.Tensor:
        """[sum of outputs, inputs] of the parts `start` to `stop`."""
        names = [f"{name}.weight" for name in shape.names[start:stop]]
        sizes = [(outputs, shape.inputs) for outputs in shape.outputs[start:stop]]
        if shape.transposed:
            (name,), (size,) = names, sizes
            weight = self.checkpoint.transposed(name, size)
            _return_freed_memory()
            return weight
        return self.checkpoint.fused(names, sizes)

    def _bias(self, shape: LinearShape, start: int, stop: int) -> torch.Tensor | None:
        """[sum of outputs] of the parts `start` to `stop`."""
        if not shape.bias:
            return None
        names, outputs = shape.names[start:stop], shape.outputs[start:stop]
        return self.checkpoint.fused([f"{name}.bias" for name in names], [(n,) for n in outputs])

    def _quantized(
        self, quantization: Quantization, shape: LinearShape, index: int
    ) -> QuantizedWeight | ScaledWeight | None:
        """Reads part `index` in the checkpoint's layout and the model's dtype; None where it is dense."""
        name = shape.names[index]
        scheme = quantization.scheme(name)
        if scheme is None:
            return None
        weight = self._read(quantization.format, scheme, shape, index)
        if isinstance(weight, QuantizedWeight):
            weight = self._cast_weight(name, weight)
        _return_freed_memory()
        return weight

    def _read(
        self, quantization_format: QuantizationFormat, scheme: Scheme | ScaledScheme, shape: LinearShape, index: int
    ) -> QuantizedWeight | ScaledWeight:
        """Reads part `index`, which is stored in `scheme`, in the checkpoint's layout and the file's dtype."""
        name, outputs, checkpoint = shape.names[index], shape.outputs[index], self.checkpoint
        # 8-bit codes are called what a dense weight is called, and are known by their dtype.
        if isinstance(scheme, Scheme) and f"{name}.weight" in checkpoint:
            raise checkpoint.error(f"{name}.weight", "is dense, but quantization_config says that the layer is not")
        weight = quantization_format.read(checkpoint, name, outputs, shape.inputs)
        # AutoGPTQ gives every layer a bias, of zeros where the model has none.
        stray = not shape.bias and f"{name}.bias" in checkpoint
        if stray and bool(checkpoint.tensor(f"{name}.bias", (outputs,)).any()):
            raise checkpoint.error(f"{name}.bias", "is not zero, but config.json says that the layer has none")
        return weight

    def _cast_weight(self, layer: str, weight: QuantizedWeight) -> QuantizedWeight:
        """Casts scales, table and outliers to the model's dtype.

        Raises:
            WeightError: The dtype makes a value infinite, or a scale 0, which would zero its whole group.
        """
        checkpoint = self.checkpoint
        dtype = str(checkpoint.dtype).removeprefix("torch.")
        cast = weight.to(checkpoint.device, checkpoint.dtype)
        outliers = None if cast.outliers is None else cast.outliers.vals
        floating = [part for part in (cast.scales, cast.table, outliers) if part is not None]
        lost = None if weight.scales is None or cast.scales is None else (cast.scales == 0) & (weight.scales != 0)
        rule = None
        if not all(bool(torch.isfinite(part).all()) for part in floating):
            rule = f"scales or values beyond {dtype}'s range"
        elif lost is not None and bool(lost.any()):
            rule = f"scales that {dtype} rounds to 0"
        if rule is not None:
            raise WeightError(f"{checkpoint.directory}: layer {layer!r} has {rule}; float32 holds them")
        return cast

    def _prepare_layer(self, shape: LinearShape, start: int, stop: int, weights: list[Any]) -> Linear:
        """Joins the parts `start` to `stop` into one layer in the layout of its kernel, and empties `weights`."""
        joined = _join(weights)
        weights.clear()
        kernel, matmul = self._matmul_of(joined)
        weight, report = prepared(kernel.variant, joined)
        del joined
        self.report += report
        _return_freed_memory()
        bias = self._bias(shape, start, stop)
        return Linear(self._range(shape, start, stop), matmul, weight, bias)

    def _matmul_of(self, weight: QuantizedWeight | ScaledWeight) -> tuple[Any, Callable[..., torch.Tensor]]:
        """The kernel that reads a weight, and what a layer calls: it, or it after one that quantizes the inputs."""
        kernels = self.kernels
        if isinstance(weight, QuantizedWeight):
            return kernels.dequant_gemm, kernels.dequant_gemm
        if weight.is_blocked:
            return kernels.block_scaled_matmul, ScaledMatmul(kernels.quantize_groups, kernels.block_scaled_matmul)
        quantize = partial(kernels.quantize_tokens, dtype=weight.dtype, static_scale=weight.input_scale)
        return kernels.scaled_matmul, ScaledMatmul(quantize, kernels.scaled_matmul)


def _in_halves(values: torch.Tensor) -> torch.Tensor:
    """[..., 2 I], gates and ups in turn -> the gates, then the ups."""
    return values.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def preparing_variant(kernel: Kernel) -> Variant:
    """The variant whose `prepare` decides how a kernel's weights are kept: of a composed fusion a part's."""
    variants = [kernel.variant, *(part.variant for part in kernel.parts)]
    return next((variant for variant in variants if variant.prepare is not as_it_is), kernel.variant)


def _fit_together(one: QuantizedWeight | ScaledWeight, other: QuantizedWeight | ScaledWeight) -> bool:
    """Whether `other` can follow `one` in one weight."""
    if isinstance(one, QuantizedWeight):
        return isinstance(other, QuantizedWeight) and slicing.incompatible_reason(one, other) is None
    return isinstance(other, ScaledWeight) and scaled_weight.incompatible_reason(one, other) is None


def _join(weights: list[Any]) -> QuantizedWeight | ScaledWeight:
    """One weight of some that fit together."""
    joined: QuantizedWeight | ScaledWeight = _room_of(weights[0]).concatenate(weights)
    return joined


def _room_of(weight: QuantizedWeight | ScaledWeight) -> Any:
    """The module that joins weights of this class."""
    return scaled_weight if isinstance(weight, ScaledWeight) else slicing


def _return_freed_memory() -> None:
    """Makes glibc return freed memory to the operating system.

    torch asks for aligned blocks, and glibc seldom reuses a freed block for another of its size. Loading frees a copy
    of each layer, so without this the heap of a 4-bit model, or of GPT-2, grows to 1.3 times the model.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
