"""Scales of a linear's inputs, folded into the layer that makes them: readers of the checkpoint need nothing new.

AWQ and SmoothQuant choose them, each in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tmodel.quantization import Feed
from tmodel.quantizers.layers import linear_names
from tmodel.quantizers.method import Layer

ChooseScales = Callable[[int, Sequence[torch.Tensor], torch.Tensor], torch.Tensor]
"""(place of a group, its weights [N, K] each, the row of its feed that makes each input [K]) -> scales [K] float64, the
same for inputs of one row."""


def fold_into_feeds(
    layer: Layer, choose: ChooseScales
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor]]:
    """Scales each group's inputs and divides what feeds them by the same scales: the layer's function stays.

    A linear's rows may be scaled freely, because each row has steps of its own. So scales that were chosen on the
    original weights also hold for the changed ones. A group without a feed keeps scales of 1.

    Args:
        layer: The dense layer.
        choose: Gives the scales of a group's inputs.

    Returns:
        (all weights of the layer, float32; those that stay dense and changed, in the checkpoint's dtype; each group's
        scales [K], float64).
    """
    weights = dict(layer.weights)
    changed: dict[str, torch.Tensor] = {}
    used = [torch.ones(group.inputs, dtype=torch.float64) for group in layer.groups]
    linears = set(linear_names(layer.groups))
    for place, group in enumerate(layer.groups):
        feed = group.fed_by
        if feed is None:
            continue
        rows = input_rows(feed, group.inputs)
        scales = choose(place, [layer.weights[f"{name}.weight"] for name in group.names], rows)  # [K]
        made_by = weights[f"{feed.name}.weight"]
        by_row = torch.ones(made_by.shape[0], dtype=scales.dtype).index_copy(0, rows, scales)  # of the feed's rows
        if feed.name in linears:
            weights[f"{feed.name}.weight"] = made_by / by_row.float()[:, None]
        else:
            kept, by_row = divide_norm(made_by, by_row, layer.dtype)
            weights[f"{feed.name}.weight"], scales = kept, by_row[rows]
            changed[f"{feed.name}.weight"] = kept.to(layer.dtype)
        if (bias := weights.get(f"{feed.name}.bias")) is not None:
            weights[f"{feed.name}.bias"] = bias / by_row.float()
            changed[f"{feed.name}.bias"] = weights[f"{feed.name}.bias"].to(layer.dtype)
        used[place] = scales
        for name in group.names:
            weights[f"{name}.weight"] = weights[f"{name}.weight"] * scales.float()
    return weights, changed, used


def divide_norm(norm: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """norm / scales [K] rounded to `dtype`, and the scales [K] float64 that the rounded norm is divided by exactly."""
    kept = (norm.double() / scales).to(dtype).double()
    return kept.float(), torch.where(kept == 0, scales, norm.double() / kept)


def input_rows(feed: Feed, inputs: int) -> torch.Tensor:
    """[K] int64: the row of the feed that computes each of `inputs`."""
    runs = feed.rows or (range(inputs),)
    return torch.tensor([row for run in runs for row in run])
