"""gelu: the activation of GPT-2's and BERT's MLPs (Hendrycks and Gimpel, Gaussian Error Linear Units, 2016)."""

import math
from typing import Any

import torch
import torch.nn.functional as F

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, Int, Output, Scalar, Tensor, dtype_axis
from tkernels.inputs import LAYOUTS, ROW_KINDS, Draws, dtype_of

FLOPS = {False: 5, True: 9}
"""Of one element, by `tanh`."""


def reference(x: torch.Tensor, *, tanh: bool = False) -> torch.Tensor:
    """Each x times the share of a standard normal distribution that lies below it.

    Args:
        x: [T, I], any float dtype, free row stride.
        tanh: Take the paper's approximation of that share, (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, which GPT-2
            was trained with.

    Returns:
        out [T, I], as x.
    """
    if tanh:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def baseline(x: torch.Tensor, *, tanh: bool = False) -> torch.Tensor:
    return F.gelu(x, approximate="tanh" if tanh else "none")


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    # Huge values saturate the share at both ends.
    x = draws.normal((int(axes["T"]), int(axes["I"])), dtype_of(axes["activation"]), axes["values"])
    return {"x": draws.laid_out(x, axes["layout"]), "tanh": bool(axes["tanh"])}


def bytes_moved(case: Case) -> int:
    x = case.inputs["x"]
    return 2 * int(x.numel()) * int(x.element_size())


def flops(case: Case) -> int:
    return FLOPS[case.inputs["tanh"]] * int(case.inputs["x"].numel())


CONTRACT = Contract(
    name="gelu",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("T", 0, 2**31 - 1, (0, 1, 2, 3, 5), "tokens", batch=True, wide=(2,)),
        Int("I", 1, 2**20, (1, 8, 33, 100, 257, 1030), "width", wide=(6400,)),
        dtype_axis("activation"),
        Choice("tanh", (True, False)),
        Choice("layout", LAYOUTS),
        Choice("values", ROW_KINDS),
    ),
    # A huge element alone may be all in the function's tail, of which fp32 formulas that are right leave more or less.
    constraints=(Constraint("I > 1 or values != 'huge'"),),
    arguments={"x": Tensor("T I", "activation"), "tanh": Scalar(bool, axis=True)},
    outputs={"out": Output("T I", "activation")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="tile_per_program",
    benchmarks={  # GPT-2's smallest and largest
        f"T={tokens},I={width}": {"T": tokens, "I": width, "activation": "bfloat16", "tanh": True}
        for tokens, width in ((1, 3072), (64, 3072), (4096, 3072), (4096, 6400))
    },
    batching=row_batching("x"),
)
