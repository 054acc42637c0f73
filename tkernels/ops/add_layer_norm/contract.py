"""add_layer_norm: the residual sum of a transformer block and the layer norm after it, in one pass over memory."""

from typing import Any

import torch
import torch.nn.functional as F

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Contract, Int, Output, Scalar, Tensor, dtype_axis
from tkernels.inputs import LAYOUTS, Draws, dtype_of
from tkernels.ops.layer_norm import contract as layer_norm


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Layer norm (Ba, Kiros and Hinton, 2016) of each row of x + residual, and that sum.

    Args:
        x: [T, H], any float dtype, free row stride: what the block before computed.
        residual: [T, H], as x, with a row stride of its own. Not written.
        weight: [H], as x.
        bias: [H], as x.
        eps: Added to the variance, at least 0.

    Returns:
        out [T, H] and new_residual [T, H], as x, both new. The norm sees the sum before it is rounded.
    """
    new_residual = x + residual
    return layer_norm.reference(new_residual, weight, bias, eps), new_residual


def baseline(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    new_residual = x + residual
    return F.layer_norm(new_residual, (x.shape[-1],), weight, bias, eps), new_residual


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    shape, dtype = (int(axes["T"]), int(axes["H"])), dtype_of(axes["activation"])
    if axes["values"] == "shifted":  # as a residual stream may be, where what is added to it is not
        x, residual = draws.grid_normal(shape, dtype), layer_norm.shifted(draws, shape, dtype)
    else:
        x, residual = (draws.normal(shape, dtype, axes["values"]) for _ in range(2))
    weight, bias = (draws.normal(shape[1:], dtype) for _ in range(2))
    return {
        "x": draws.laid_out(x, axes["layout"]),
        "residual": draws.laid_out(residual, axes["residual_layout"]),
        "weight": draws.laid_out(weight),
        "bias": draws.laid_out(bias),
        "eps": draws.epsilon(),
    }


def bytes_moved(case: Case) -> int:
    x, weight = case.inputs["x"], case.inputs["weight"]
    return (4 * int(x.numel()) + 2 * int(weight.numel())) * int(x.element_size())


def flops(case: Case) -> int:
    return 8 * int(case.inputs["x"].numel())


CONTRACT = Contract(
    name="add_layer_norm",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("T", 0, 2**31 - 1, (0, 1, 2, 3, 5), "tokens", batch=True, wide=(16,)),
        Int("H", 1, 65536, (1, 8, 31, 64, 100, 128, 257), "hidden size", wide=(1000, 1600, 4100)),
        dtype_axis("activation"),
        Choice("layout", LAYOUTS, "of x"),
        Choice("residual_layout", LAYOUTS, "of residual"),
        Choice("values", layer_norm.VALUES),
    ),
    constraints=(layer_norm.DRAWN,),
    arguments={
        "x": Tensor("T H", "activation"),
        "residual": Tensor("T H", "activation"),
        "weight": Tensor("H", "activation"),
        "bias": Tensor("H", "activation"),
        "eps": Scalar(float, low=0),
    },
    outputs={"out": Output("T H", "activation"), "new_residual": Output("T H", "activation")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="row_per_program",
    benchmarks=layer_norm.CONTRACT.benchmarks,
    batching=row_batching("x", "residual"),
)
