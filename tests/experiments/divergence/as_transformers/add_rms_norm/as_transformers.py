"""add_rms_norm as transformers rounds it: the sum, the normalized values, and their products with the weight."""

import torch

from tkernels import Variant


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + x
    wide = total.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype), total


VARIANT = Variant(wins="never", function=add_rms_norm, deterministic=True, batch_invariant=True)
