"""torch's matmul (cuBLAS) on dense 16-bit tokens and weight: what 8-bit codes have to beat."""

import torch
import torch.nn.functional as F

from experiments.peers.variants import MadeOnce, peer_variant
from tkernels.quantized.row_codes import BLOCK
from tkernels.quantized.scaled_weight import ScaledWeight, dequantize

_DENSE: dict[torch.dtype, MadeOnce[tuple[torch.Tensor, torch.Tensor]]] = {
    torch.float16: MadeOnce(),
    torch.bfloat16: MadeOnce(),
}
"""Tokens [M, K] and weight [N, K] of the calls seen last; a timed call makes neither."""


def block_scaled_matmul(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The op, on what its codes stand for."""

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        x = q.float() * scale.repeat_interleave(BLOCK, 1)  # [M, K]
        return x.to(out_dtype), dequantize(ScaledWeight(weight, weight_scale), out_dtype)

    arguments = {"q": q, "scale": scale, "weight": weight, "weight_scale": weight_scale}
    return F.linear(*_DENSE[out_dtype].get(arguments, make), bias)


VARIANT = peer_variant(None, block_scaled_matmul, wins="a peer: nothing but 16-bit floats")
