"""torch.compile's RMSNorm."""

import torch

from experiments.peers.compiled import compiled, supports, wide
from tkernels import Variant


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    values = wide(x)
    scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)  # [T, 1]
    return (values * scale * wide(weight)).to(x.dtype)


_COMPILED = compiled(_norm)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The op."""
    out: torch.Tensor = _COMPILED(x, weight, eps)
    return out


VARIANT = Variant(wins="a peer", function=rms_norm, supports=supports, deterministic=True, batch_invariant=False)
