"""layer_norm: out = (x - mean) / sqrt(variance + eps) * weight + bias, per row (Ba, Kiros and Hinton, 2016)."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, Int, Output, Scalar, Tensor, dtype_axis
from tkernels.inputs import LAYOUTS, ROW_KINDS, Draws, dtype_of

VALUES = (*ROW_KINDS, "shifted")
_SHIFT = 4.0
"""The mean of "shifted" rows, in standard deviations: a variance that is made as E[x^2] - E[x]^2 loses four bits."""

DRAWN = Constraint("H > 1 or values not in ('huge', 'outlier')")
"""One element has no variance. What is left of a huge one is the rounding of x / sqrt(eps), by which torch's own was
beyond the error rule in 12 of 80 draws in float16; with two elements or more it was so in none.
"""


def shifted(draws: Draws, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Values [T, H] around a mean far from 0.

    They lie on a grid, so that fp32 sums of them are exact in any order: otherwise the rounding of a mean, the same for
    all of its row, would decide by luck who is the more exact.
    """
    return (draws.grid_normal(shape, torch.float64) + _SHIFT).to(dtype)


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Layer norm of each row.

    Args:
        x: [T, H], any float dtype, free row stride.
        weight: [H], as x.
        bias: [H], as x.
        eps: Added to the variance, the mean squared distance from the mean; at least 0.

    Returns:
        out [T, H], as x.
    """
    centered = x - x.mean(dim=-1, keepdim=True)  # [T, H]
    variance = centered.square().mean(dim=-1, keepdim=True)  # [T, 1]
    return centered * torch.rsqrt(variance + eps) * weight + bias


def baseline(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    shape, dtype = (int(axes["T"]), int(axes["H"])), dtype_of(axes["activation"])
    x = shifted(draws, shape, dtype) if axes["values"] == "shifted" else draws.normal(shape, dtype, axes["values"])
    weight, bias = (draws.normal(shape[1:], dtype) for _ in range(2))
    return {
        "x": draws.laid_out(x, axes["layout"]),
        "weight": draws.laid_out(weight),
        "bias": draws.laid_out(bias),
        "eps": draws.epsilon(),
    }


def bytes_moved(case: Case) -> int:
    x, weight = case.inputs["x"], case.inputs["weight"]
    return 2 * int(x.numel() + weight.numel()) * int(x.element_size())


def flops(case: Case) -> int:
    return 7 * int(case.inputs["x"].numel())  # two sums, a difference, a square, and out's two products and sum


CONTRACT = Contract(
    name="layer_norm",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("T", 0, 2**31 - 1, (0, 1, 2, 3, 5), "tokens", batch=True, wide=(16,)),
        Int("H", 1, 65536, (1, 8, 31, 64, 100, 128, 257), "hidden size", wide=(1000, 1600, 4100)),
        dtype_axis("activation"),
        Choice("layout", LAYOUTS),
        Choice("values", VALUES),
    ),
    constraints=(DRAWN,),
    arguments={
        "x": Tensor("T H", "activation"),
        "weight": Tensor("H", "activation"),
        "bias": Tensor("H", "activation"),
        "eps": Scalar(float, low=0),
    },
    outputs={"out": Output("T H", "activation")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="row_per_program",
    benchmarks={  # GPT-2's smallest and largest
        f"T={tokens},H={hidden}": {"T": tokens, "H": hidden, "activation": "bfloat16"}
        for tokens, hidden in ((4096, 768), (1, 1600), (64, 1600), (4096, 1600), (8192, 4096))
    },
    batching=row_batching("x"),
)
