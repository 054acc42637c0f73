"""SqueezeLLM: each output's weights share 2**bits values of its own; the few that matter or stick out are kept beside.

Source: Kim et al., 2024, "SqueezeLLM: Dense-and-Sparse Quantization": sensitivity-weighted k-means, section 4.1;
dense-and-sparse decomposition, section 4.2, with the shares of weights that its experiments keep (section 5.1).
"""

from __future__ import annotations

import torch

from tkernels.quantized.outliers import Outliers, outliers_from
from tkernels.quantized.weight import QuantizedWeight, from_codes
from tmodel.formats import SqueezeLLM
from tmodel.quantizers.calibration import sensitivities
from tmodel.quantizers.kmeans import kmeans, nearest_centre
from tmodel.quantizers.method import Layer, Method, QuantizedLayer

SENSITIVE = 0.0005
"""The share of a matrix's weights that is kept for what the loss minds."""

LARGE = 0.0040
"""The share that is kept for its magnitude."""


def squeezellm(
    weight: torch.Tensor, sensitivity: torch.Tensor, bits: int, *, sensitive: float = SENSITIVE, large: float = LARGE
) -> QuantizedWeight:
    """Lookup codes and outliers for `weight` [N, K], whose loss grows by sensitivity * error^2 where it is changed.

    sensitivity: [N, K], at least 0. Table and outliers are float32, as its files keep them.
    """
    apart = most(sensitivity, sensitive) | most(weight.abs(), large)
    table = kmeans(weight, sensitivity.double().masked_fill(apart, 0), 2**bits)  # [N, 2**bits] float64
    codes = nearest_centre(weight.double(), table)  # [N, K]
    # As its files have it: an outlier's code is that of the value nearest 0, which its own value makes up for.
    codes = torch.where(apart, table.abs().argmin(1, keepdim=True), codes)
    kept = table.float()
    outliers: Outliers | None = None
    if bool(apart.any()):
        rows, cols = apart.nonzero(as_tuple=True)
        vals = (weight.double() - kept.double().gather(1, codes))[rows, cols].float()
        outliers = outliers_from(rows, cols, vals, (weight.shape[0], weight.shape[1]))
    return from_codes(codes.t().to(torch.uint8), bits, table=kept.t().contiguous(), outliers=outliers)


def most(scores: torch.Tensor, share: float) -> torch.Tensor:
    """True for the `share` of `scores` that is largest, the first of equals, rounded to a whole number."""
    chosen = torch.zeros(scores.numel(), dtype=torch.bool)
    chosen[scores.flatten().argsort(descending=True, stable=True)[: round(share * scores.numel())]] = True
    return chosen.view(scores.shape)


def quantize(layer: Layer, bits: int, group_size: int) -> QuantizedLayer:
    """The layer by its sensitivities in the dense model; the layer before gets the dense model's gradient."""
    layers, hidden = layer.in_use()
    assert layer.gradient is not None, "a backward walk brings each layer's gradient"
    minded, before = sensitivities(layers, layer.weights, layer.index, hidden, layer.gradient)
    linears = {name: squeezellm(layer.weights[f"{name}.weight"], minded[name], bits) for name in minded}
    return QuantizedLayer(linears, carry=before)


def _format(bits: int, group_size: int) -> SqueezeLLM:
    return SqueezeLLM(wbits=bits)


METHOD = Method("squeezellm", (3, 4), _format, grouped=False, walk="backward", quantize=quantize)
