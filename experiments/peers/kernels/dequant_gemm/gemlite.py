"""GemLite's 4-bit linear (Triton), packed and autotuned by itself."""

from typing import Any

import torch

from experiments.peers.installed import needs
from tkernels import Variant
from tkernels.ops.dequant_gemm.weight import QuantizedWeight, unpack


def prepare(weight: QuantizedWeight) -> Any:
    """A GemLite layer of the same codes, scales and zero-points."""
    from gemlite.helper import A16W4_HQQ_INT

    codes = unpack(weight.packed, dim=0).t().to(torch.uint8).contiguous()  # [N, K]
    scales = weight.scales.t().contiguous()  # [N, G]
    points = 8 if weight.zeros is None else unpack(weight.zeros, dim=-1).t()  # [N, G]
    zeros = torch.as_tensor(points, device=scales.device).expand_as(scales).to(scales.dtype).contiguous()
    helper = A16W4_HQQ_INT(device=str(scales.device), dtype=scales.dtype)
    return helper.from_weights(codes, scales.reshape(-1, 1), zeros.reshape(-1, 1))


def dequant_gemm(x: torch.Tensor, weight: Any, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The op, on the weight as it is or as prepared."""
    layer = prepare(weight) if isinstance(weight, QuantizedWeight) else weight
    out: torch.Tensor = layer(x)
    return out if bias is None else out + bias


VARIANT = Variant(
    wins="a peer",
    function=dequant_gemm,
    prepare=prepare,
    supports=needs("gemlite"),
    deterministic=False,
    batch_invariant=False,
)
