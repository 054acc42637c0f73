"""The chosen matmul, and then the chosen swiglu on what it wrote.

Wins where the multiplication is a vendor's: its lead can exceed the 4TI elements that go to memory and back between the
two launches.
"""

from collections.abc import Callable

import torch

from tkernels import Variant


def composed(
    matmul: Callable[..., torch.Tensor], swiglu: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    return swiglu(matmul(x, weight))  # [T, H] -> [T, 2I] -> [T, I]


VARIANT = Variant(
    wins="where the best matmul is ahead by more than the traffic that the fusion saves",
    parts=("matmul", "swiglu"),
    part_axes={"matmul": {"M": "T", "N": "2*I", "K": "H", "bias": False}},
    function=composed,
    deterministic=True,
    batch_invariant=False,  # it is what its parts are
)
