"""add_rms_norm: the residual sum of a transformer block and the norm that follows it, in one pass over memory."""

from typing import Any

import torch
import torch.nn.functional as F

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Contract, Int, Output, Scalar, Tensor, dtype_axis
from tkernels.inputs import LAYOUTS, ROW_KINDS, Draws, dtype_of


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Root-mean-square norm (Zhang and Sennrich, 2019) of each row of x + residual, and that sum.

    Args:
        x: [T, H], any float dtype, free row stride: what the block before computed.
        residual: [T, H], as x, with a row stride of its own. Not written.
        weight: [H], as x.
        eps: Added to the mean square, at least 0.

    Returns:
        out [T, H] and new_residual [T, H], as x, both new. The norm sees the sum before it is rounded.
    """
    new_residual = x + residual
    mean_square = new_residual.square().mean(dim=-1, keepdim=True)  # [T, 1]
    return new_residual * torch.rsqrt(mean_square + eps) * weight, new_residual


def baseline(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    new_residual = x + residual
    return F.rms_norm(new_residual, (x.shape[-1],), weight, eps), new_residual


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    tokens, hidden, dtype = int(axes["T"]), int(axes["H"]), dtype_of(axes["activation"])
    x = draws.normal((tokens, hidden), dtype, axes["values"])
    residual = draws.normal((tokens, hidden), dtype, axes["values"])
    weight = draws.normal((hidden,), dtype)
    return {
        "x": draws.laid_out(x, axes["layout"]),
        "residual": draws.laid_out(residual, axes["residual_layout"]),
        "weight": draws.laid_out(weight),
        "eps": draws.epsilon(),
    }


def bytes_moved(case: Case) -> int:
    x, weight = case.inputs["x"], case.inputs["weight"]
    return (4 * x.numel() + weight.numel()) * x.element_size()


def flops(case: Case) -> int:
    return 5 * int(case.inputs["x"].numel())


CONTRACT = Contract(
    name="add_rms_norm",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("T", 0, 2**31 - 1, (0, 1, 2, 3, 5), "tokens", batch=True, wide=(16,)),
        Int("H", 1, 65536, (1, 8, 31, 64, 100, 128, 257), "hidden size", wide=(1000, 2560, 4100)),
        dtype_axis("activation"),
        Choice("layout", LAYOUTS, "of x"),
        Choice("residual_layout", LAYOUTS, "of residual"),
        Choice("values", ROW_KINDS),
    ),
    arguments={
        "x": Tensor("T H", "activation"),
        "residual": Tensor("T H", "activation"),
        "weight": Tensor("H", "activation"),
        "eps": Scalar(float, low=0),
    },
    outputs={"out": Output("T H", "activation"), "new_residual": Output("T H", "activation")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="row_per_program",
    benchmarks={
        f"T={tokens},H={hidden}": {"T": tokens, "H": hidden, "activation": "bfloat16"}
        for tokens, hidden in ((4096, 1024), (1, 2560), (64, 2560), (4096, 2560), (8192, 4096))
    },
    batching=row_batching("x", "residual"),
)
