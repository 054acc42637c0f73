"""qk_norm_rope as transformers rounds it: cos and sin, the norm, each product, and their sum."""

import torch

from tkernels import Variant


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    angles = [torch.cat((table[positions],) * 2, dim=-1).unsqueeze(1).to(q.dtype) for table in (cos, sin)]
    for heads, weight in ((q, q_weight), (k, k_weight)):
        normed = heads
        if weight is not None:
            wide = heads.float()
            normed = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(heads.dtype)
        first, second = normed.chunk(2, dim=-1)
        heads.copy_(normed * angles[0] + torch.cat((-second, first), dim=-1) * angles[1])


VARIANT = Variant(wins="never", function=qk_norm_rope, deterministic=True, batch_invariant=True)
