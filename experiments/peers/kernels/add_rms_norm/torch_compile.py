"""torch.compile's sum and RMSNorm."""

import torch

from experiments.peers.compiled import compiled, supports, wide
from tkernels import Variant


def _add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = wide(x) + wide(residual)
    scale = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)  # [T, 1]
    return (total * scale * wide(weight)).to(x.dtype), total.to(x.dtype)


_COMPILED = compiled(_add_norm)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op."""
    out, new_residual = _COMPILED(x, residual, weight, eps)
    return out, new_residual


VARIANT = Variant(wins="a peer", function=add_rms_norm, supports=supports, deterministic=True, batch_invariant=False)
