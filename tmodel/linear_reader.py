"""Linear layers out of a checkpoint, dense or quantized, each made ready for its kernel as it comes."""

from __future__ import annotations

import ctypes

import torch

from tkernels import KernelSet, PrepareReport, prepared
from tkernels.quantized.slicing import concatenate, incompatible_reason
from tkernels.quantized.weight import QuantizedWeight
from tkernels.ranges import Range
from tmodel.layers import GateUp, JoinedLinear, Linear, SplitGateUp
from tmodel.quantization import LinearShape, Quantization, fuses_swiglu
from tmodel.weights import Checkpoint, WeightError


class LinearReader:
    """Reads layers by their shapes; `report` adds up what it cost to prepare the quantized ones.

    Parts of a shape that are quantized alike become one weight; where they differ (in bits, group size, permutation, or
    one is dense) each run of equal ones stays a part of its own. A weight as the checkpoint has it is dropped before
    the next shape is read, so that a device holds two layouts of one shape at most.
    """

    def __init__(self, checkpoint: Checkpoint, kernels: KernelSet, quantization: Quantization | None) -> None:
        self.checkpoint = checkpoint
        self.kernels = kernels
        self.quantization = quantization
        self.report = PrepareReport()

    def linear(self, shape: LinearShape) -> Linear | JoinedLinear:
        """The layer, or layers, of `shape`: x [T, K] -> [T, sum of outputs]."""
        if self.quantization is None or self.quantization.is_dense(shape):
            return self._dense(shape, 0, len(shape.names))
        parts, start = [], 0
        held: list[QuantizedWeight] = []  # neighbours that agree, up to the one being looked at
        for index in range(len(shape.names)):
            weight = self._quantized(self.quantization, shape, index)
            if held and (weight is None or incompatible_reason(held[0], weight) is not None):
                parts.append(self._prepared_layer(shape, start, index, held))
                start, held = index, []
            if weight is None:
                parts.append(self._dense(shape, index, index + 1))
                start = index + 1
            else:
                held.append(weight)
            weight = None  # or it would outlive the weight that it becomes a part of
        if held:
            parts.append(self._prepared_layer(shape, start, len(shape.names), held))
        return parts[0] if len(parts) == 1 else JoinedLinear(tuple(parts))

    def gate_up(self, shape: LinearShape) -> GateUp | SplitGateUp:
        """The gate and the up projection of `shape` and the SwiGLU over them: x [T, H] -> [T, I]."""
        if fuses_swiglu(shape, self.quantization):
            return GateUp(self.kernels.gate_up_swiglu, self._dense_weight(shape, 0, len(shape.names)))
        return SplitGateUp(self.linear(shape), self.kernels.swiglu)

    def _dense(self, shape: LinearShape, start: int, stop: int) -> Linear:
        weight, bias = self._dense_weight(shape, start, stop), self._bias(shape, start, stop)
        return Linear(self._range(shape, start, stop), self.kernels.matmul, weight, bias)

    def _range(self, shape: LinearShape, start: int, stop: int) -> Range:
        return self.kernels.ranges.named(shape.title(start, stop), "part")

    def _dense_weight(self, shape: LinearShape, start: int, stop: int) -> torch.Tensor:
        """[sum of outputs, inputs] of the parts `start` to `stop`."""
        names, outputs = shape.names[start:stop], shape.outputs[start:stop]
        return self.checkpoint.fused([f"{name}.weight" for name in names], [(n, shape.inputs) for n in outputs])

    def _bias(self, shape: LinearShape, start: int, stop: int) -> torch.Tensor | None:
        """[sum of outputs] of the parts `start` to `stop`."""
        if not shape.bias:
            return None
        names, outputs = shape.names[start:stop], shape.outputs[start:stop]
        return self.checkpoint.fused([f"{name}.bias" for name in names], [(n,) for n in outputs])

    def _quantized(self, quantization: Quantization, shape: LinearShape, index: int) -> QuantizedWeight | None:
        """One part as the checkpoint has it, in the model's dtype; None where it is dense."""
        name, outputs = shape.names[index], shape.outputs[index]
        if quantization.scheme(name) is None:
            return None
        checkpoint = self.checkpoint
        if f"{name}.weight" in checkpoint:
            raise checkpoint.error(f"{name}.weight", "is dense, but quantization_config says that the layer is not")
        weight = quantization.format.read(checkpoint, name, outputs, shape.inputs)
        # AutoGPTQ gives every layer a bias, of zeros where the model has none.
        stray = not shape.bias and f"{name}.bias" in checkpoint
        if stray and bool(checkpoint.tensor(f"{name}.bias", (outputs,)).any()):
            raise checkpoint.error(f"{name}.bias", "is not zero, but config.json says that the layer has none")
        weight = self._in_dtype(name, weight)
        _give_back_freed_memory()
        return weight

    def _in_dtype(self, layer: str, weight: QuantizedWeight) -> QuantizedWeight:
        """The weight in the model's dtype. WeightError where that cannot hold what the layer's file holds: a scale
        that becomes 0 would take every weight of its group along.
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

    def _prepared_layer(self, shape: LinearShape, start: int, stop: int, weights: list[QuantizedWeight]) -> Linear:
        """Weights that agree as one layer, its weight in the layout that the kernel reads; `weights` is emptied."""
        joined = concatenate(weights)
        weights.clear()
        weight, report = prepared(self.kernels.dequant_gemm.variant, joined)
        del joined
        self.report += report
        _give_back_freed_memory()
        bias = self._bias(shape, start, stop)
        return Linear(self._range(shape, start, stop), self.kernels.dequant_gemm, weight, bias)


def _give_back_freed_memory() -> None:
    """Have glibc return what is free to the operating system.

    torch asks for aligned blocks, and glibc seldom finds room for one where another of its size was freed: with the
    copies of a layer that come and go the heap of a 4-bit model grows to 1.3 times the model.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
