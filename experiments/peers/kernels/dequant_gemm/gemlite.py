"""GemLite's 4-bit linear (Triton), packed and autotuned by itself."""

from typing import Any

import torch

from experiments.peers.variants import peer_variant, refuse_other_codes
from tkernels.quantized.weight import QuantizedWeight, unpack_codes


def prepare(weight: QuantizedWeight) -> Any:
    """A GemLite layer of the same codes, scales and zero-points."""
    from gemlite.helper import A16W4_HQQ_INT

    assert weight.scales is not None, "`supports` refuses a table"
    codes = unpack_codes(weight).t().contiguous()  # [N, K]
    scales = weight.scales.t().contiguous()  # [N, G]
    points = torch.tensor(8, device=scales.device) if weight.zeros is None else weight.zeros.t()  # [N, G]
    zeros = points.expand_as(scales).to(scales.dtype).contiguous()
    helper = A16W4_HQQ_INT(device=str(scales.device), dtype=scales.dtype)
    return helper.from_weights(codes, scales.reshape(-1, 1), zeros.reshape(-1, 1))


def dequant_gemm(x: torch.Tensor, weight: Any, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The op, on the weight as it is or as prepared."""
    layer = prepare(weight) if isinstance(weight, QuantizedWeight) else weight
    out: torch.Tensor = layer(x)
    return out if bias is None else out + bias


VARIANT = peer_variant("gemlite", dequant_gemm, prepare=prepare, supports=refuse_other_codes)
