"""What calibration tells a quantizer: the inputs of each linear, and how sensitive the loss is to its weights.

Layers are computed one at a time, from the windows' hidden states at their input, a few windows at a time. Memory holds
one layer's weights, the hidden states [n, S, H] and the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tmodel.quantizers.layers import TransformersLayers, Weights, layer_groups, linear_names

MAX_TOKENS = 65_536
"""Tokens of calibration text that are used at most: 128 windows of 512 (Lin et al., 2024, section 5.1)."""

_WINDOWS_AT_ONCE = 16


@dataclass(frozen=True)
class Inputs:
    """Statistics of a linear's inputs X [tokens, K] in calibration.

    Attributes:
        second_moment: X^T X, [K, K] float64; times two it is the Hessian of the layer's squared error.
        mean_abs: The mean of |X| over tokens, [K] float64.
    """

    second_moment: torch.Tensor
    mean_abs: torch.Tensor


def choose_windows(tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Chooses windows spread evenly over a text, at most MAX_TOKENS in all.

    Args:
        tokens: [T] int64, the text.
        num_tokens: S, inputs of a window.

    Returns:
        [n, S + 1] int64: S inputs and the target of the last.

    Raises:
        ValueError: The text is shorter than one window.
    """
    most = (len(tokens) - 1) // num_tokens
    if most < 1:
        raise ValueError(f"{len(tokens)} tokens do not make one window of {num_tokens} and the token after")
    count = min(most, max(1, MAX_TOKENS // num_tokens))
    starts = torch.arange(count) * most // count * num_tokens
    return tokens[starts[:, None] + torch.arange(num_tokens + 1)]


def forward(layers: TransformersLayers, weights: Weights, index: int, hidden: torch.Tensor) -> torch.Tensor:
    """hidden [n, S, H] -> [n, S, H] through layer `index` with `weights`."""
    with torch.no_grad():
        return torch.cat([layers(weights, index, part) for part in hidden.split(_WINDOWS_AT_ONCE)])


def collect_inputs(
    layers: TransformersLayers,
    weights: Weights,
    index: int,
    hidden: torch.Tensor,
    groups: Sequence[int] | None = None,
) -> dict[int, Inputs]:
    """Collects statistics of what linears multiply in one layer.

    Args:
        layers: The model.
        weights: Of the layer.
        index: Which layer it is.
        hidden: [n, S, H], its input.
        groups: Places of the groups of linears that are wanted; None is all.

    Returns:
        Place of a group -> its inputs.
    """
    moments: dict[int, torch.Tensor] = {}
    sums: dict[int, torch.Tensor] = {}

    def observe(group: int, x: torch.Tensor) -> None:
        if groups is None or group in groups:
            product, total = (x.t() @ x).double(), x.abs().double().sum(0)
            moments[group] = moments[group] + product if group in moments else product
            sums[group] = sums[group] + total if group in sums else total

    with torch.no_grad():
        for part in hidden.split(_WINDOWS_AT_ONCE):
            layers(weights, index, part, observe)
    num_tokens = hidden.shape[0] * hidden.shape[1]
    return {group: Inputs(moments[group], sums[group] / num_tokens) for group in sorted(moments)}


def collect_largest(
    layers: TransformersLayers, weights: Weights, index: int, hidden: torch.Tensor
) -> dict[int, torch.Tensor]:
    """Collects the largest magnitude of each input of linears in one layer.

    Args:
        layers: The model.
        weights: Of the layer.
        index: Which layer it is.
        hidden: [n, S, H], its input.

    Returns:
        Place of a group -> max |X| over tokens, [K] float64.
    """
    largest: dict[int, torch.Tensor] = {}

    def observe(group: int, x: torch.Tensor) -> None:
        most = x.abs().amax(0).double()
        largest[group] = torch.maximum(largest[group], most) if group in largest else most

    with torch.no_grad():
        for part in hidden.split(_WINDOWS_AT_ONCE):
            layers(weights, index, part, observe)
    return dict(sorted(largest.items()))


def head_gradient(layers: TransformersLayers, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The gradient [n, S, H] of each window's summed loss in nats by the last layer's output.

    Args:
        layers: The model.
        hidden: [n, S, H], that output.
        targets: [n, S] int64, the token after each.
    """
    gradients = []
    for part, wanted in zip(hidden.split(_WINDOWS_AT_ONCE), targets.split(_WINDOWS_AT_ONCE), strict=True):
        leaf = part.detach().requires_grad_()
        logits = layers.logits(leaf)  # [part, S, vocab]
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        gradients += torch.autograd.grad(loss, leaf)
    return torch.cat(gradients)


def sensitivities(
    layers: TransformersLayers, weights: Weights, index: int, hidden: torch.Tensor, gradient: torch.Tensor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """How sensitive the loss is to each weight of a layer, and the gradient for the layer before it.

    The sensitivity is the diagonal of the empirical Fisher information, the mean over windows of the squared gradient
    of a window's loss: Kim et al., 2024, "SqueezeLLM", section 4.1 and equation 3. The layer is computed again with its
    graph, one window at a time, so memory holds no other layer's graph.

    Args:
        layers: The model.
        weights: Of the layer.
        index: Which layer it is.
        hidden: [n, S, H], its input.
        gradient: [n, S, H], of each window's loss by its output.

    Returns:
        ({name of a linear: sensitivities [N, K] float64}, the gradient [n, S, H] by the layer's input).
    """
    linears = linear_names(layer_groups(layers.config, index))
    leaves = {f"{name}.weight": weights[f"{name}.weight"].detach().requires_grad_() for name in linears}
    squares = {name: torch.zeros_like(weights[f"{name}.weight"], dtype=torch.float64) for name in linears}
    before = torch.empty_like(gradient)
    for window in range(hidden.shape[0]):
        x = hidden[window : window + 1].detach().requires_grad_()
        out = layers({**weights, **leaves}, index, x)
        by_input, *by_weight = torch.autograd.grad(out, [x, *leaves.values()], gradient[window : window + 1])
        before[window] = by_input[0]
        for name, one in zip(linears, by_weight, strict=True):
            squares[name] += one.double().square()
    return {name: total / hidden.shape[0] for name, total in squares.items()}, before
