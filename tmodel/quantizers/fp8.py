"""fp8: each output's weights are rounded to e4m3 by their largest, and each token's inputs while serving.

Source: Micikevicius et al., 2022, "FP8 Formats for Deep Learning".
"""

from __future__ import annotations

import torch

from tkernels.quantized.scaled_weight import quantize_rows
from tmodel.formats import CompressedTensors
from tmodel.formats.compressed_tensors import make_w8a8
from tmodel.quantizers.layers import linear_names
from tmodel.quantizers.method import Layer, Method, QuantizedLayer


def quantize(layer: Layer, bits: int, group_size: int) -> QuantizedLayer:
    """Rounds each linear alone."""
    weights = {name: layer.weights[f"{name}.weight"] for name in linear_names(layer.groups)}
    return QuantizedLayer({name: quantize_rows(weight, torch.float8_e4m3fn) for name, weight in weights.items()})


def _format(bits: int, group_size: int) -> CompressedTensors:
    return make_w8a8("float")


METHOD = Method("fp8", (8,), _format, grouped=False, walk="none", quantize=quantize)
