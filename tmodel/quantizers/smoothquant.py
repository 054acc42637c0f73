"""SmoothQuant: inputs with outliers hand some of their size over to the weights, and both go into int8.

Source: Xiao et al., 2023, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
equations 3 and 4. An input j is divided by max|X_j|^a / max|W_j|^(1 - a), which the layer before takes in, and its
weights are multiplied by it. With a = 1/2, the paper's for most models, the largest input and the largest weight of
each j are then of one size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tkernels.quantized.scaled_weight import quantize_rows
from tmodel.formats import CompressedTensors
from tmodel.formats.compressed_tensors import make_w8a8
from tmodel.quantizers.calibration import collect_largest, forward
from tmodel.quantizers.folding import fold_into_feeds
from tmodel.quantizers.layers import linear_names
from tmodel.quantizers.method import Layer, Method, QuantizedLayer

MIGRATION = 0.5
"""The paper's a: how much of an input's size the weights take over."""

_LEAST = 1e-5  # of a largest value: an input that was always 0 says nothing of its size


def smoothing_scales(
    largest: torch.Tensor, weights: Sequence[torch.Tensor], rows: torch.Tensor, migration: float = MIGRATION
) -> torch.Tensor:
    """Computes what inputs are divided by and their weights multiplied by.

    Args:
        largest: [K] float64, max |X| of each input in calibration.
        weights: Of the linears that read the inputs, [N, K] each.
        rows: [K], of the feed; inputs of one row share a scale.
        migration: The paper's a.

    Returns:
        [K] float64.
    """
    by_weight = torch.stack([weight.abs().amax(0).double() for weight in weights]).amax(0)  # [K]
    inputs, outputs = (share_largest(one.clamp(min=_LEAST), rows) for one in (largest, by_weight))
    return inputs.pow(migration) / outputs.pow(1 - migration)


def share_largest(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[K]: the largest of `values` among inputs of the same row [K]."""
    most = torch.zeros(int(rows.max()) + 1, dtype=values.dtype)
    return most.scatter_reduce(0, rows, values, "amax")[rows]


def smooth_layer(
    layer: Layer, largest: Mapping[int, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor]]:
    """Smooths the inputs of every group that has a feed.

    Args:
        layer: The dense layer.
        largest: Place of a group -> max |X| of its inputs, [K] float64.

    Returns:
        As `fold_into_feeds`.
    """
    return fold_into_feeds(layer, lambda place, weights, rows: smoothing_scales(largest[place], weights, rows))


def quantize(layer: Layer, bits: int, group_size: int) -> QuantizedLayer:
    """Smooths the layer, then rounds each output's weights by their largest. Inputs are rounded while serving.

    Calibration sees the dense model throughout: the next layer's inputs are those of this layer's dense weights.
    """
    layers, hidden = layer.require_calibration()
    weights, changed, _ = smooth_layer(layer, collect_largest(layers, layer.weights, layer.index, hidden))
    linears = {name: quantize_rows(weights[f"{name}.weight"], torch.int8) for name in linear_names(layer.groups)}
    return QuantizedLayer(linears, changed, forward(layers, layer.weights, layer.index, hidden))


def _format(bits: int, group_size: int) -> CompressedTensors:
    return make_w8a8("int")


METHOD = Method("smoothquant", (8,), _format, grouped=False, walk="forward", quantize=quantize)
