"""The chosen matmul, and then the chosen gelu on what it wrote.

Wins where the multiplication is a vendor's: its lead can exceed the 2TI elements that go to memory and back between the
two launches.
"""

from collections.abc import Callable

import torch

from tkernels import Variant


def composed(
    matmul: Callable[..., torch.Tensor],
    gelu: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    tanh: bool = False,
) -> torch.Tensor:
    return gelu(matmul(x, weight, bias=bias), tanh=tanh)  # [T, H] -> [T, I] -> [T, I]


VARIANT = Variant(
    wins="where the best matmul is ahead by more than the traffic that the fusion saves",
    parts=("matmul", "gelu"),
    part_axes={"matmul": {"M": "T", "N": "I", "K": "H"}},
    function=composed,
    deterministic=True,
    batch_invariant=False,  # it is what its parts are
)
