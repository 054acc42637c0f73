"""matmul_gelu: the first half of a transformer's MLP that has no gate: a projection, its bias, and gelu."""

from typing import Any

import torch

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, Int, Output, Scalar, Tensor, dtype_axis
from tkernels.inputs import KINDS, LAYOUTS, Draws, dtype_of
from tkernels.ops.gelu import contract as gelu
from tkernels.ops.matmul import contract as matmul
from tkernels.ops.products import ROW_CLASSES


def reference(
    x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None, tanh: bool = False
) -> torch.Tensor:
    """out[t, i] = gelu(sum over h of x[t, h] weight[i, h], plus bias[i]).

    Args:
        x: [T, H], any float dtype, free row stride.
        weight: [I, H], as x, free row stride: one row per output feature.
        bias: [I], as x.
        tanh: By tanh, as GPT-2 was trained: see `gelu`.

    Returns:
        out [T, I], as x.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.
    """
    return gelu.reference(matmul.reference(x, weight, bias=bias), tanh=tanh)


def baseline(
    x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None, tanh: bool = False
) -> torch.Tensor:
    return gelu.baseline(matmul.baseline(x, weight, bias=bias), tanh=tanh)


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    tokens, width, inputs = int(axes["T"]), int(axes["I"]), int(axes["H"])
    dtype = dtype_of(axes["activation"])
    x, weight = draws.product_operands(tokens, width, inputs, axes["values"])
    bias = draws.grid_normal((width,), dtype, axes["values"]) if axes["bias"] else None
    return {
        "x": draws.laid_out(x.to(dtype), axes["layout"]),
        "weight": draws.laid_out(weight.to(dtype_of(axes["weight"])), axes["weight_layout"]),
        "bias": None if bias is None else draws.laid_out(bias),
        "tanh": bool(axes["tanh"]),
    }


def flops(case: Case) -> int:
    width, tokens = int(case.inputs["weight"].shape[0]), int(case.inputs["x"].shape[0])
    return matmul.flops(case) + gelu.FLOPS[case.inputs["tanh"]] * tokens * width


CONTRACT = Contract(
    name="matmul_gelu",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("T", 0, 2**31 - 1, (0, 2, 3, 17, 40, 1), "tokens", batch=True, wide=(16,), classes=ROW_CLASSES),
        Int("I", 1, 2**20, (1, 8, 31, 40, 72), "intermediate size", wide=(136,)),
        Int("H", 1, 2**24, (1, 8, 31, 64, 100, 257, 136), "hidden size", wide=(640,)),
        dtype_axis("activation"),
        dtype_axis("weight"),
        Choice("bias", (False, True)),
        Choice("tanh", (True, False)),
        Choice("layout", LAYOUTS, "of x"),
        Choice("weight_layout", LAYOUTS, "of weight"),
        Choice("values", KINDS),
    ),
    constraints=(Constraint("weight == activation"),),
    arguments={
        "x": Tensor("T H", "activation", read_wide=True),
        "weight": Tensor("I H", "weight", read_wide=True),
        "bias": Tensor("I", "activation", optional=True),
        "tanh": Scalar(bool, axis=True),
    },
    outputs={"out": Output("T I", "activation")},
    make_inputs=make_inputs,
    bytes_moved=matmul.bytes_moved,
    flops=flops,
    default="composed",
    benchmarks={  # GPT-2's smallest and largest
        f"T={tokens},I={width},H={hidden}": {
            "T": tokens,
            "I": width,
            "H": hidden,
            "activation": "bfloat16",
            "weight": "bfloat16",
            "bias": True,
            "tanh": True,
        }
        for tokens in (1, 16, 64, 128, 2048)
        for width, hidden in ((3072, 768), (6400, 1600))
    },
    batching=row_batching("x"),
    work="gemm",
)
