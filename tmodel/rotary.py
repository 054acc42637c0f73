"""Rotary positions: by how much a token's place turns its queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rope:
    """Turns the first `dim` dims of a head by position * theta^(-2i/dim), dim i paired with i + dim/2.

    Source: Su et al., RoFormer, 2021, section 3.4.2.
    """

    dim: int
    theta: float

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"rotary_dim is {self.dim}; it counts pairs of dims, so it must be even and at least 2")

    def tables(
        self, length: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the angles at positions 0 to length - 1, each [length, dim/2].

        Args:
            length: The positions that there are.
            dtype: Of the model. The tables are float32 for float32, float16 and bfloat16 (in half precision they would
                misplace distant tokens), float64 for float64.
            device: Where the tables lie.
        """
        # The angles are rounded to float32 in every dtype, because that is what the published checkpoints were trained
        # with and what transformers computes. Near position 10,000 the exact angle is up to 7e-4 radians away: that is
        # a different model.
        inverse_frequency = 1.0 / self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequency).double()  # [length, dim/2]
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        return angles.cos().to(device=device, dtype=kept), angles.sin().to(device=device, dtype=kept)
