"""Rotary position tables: the cosines and sines that `qk_norm_rope` reads."""

from __future__ import annotations

import torch


def rotary_tables(
    rotary_dim: int, theta: float, length: int, *, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * theta^(-2i/R), each [L, R/2] with L = `length` and R = `rotary_dim`.

    `dtype` is float32 for float32, float16 and bfloat16 models (a table in half precision would misplace
    distant tokens) and float64 for the float64 model. Source: Su et al., RoFormer, 2021, section 3.4.2.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim is {rotary_dim}; it counts pairs of dims, so it must be even and at least 2")
    # The angles are rounded to float32 in every dtype, because that is what the published checkpoints were trained
    # with and what transformers computes. Near position 10,000 the exact angle is up to 7e-4 radians away: that is a
    # different model.
    inverse_frequency = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)  # [R/2]
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequency).double()  # [L, R/2]
    return angles.cos().to(device=device, dtype=dtype), angles.sin().to(device=device, dtype=dtype)
