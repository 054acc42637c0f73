"""AWQ: inputs that are large in use get finer steps, by a scale that the layer before takes out again.

Source: Lin et al., 2024, "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", equations 4
and 5: the scale of an input is the mean of its magnitude to a power, searched for on a grid, and what counts is the
error of the linear's output over what calibration saw. After it, as in the paper's code, a search for where to clip;
that code spares queries and keys, but where each head of them is normed it helps there too. Of the nats that rounding
to 4 bits in groups of 32 costs the tiny model, scales alone leave 0.99, clipping without these 0.86, with them 0.75.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tkernels.quantized.weight import QuantizedWeight, dequantize
from tmodel.formats import AWQ
from tmodel.quantization import Feed
from tmodel.quantizers.calibration import Inputs, collect_inputs, forward
from tmodel.quantizers.layers import linear_names
from tmodel.quantizers.method import Layer, Method, QuantizedLayer
from tmodel.quantizers.rtn import rounded

GRID = 20
"""Powers tried: 0, 1/20, ... 19/20, as in the paper's code."""

CLIP_STEPS = 10
"""Bounds tried: all, 19/20, ... 11/20 of a group's greatest magnitude, as in the paper's code."""


def scales_for(magnitude: torch.Tensor, power: float) -> torch.Tensor:
    """magnitude^power [K], with the geometric mean of the least and the greatest brought to 1; all 1 for power 0."""
    scales = magnitude.pow(power).clamp(min=1e-4)
    return scales / (scales.max() * scales.min()).sqrt()


def output_error(weights: Sequence[torch.Tensor], changed: Sequence[torch.Tensor], inputs: Inputs) -> float:
    """||X (W - W')^T||^2, summed over the linears [N, K] that read X: tr((W - W') X^T X (W - W')^T)."""
    total = 0.0
    for weight, other in zip(weights, changed, strict=True):
        difference = (weight - other).double()
        total += float(((difference @ inputs.second_moment) * difference).sum())
    return total


def search(
    weights: Sequence[torch.Tensor], inputs: Inputs, magnitude: torch.Tensor, bits: int, group_size: int
) -> torch.Tensor:
    """The scales [K] of the linears `weights` [N, K] each, which read one input, that leave the least output error.

    magnitude: [K], mean |X|, or its mean over inputs that must share a scale.
    """
    best, least = torch.ones_like(magnitude), float("inf")
    for step in range(GRID):
        scales = scales_for(magnitude, step / GRID)
        changed = [scaled_back(weight, scales, bits, group_size) for weight in weights]
        error = output_error(weights, changed, inputs)
        if error < least:
            best, least = scales, error
    return best


def scaled_back(weight: torch.Tensor, scales: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """`weight` [N, K] as it acts when rounded with its inputs scaled: Q(W s) / s."""
    s = scales.to(weight.dtype)
    return dequantize(rounded(weight * s, bits, group_size), weight.dtype) / s


def clipped(weight: torch.Tensor, second_moment: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """`weight` [N, K] with each group's largest magnitudes cut to a bound, from the greatest of them down to half, for
    finer steps: the one with which the group, once rounded, leaves the least output error of its own.

    second_moment: [K, K], of the inputs that this weight multiplies.
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
        difference = dequantize(rounded(cut.flatten(1), bits, size), weight.dtype).view_as(groups) - groups
        error = (torch.einsum("ngk,gkj->ngj", difference, moments) * difference).sum(-1, keepdim=True)
        best, least = torch.where(error < least, bound, best), torch.minimum(error, least)
    return groups.clamp(-best, best).flatten(1)


def quantize(layer: Layer, bits: int, group_size: int) -> QuantizedLayer:
    """The layer with scales folded into norms and linears, so that its file is like any other. Inputs and the next
    layer's are the dense model's.
    """
    layers, hidden = layer.in_use()
    seen = collect_inputs(layers, layer.weights, layer.index, hidden)
    weights, changed, scales = folded(layer, seen, bits, group_size)
    linears: dict[str, QuantizedWeight] = {}
    for place, group in enumerate(layer.groups):
        moment = seen[place].second_moment / torch.outer(scales[place], scales[place])
        for name in group.names:
            weight = clipped(weights[f"{name}.weight"], moment, bits, group_size)
            linears[name] = rounded(weight, bits, group_size)
    return QuantizedLayer(linears, changed, forward(layers, layer.weights, layer.index, hidden))


def folded(
    layer: Layer, seen: Mapping[int, Inputs], bits: int, group_size: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor]]:
    """The layer with each group's inputs scaled, and what feeds them scaled back; it computes what it did.

    A linear's rows may be scaled freely: each is rounded by its own steps. So what is searched for on the weights as
    they were holds for them as they become. A group that nothing feeds, or a feed through something else than products,
    keeps scales of 1.

    Returns:
        (all of the layer's weights; those that stay dense and changed; each group's scales [K]).
    """
    weights = dict(layer.weights)
    changed: dict[str, torch.Tensor] = {}
    used = [torch.ones_like(seen[place].mean_abs) for place in range(len(layer.groups))]
    linears = set(linear_names(layer.groups))
    for place, group in enumerate(layer.groups):
        feed = group.fed_by
        if feed is None:
            continue
        rows = input_rows(feed, group.inputs)
        matrices = [layer.weights[f"{name}.weight"] for name in group.names]
        scales = search(matrices, seen[place], shared(seen[place].mean_abs, rows), bits, group_size)  # [K]
        made_by = weights[f"{feed.name}.weight"]
        by_row = torch.ones(made_by.shape[0], dtype=scales.dtype).index_copy(0, rows, scales)  # of the feed's rows
        if feed.name in linears:
            weights[f"{feed.name}.weight"] = made_by / by_row.float()[:, None]
        else:
            kept, by_row = shrunk(made_by, by_row, layer.dtype)
            weights[f"{feed.name}.weight"], scales = kept, by_row[rows]
            changed[f"{feed.name}.weight"] = kept.to(layer.dtype)
        if (bias := weights.get(f"{feed.name}.bias")) is not None:
            weights[f"{feed.name}.bias"] = bias / by_row.float()
            changed[f"{feed.name}.bias"] = weights[f"{feed.name}.bias"].to(layer.dtype)
        used[place] = scales
        for name in group.names:
            weights[f"{name}.weight"] = weights[f"{name}.weight"] * scales.float()
    return weights, changed, used


def shrunk(norm: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """norm / scales [K] as `dtype` keeps it, and the scales that it was divided by in truth."""
    kept = (norm.double() / scales).to(dtype).double()
    return kept.float(), torch.where(kept == 0, scales, norm.double() / kept)


def input_rows(feed: Feed, inputs: int) -> torch.Tensor:
    """[K] int64: the row of the feed that makes each of `inputs`."""
    runs = feed.rows or (range(inputs),)
    return torch.tensor([row for run in runs for row in run])


def shared(magnitude: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[K] with its mean over the inputs that one row makes in each one's place: they share its scale."""
    num_rows = int(rows.max()) + 1
    totals = torch.zeros(num_rows, dtype=magnitude.dtype).index_add(0, rows, magnitude)
    return (totals / torch.bincount(rows, minlength=num_rows).clamp(min=1))[rows]


def _format(bits: int, group_size: int) -> AWQ:
    return AWQ(bits=bits, group_size=group_size)


METHOD = Method("awq", (4,), _format, grouped=True, walk="forward", quantize=quantize)
