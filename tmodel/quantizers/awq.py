"""AWQ: inputs with large activations get finer steps, by a scale that the layer before divides by.

Source: Lin et al., 2024, "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", equations 4
and 5. The scale of an input is its mean magnitude to a power; a grid search takes the power with the least error of the
linear's output on the calibration inputs. A search for clipping bounds follows, as in the paper's code. That code
leaves queries and keys unclipped, but where a norm follows each head of them clipping helps there too: of the nats that
rounding to 4 bits in groups of 32 costs the tiny model, scales alone leave 0.99, clipping all but queries and keys
0.86, clipping all 0.75.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tkernels.quantized.weight import QuantizedWeight, dequantize
from tmodel.formats import AWQ
from tmodel.quantizers.calibration import Inputs, collect_inputs, forward
from tmodel.quantizers.folding import fold_into_feeds
from tmodel.quantizers.method import Layer, Method, QuantizedLayer
from tmodel.quantizers.rtn import round_to_nearest

GRID = 20
"""Powers tried: 0, 1/20, ... 19/20, as in the paper's code."""

CLIP_STEPS = 10
"""Bounds tried: all, 19/20, ... 11/20 of a group's greatest magnitude, as in the paper's code."""


def power_scales(magnitude: torch.Tensor, power: float) -> torch.Tensor:
    """[K] float64: magnitude^power, divided by the geometric mean of the least and the greatest; all 1 for power 0."""
    scales = magnitude.pow(power).clamp(min=1e-4)
    return scales / (scales.max() * scales.min()).sqrt()


def output_error(weights: Sequence[torch.Tensor], changed: Sequence[torch.Tensor], inputs: Inputs) -> float:
    """The squared error ||X (W - W')^T||^2 = tr((W - W') X^T X (W - W')^T), summed over linears that read X.

    Args:
        weights: W of each linear, [N, K].
        changed: W' of each, [N, K].
        inputs: Of X [tokens, K].
    """
    total = 0.0
    for weight, other in zip(weights, changed, strict=True):
        difference = (weight - other).double()
        total += float(((difference @ inputs.second_moment) * difference).sum())
    return total


def search_scales(
    weights: Sequence[torch.Tensor], inputs: Inputs, magnitude: torch.Tensor, bits: int, group_size: int
) -> torch.Tensor:
    """Searches the scales that leave the least output error of linears with one input.

    Args:
        weights: Of the linears, [N, K] each.
        inputs: That they were seen to multiply.
        magnitude: [K] float64, mean |X|, averaged over inputs that must share a scale.
        bits: Of a code.
        group_size: Inputs that share a step; -1 is all.

    Returns:
        [K] float64.
    """
    best, least = torch.ones_like(magnitude), float("inf")
    for step in range(GRID):
        scales = power_scales(magnitude, step / GRID)
        changed = [round_scaled(weight, scales, bits, group_size) for weight in weights]
        error = output_error(weights, changed, inputs)
        if error < least:
            best, least = scales, error
    return best


def round_scaled(weight: torch.Tensor, scales: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Q(W s) / s [N, K]: how `weight` acts when it is rounded with its inputs scaled by `scales` [K]."""
    s = scales.to(weight.dtype)
    return dequantize(round_to_nearest(weight * s, bits, group_size), weight.dtype) / s


def clip_groups(weight: torch.Tensor, second_moment: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Clips each group to the bound that leaves its rounded weights the least output error: finer steps, less range.

    Args:
        weight: [N, K].
        second_moment: [K, K] float64, of the inputs that the weight multiplies.
        bits: Of a code.
        group_size: Inputs that share a step; -1 is all.

    Returns:
        [N, K], `weight` clipped.
    """
    size = weight.shape[1] if group_size == -1 else group_size
    groups = weight.unflatten(1, (-1, size))  # [N, G, size]
    index = torch.arange(second_moment.shape[0]).unflatten(0, (-1, size))  # [G, size]
    moments = second_moment[index[:, :, None], index[:, None, :]].to(weight.dtype)  # [G, size, size]
    greatest = groups.abs().amax(-1, keepdim=True)  # [N, G, 1]
    best, least = greatest, torch.full_like(greatest, torch.inf)
    for step in range(CLIP_STEPS):
        bound = greatest * (1 - step / GRID)
        cut = groups.clamp(-bound, bound)
        difference = dequantize(round_to_nearest(cut.flatten(1), bits, size), weight.dtype).view_as(groups) - groups
        error = (torch.einsum("ngk,gkj->ngj", difference, moments) * difference).sum(-1, keepdim=True)
        best, least = torch.where(error < least, bound, best), torch.minimum(error, least)
    return groups.clamp(-best, best).flatten(1)


def quantize(layer: Layer, bits: int, group_size: int) -> QuantizedLayer:
    """Folds scales into norms and linears, so that readers need nothing new, then clips and rounds.

    Calibration sees the dense model throughout: the next layer's inputs are those of this layer's dense weights.
    """
    layers, hidden = layer.require_calibration()
    seen = collect_inputs(layers, layer.weights, layer.index, hidden)
    weights, changed, scales = fold_scales(layer, seen, bits, group_size)
    linears: dict[str, QuantizedWeight] = {}
    for place, group in enumerate(layer.groups):
        moment = seen[place].second_moment / torch.outer(scales[place], scales[place])
        for name in group.names:
            weight = clip_groups(weights[f"{name}.weight"], moment, bits, group_size)
            linears[name] = round_to_nearest(weight, bits, group_size)
    return QuantizedLayer(linears, changed, forward(layers, layer.weights, layer.index, hidden))


def fold_scales(
    layer: Layer, seen: Mapping[int, Inputs], bits: int, group_size: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor]]:
    """Folds the scales that leave the least output error into what feeds each group of linears.

    Args:
        layer: The dense layer.
        seen: Place of a group -> the inputs that it multiplies.
        bits: Of a code.
        group_size: Inputs that share a step; -1 is all.

    Returns:
        As `fold_into_feeds`.
    """

    def choose(place: int, matrices: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        inputs = seen[place]
        return search_scales(matrices, inputs, average_shared(inputs.mean_abs, rows), bits, group_size)

    return fold_into_feeds(layer, choose)


def average_shared(magnitude: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[K]: `magnitude` averaged over inputs of the same row [K], which must share a scale."""
    num_rows = int(rows.max()) + 1
    totals = torch.zeros(num_rows, dtype=magnitude.dtype).index_add(0, rows, magnitude)
    return (totals / torch.bincount(rows, minlength=num_rows).clamp(min=1))[rows]


def _format(bits: int, group_size: int) -> AWQ:
    return AWQ(bits=bits, group_size=group_size)


METHOD = Method("awq", (4,), _format, grouped=True, walk="forward", quantize=quantize)
