"""torch.compile's RMSNorm."""

import torch

from experiments.peers.compiled import compiled_variant, wide


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The op."""
    values = wide(x)
    scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)  # [T, 1]
    return (values * scale * wide(weight)).to(x.dtype)


VARIANT = compiled_variant(rms_norm)
