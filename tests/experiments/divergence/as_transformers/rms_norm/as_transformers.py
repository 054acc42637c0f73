"""rms_norm as transformers rounds it: the normalized values, and then their products with the weight."""

import torch

from tkernels import Variant


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


VARIANT = Variant(wins="never", function=rms_norm, deterministic=True, batch_invariant=True)
