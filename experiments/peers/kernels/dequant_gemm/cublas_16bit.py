"""torch's matmul (cuBLAS) on the dense 16-bit weight: what quantization has to beat."""

from typing import Any

import torch
import torch.nn.functional as F

from experiments.peers.variants import peer_variant
from tkernels.quantized.weight import QuantizedWeight, dequantize


def prepare(weight: QuantizedWeight) -> torch.Tensor:
    """The dense weight [N, K], four times the bytes."""
    return dequantize(weight).contiguous()


def dequant_gemm(x: torch.Tensor, weight: Any, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The op, on the weight as it is or as prepared."""
    dense = weight if isinstance(weight, torch.Tensor) else prepare(weight)
    return F.linear(x, dense.to(x.dtype), bias)


VARIANT = peer_variant(None, dequant_gemm, prepare=prepare, wins="a peer: many rows, where arithmetic is the limit")
