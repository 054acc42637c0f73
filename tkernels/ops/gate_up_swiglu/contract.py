"""gate_up_swiglu: the first half of a transformer's MLP: one projection to gate and up, and silu(gate) * up."""

from typing import Any

import torch

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, Int, Output, Tensor, dtype_axis
from tkernels.inputs import KINDS, LAYOUTS, Draws, dtype_of
from tkernels.ops.matmul import contract as matmul
from tkernels.ops.products import ROW_CLASSES
from tkernels.ops.swiglu import contract as swiglu


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """out[t, i] = silu(gate) * up, with gate = sum over h of x[t, h] weight[i, h] and up the same with weight[I + i].

    Args:
        x: [T, H], any float dtype, free row stride.
        weight: [2 I, H], as x, free row stride: the gate's I rows, then the up projection's.

    Returns:
        out [T, I], as x.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.
    """
    return swiglu.reference(matmul.reference(x, weight))


def baseline(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return swiglu.baseline(matmul.baseline(x, weight))


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    tokens, width, inputs = int(axes["T"]), int(axes["I"]), int(axes["H"])
    x, weight = draws.product_operands(tokens, 2 * width, inputs, axes["values"])
    if axes["values"] == "huge":  # a huge up beside a huge gate would overflow fp16 in any implementation
        weight[width:] /= 128
    return {
        "x": draws.laid_out(x.to(dtype_of(axes["activation"])), axes["layout"]),
        "weight": draws.laid_out(weight.to(dtype_of(axes["weight"])), axes["weight_layout"]),
    }


def bytes_moved(case: Case) -> int:
    x, weight = case.inputs["x"], case.inputs["weight"]
    return int((x.numel() + weight.numel() + x.shape[0] * weight.shape[0] // 2) * x.element_size())


def flops(case: Case) -> int:
    tokens, (outputs, inputs) = int(case.inputs["x"].shape[0]), case.inputs["weight"].shape
    return 2 * tokens * int(outputs) * int(inputs) + 5 * tokens * int(outputs) // 2


CONTRACT = Contract(
    name="gate_up_swiglu",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("T", 0, 2**31 - 1, (0, 2, 3, 17, 40, 1), "tokens", batch=True, wide=(16,), classes=ROW_CLASSES),
        Int("I", 1, 2**23, (1, 8, 31, 40, 72), "intermediate size", wide=(136,)),
        Int("H", 1, 2**24, (1, 8, 31, 64, 100, 257, 136), "hidden size", wide=(640,)),
        dtype_axis("activation"),
        dtype_axis("weight"),
        Choice("layout", LAYOUTS, "of x"),
        Choice("weight_layout", LAYOUTS, "of weight"),
        Choice("values", KINDS),
    ),
    constraints=(Constraint("weight == activation"),),
    arguments={
        "x": Tensor("T H", "activation", read_wide=True),
        "weight": Tensor("2*I H", "weight", read_wide=True),
    },
    outputs={"out": Output("T I", "activation")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    # One launch for two, and 4TI elements less. At one token of Qwen3-4B it has 152 programs for 132 multiprocessors.
    default="paired_tiles",
    benchmarks={
        f"T={tokens},I={width},H={hidden}": {
            "T": tokens,
            "I": width,
            "H": hidden,
            "activation": "bfloat16",
            "weight": "bfloat16",
        }
        for tokens in (1, 16, 64, 128, 2048)
        for width, hidden in ((9728, 2560), (14336, 4096))
    },
    batching=row_batching("x"),
    work="gemm",
)
