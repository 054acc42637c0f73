"""rms_norm: out = x / sqrt(mean(x^2) + eps) * weight, per row (Zhang and Sennrich, 2019)."""

from typing import Any

import torch
import torch.nn.functional as F

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Contract, Int, Output, Scalar, Tensor, dtype_axis
from tkernels.inputs import LAYOUTS, ROW_KINDS, Draws, dtype_of


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm of each row.

    Args:
        x: [T, H], any float dtype, free row stride.
        weight: [H], as x.
        eps: Added to the mean square, at least 0.

    Returns:
        out [T, H], as x.
    """
    mean_square = x.square().mean(dim=-1, keepdim=True)  # [T, 1]
    return x * torch.rsqrt(mean_square + eps) * weight


def baseline(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    tokens, hidden, dtype = int(axes["T"]), int(axes["H"]), dtype_of(axes["activation"])
    x = draws.normal((tokens, hidden), dtype, axes["values"])
    weight = draws.normal((hidden,), dtype)
    return {"x": draws.laid_out(x, axes["layout"]), "weight": draws.laid_out(weight), "eps": draws.epsilon()}


def bytes_moved(case: Case) -> int:
    x, weight = case.inputs["x"], case.inputs["weight"]
    return (2 * x.numel() + weight.numel()) * x.element_size()


def flops(case: Case) -> int:
    return 4 * int(case.inputs["x"].numel())


CONTRACT = Contract(
    name="rms_norm",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("T", 0, 2**31 - 1, (0, 1, 2, 3, 5), "tokens", batch=True, wide=(16,)),
        Int("H", 1, 65536, (1, 8, 31, 64, 100, 128, 257), "hidden size", wide=(1000, 2560, 4100)),
        dtype_axis("activation"),
        Choice("layout", LAYOUTS),
        Choice("values", ROW_KINDS),
    ),
    arguments={"x": Tensor("T H", "activation"), "weight": Tensor("H", "activation"), "eps": Scalar(float, low=0)},
    outputs={"out": Output("T H", "activation")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="row_per_program",
    benchmarks={
        f"T={tokens},H={hidden}": {"T": tokens, "H": hidden, "activation": "bfloat16"}
        # Qwen3's sizes, and Nemotron-4 340B's width.
        for tokens, hidden in ((4096, 1024), (1, 2560), (64, 2560), (64, 18432), (4096, 2560), (8192, 4096))
    },
    batching=row_batching("x"),
)
