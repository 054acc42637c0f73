"""torch.compile's sum and RMSNorm."""

import torch

from experiments.peers.compiled import compiled_variant, wide


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op."""
    total = wide(x) + wide(residual)
    scale = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)  # [T, 1]
    return (total * scale * wide(weight)).to(x.dtype), total.to(x.dtype)


VARIANT = compiled_variant(add_rms_norm)
