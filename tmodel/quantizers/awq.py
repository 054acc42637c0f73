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
from tmodel.config import ModelConfig
from tmodel.formats import AWQ
from tmodel.quantizers.calibration import Inputs, forward, see_inputs
from tmodel.quantizers.decoder import GROUPS
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


_QKV, _OUTPUT, _GATE_UP, _DOWN = range(len(GROUPS))


def quantize(layer: Layer, bits: int, group_size: int) -> QuantizedLayer:
    """The layer with scales folded into norms and linears, so that its file is like any other. Inputs and the next
    layer's are the dense model's.
    """
    assert layer.hidden is not None
    seen = see_inputs(layer.decoder, layer.weights, layer.index, layer.hidden)
    weights, changed, scales = folded(layer, seen, bits, group_size)
    linears: dict[str, QuantizedWeight] = {}
    for group, names in enumerate(GROUPS):
        moment = seen[group].second_moment / torch.outer(scales[group], scales[group])
        for name in names:
            weight = clipped(weights[f"{name}.weight"], moment, bits, group_size)
            linears[name] = rounded(weight, bits, group_size)
    return QuantizedLayer(linears, changed, forward(layer.decoder, layer.weights, layer.index, layer.hidden))


def folded(
    layer: Layer, seen: Mapping[int, Inputs], bits: int, group_size: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor]]:
    """The layer's weights, which compute what they did, with the scales in them; those that stay dense and changed; and
    each group's scales [K].

    A linear's rows may be scaled freely: each is rounded by its own steps. So what is searched for on the weights as
    they were holds for them as they become.
    """
    config = layer.decoder.config
    weights = dict(layer.weights)
    changed: dict[str, torch.Tensor] = {}
    used = [torch.ones_like(seen[group].mean_abs) for group in range(len(GROUPS))]

    def found(group: int, magnitude: torch.Tensor) -> torch.Tensor:
        matrices = [layer.weights[f"{name}.weight"] for name in GROUPS[group]]
        return search(matrices, seen[group], magnitude, bits, group_size)

    def scale_inputs(group: int, scales: torch.Tensor) -> None:
        used[group] = scales
        for name in GROUPS[group]:
            weights[f"{name}.weight"] = weights[f"{name}.weight"] * scales.float()

    for group, norm in ((_QKV, "input_layernorm.weight"), (_GATE_UP, "post_attention_layernorm.weight")):
        kept, scales = shrunk(weights[norm], found(group, seen[group].mean_abs), layer.dtype)
        weights[norm] = kept
        changed[norm] = kept.to(layer.dtype)
        scale_inputs(group, scales)
    for group, before in ((_OUTPUT, "self_attn.v_proj"), (_DOWN, "mlp.up_proj")):
        magnitude = seen[group].mean_abs
        if group == _OUTPUT:
            magnitude = by_kv_head(magnitude, config)
        scales = found(group, magnitude)  # [K]
        rows = of_kv_heads(scales, config) if group == _OUTPUT else scales  # [outputs of `before`]
        weights[f"{before}.weight"] = weights[f"{before}.weight"] / rows.float()[:, None]
        bias = weights.get(f"{before}.bias")
        if bias is not None:
            weights[f"{before}.bias"] = bias / rows.float()
            changed[f"{before}.bias"] = weights[f"{before}.bias"].to(layer.dtype)
        scale_inputs(group, scales)
    return weights, changed, used


def shrunk(norm: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """norm / scales [K] as `dtype` keeps it, and the scales that it was divided by in truth."""
    kept = (norm.double() / scales).to(dtype).double()
    return kept.float(), torch.where(kept == 0, scales, norm.double() / kept)


def by_kv_head(magnitude: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """[Hq D] with the mean over the query heads that read one value head in each one's place: they share its scale."""
    heads = magnitude.view(config.num_kv_heads, -1, config.head_dim)  # [Hkv, Hq / Hkv, D]
    return heads.mean(1, keepdim=True).expand_as(heads).flatten()


def of_kv_heads(scales: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """[Hq D], the same for the query heads of one value head -> [Hkv D]."""
    return scales.view(config.num_kv_heads, -1, config.head_dim)[:, 0].flatten()


def _format(bits: int, group_size: int) -> AWQ:
    return AWQ(bits=bits, group_size=group_size)


METHOD = Method("awq", (4,), _format, grouped=True, walk="forward", quantize=quantize)
