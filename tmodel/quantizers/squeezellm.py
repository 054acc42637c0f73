"""SqueezeLLM: each output's weights share 2**bits values; the few sensitive or large ones are kept beside as outliers.

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
"""The share of a matrix's weights that is kept because the loss is most sensitive to them."""

LARGE = 0.0040
"""The share of a matrix's weights that is kept because they are the largest."""


def squeezellm(
    weight: torch.Tensor, sensitivity: torch.Tensor, bits: int, *, sensitive: float = SENSITIVE, large: float = LARGE
) -> QuantizedWeight:
    """Chooses lookup codes and outliers for a weight.

    Args:
        weight: [N, K].
        sensitivity: [N, K], at least 0: an error of a weight raises the loss by sensitivity * error^2.
        bits: Of a code.
        sensitive: The share of weights that become outliers for their sensitivity.
        large: The share that become outliers for their magnitude.

    Returns:
        The weight in codes; its table and outliers are float32, as SqueezeLLM's files have them.
    """
    apart = select_largest(sensitivity, sensitive) | select_largest(weight.abs(), large)
    table = kmeans(weight, sensitivity.double().masked_fill(apart, 0), 2**bits)  # [N, 2**bits] float64
    codes = nearest_centre(weight.double(), table)  # [N, K]
    # As in SqueezeLLM's files, an outlier's code names the table's value nearest 0, and the outlier holds the rest.
    codes = torch.where(apart, table.abs().argmin(1, keepdim=True), codes)
    kept = table.float()
    outliers: Outliers | None = None
    if bool(apart.any()):
        rows, cols = apart.nonzero(as_tuple=True)
        vals = (weight.double() - kept.double().gather(1, codes))[rows, cols].float()
        outliers = outliers_from(rows, cols, vals, (weight.shape[0], weight.shape[1]))
    return from_codes(codes.t().to(torch.uint8), bits, table=kept.t().contiguous(), outliers=outliers)


def select_largest(scores: torch.Tensor, share: float) -> torch.Tensor:
    """bool, shaped as `scores`: the largest `share` of them, rounded to a whole number; of equal ones the first."""
    chosen = torch.zeros(scores.numel(), dtype=torch.bool)
    chosen[scores.flatten().argsort(descending=True, stable=True)[: round(share * scores.numel())]] = True
    return chosen.view(scores.shape)


def quantize(layer: Layer, bits: int, group_size: int) -> QuantizedLayer:
    """Quantizes each linear by its sensitivities in the dense model, and passes that model's gradient back."""
    layers, hidden = layer.require_calibration()
    assert layer.gradient is not None, "a backward walk brings each layer's gradient"
    by_linear, before = sensitivities(layers, layer.weights, layer.index, hidden, layer.gradient)
    linears = {name: squeezellm(layer.weights[f"{name}.weight"], by_linear[name], bits) for name in by_linear}
    return QuantizedLayer(linears, carry=before)


def _format(bits: int, group_size: int) -> SqueezeLLM:
    return SqueezeLLM(wbits=bits)


METHOD = Method("squeezellm", (3, 4), _format, grouped=False, walk="backward", quantize=quantize)
