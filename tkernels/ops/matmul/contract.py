"""matmul: a linear layer with a dense weight."""

from typing import Any

import torch
import torch.nn.functional as F

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, Int, Output, Tensor, dtype_axis
from tkernels.inputs import KINDS, LAYOUTS, Draws, dtype_of


def reference(x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """out[m, n] = sum over k of x[m, k] * weight[n, k], plus bias[n].

    Args:
        x: [M, K], any float dtype, free row stride.
        weight: [N, K], as x, free row stride: one row per output feature, as checkpoints store it.
        bias: [N], as x.

    Returns:
        out [M, N], as x.
    """
    out = x @ weight.t()
    return out if bias is None else out + bias


def baseline(x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    tokens, outputs, inputs = int(axes["M"]), int(axes["N"]), int(axes["K"])
    dtype = dtype_of(axes["activation"])
    x, weight = draws.product_operands(tokens, outputs, inputs, axes["values"])
    bias = draws.grid_normal((outputs,), dtype, axes["values"]) if axes["bias"] else None
    return {
        "x": draws.laid_out(x.to(dtype), axes["layout"]),
        "weight": draws.laid_out(weight.to(dtype_of(axes["weight"])), axes["weight_layout"]),
        "bias": None if bias is None else draws.laid_out(bias),
    }


def bytes_moved(case: Case) -> int:
    x, weight, bias = (case.inputs[name] for name in ("x", "weight", "bias"))
    outputs, inputs = weight.shape
    elements = x.shape[0] * (inputs + outputs) + outputs * inputs + (outputs if bias is not None else 0)
    return int(elements * x.element_size())


def flops(case: Case) -> int:
    outputs, inputs = case.inputs["weight"].shape
    return 2 * int(case.inputs["x"].shape[0]) * int(outputs) * int(inputs)


CONTRACT = Contract(
    name="matmul",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("M", 0, 2**31 - 1, (0, 2, 3, 17, 40, 1), "tokens", batch=True, wide=(16,)),
        Int("N", 1, 2**24, (1, 8, 31, 40, 72), "output features", wide=(136,)),
        Int("K", 1, 2**24, (1, 8, 31, 64, 100, 257, 136), "input features", wide=(640,)),
        dtype_axis("activation"),
        dtype_axis("weight"),
        Choice("bias", (False, True)),
        Choice("layout", LAYOUTS, "of x"),
        Choice("weight_layout", LAYOUTS, "of weight"),
        Choice("values", KINDS),
    ),
    constraints=(Constraint("weight == activation"),),
    arguments={
        "x": Tensor("M K", "activation", copied_in_boxes=True),
        "weight": Tensor("N K", "weight", copied_in_boxes=True),
        "bias": Tensor("N", "activation", optional=True),
    },
    outputs={"out": Output("M N", "activation")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="persistent",
    benchmarks={
        f"M={tokens},N={outputs},K={inputs}": {
            "M": tokens,
            "N": outputs,
            "K": inputs,
            "activation": "bfloat16",
            "weight": "bfloat16",
            "bias": False,
        }
        for tokens in (1, 16, 64, 2048)
        for outputs, inputs in ((19456, 2560), (8192, 8192))
    },
    batching=row_batching("x"),
    work="gemm",
)
