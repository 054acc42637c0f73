"""dequant_gemm: a linear layer whose weight is stored as group-wise 4-bit codes."""

from typing import Any

import torch
import torch.nn.functional as F

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, Int, Output, Tensor, dtype_axis
from tkernels.inputs import KINDS, LAYOUTS, Draws, dtype_of
from tkernels.ops.dequant_gemm.weight import (
    ORDERS,
    QuantizedWeight,
    QuantizedWeightArgument,
    dequantize,
    interleaved,
    pack,
)


def reference(x: torch.Tensor, weight: QuantizedWeight, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """out[m, n] = sum over k of x[m, k] * W[n, k], plus bias[n].

    Args:
        x: [M, K], any float dtype, free row stride.
        weight: N outputs, K inputs (see QuantizedWeight), its scales' dtype x's.
        bias: [N], as x.

    Returns:
        out [M, N], as x.
    """
    out = x @ dequantize(weight, x.dtype).t()
    return out if bias is None else out + bias


def baseline(x: torch.Tensor, weight: QuantizedWeight, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, dequantize(weight, x.dtype), bias)


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    tokens, outputs, inputs = int(axes["M"]), int(axes["N"]), int(axes["K"])
    groups, dtype = inputs // int(axes["group_size"]), dtype_of(axes["activation"])
    codes, zeros = draws.integers(0, 15, (inputs, outputs)), draws.integers(0, 15, (groups, outputs))
    # Both ends of the range in every draw: a sign that leaks from the top code or a zero-point less one must show.
    codes[:, 0], codes[:, -1] = 15, 0
    zeros[:, 0], zeros[:, -1] = 0, 15
    # So that outputs are of x's size whatever K is: codes less zero-points are uniform, of variance 42.
    scales = (draws.normal((groups, outputs), torch.float64).abs() + 0.1) / (6 * inputs**0.5)
    weight = QuantizedWeight(
        pack(codes, dim=0).to(device),
        scales.to(dtype_of(axes["weight"])).to(device),
        None if axes["symmetric"] else pack(zeros, dim=-1).to(device),
        int(axes["bits"]),
        int(axes["group_size"]),
    )
    if axes["order"] == "interleaved":
        weight = interleaved(weight)
    # The codes' stride taken for the scales', which have as many columns, must show.
    weight = weight.map_tensors(
        lambda part: draws.laid_out(part, axes["weight_layout"], padding=5 if part.is_floating_point() else 3)
    )
    x = draws.laid_out(draws.normal((tokens, inputs), dtype, axes["values"]), axes["layout"])
    # Of the product's size: a GEMM that starts its sum from a far larger bias loses the product's own digits.
    bias = draws.laid_out(draws.normal((outputs,), dtype, axes["values"]), "contiguous") if axes["bias"] else None
    return {"x": x, "weight": weight, "bias": bias}


def bytes_moved(case: Case) -> int:
    x, weight, bias = (case.inputs[name] for name in ("x", "weight", "bias"))
    elements = x.shape[0] * sum(weight.shape) + (bias.numel() if bias is not None else 0)
    return int(elements * x.element_size() + weight.nbytes)


def flops(case: Case) -> int:
    outputs, inputs = case.inputs["weight"].shape
    return 2 * int(case.inputs["x"].shape[0]) * outputs * inputs


CONTRACT = Contract(
    name="dequant_gemm",
    reference=reference,
    baseline=baseline,
    axes=(
        # 1 last: compiling ahead of time takes the last draw, and that one every variant supports.
        Int("M", 0, 2**31 - 1, (0, 2, 3, 17, 33, 1), "tokens", batch=True, wide=(1, 16)),
        Int("N", 8, 2**24, (8, 16, 40, 72), "output features", wide=(136,)),
        Int("K", 8, 2**24, (8, 64, 72, 136, 256), "input features", wide=(1280,)),
        Choice("bits", (4,)),
        Int("group_size", 8, 2**24, (8, 16, 32, 64, 72, 128, 136, 256), "input features that share a scale"),
        dtype_axis("activation"),
        dtype_axis("weight"),
        Choice("symmetric", (False, True), "whether zero-points are all 8 and not stored"),
        # Interleaved last, for the same reason.
        Choice("order", ORDERS, "of the codes in a word: a checkpoint's, or as `prepare` makes it"),
        Choice("bias", (False, True)),
        Choice("layout", LAYOUTS, "of x"),
        Choice("weight_layout", LAYOUTS, "of the weight's parts"),
        Choice("values", KINDS),
    ),
    constraints=(
        Constraint("N % 8 == 0"),
        Constraint("K % 8 == 0"),
        Constraint("group_size % 8 == 0"),
        Constraint("K % group_size == 0"),
        Constraint("weight == activation"),
    ),
    arguments={
        "x": Tensor("M K", "activation"),
        "weight": QuantizedWeightArgument(),
        "bias": Tensor("N", "activation", optional=True),
    },
    outputs={"out": Output("M N", "activation")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="auto",
    benchmarks={
        f"M={tokens},N={outputs},K={inputs},g=128": {
            "M": tokens,
            "N": outputs,
            "K": inputs,
            "bits": 4,
            "group_size": 128,
            "activation": "bfloat16",
            "weight": "bfloat16",
            "symmetric": False,
            "order": "interleaved",
            "bias": False,
        }
        for tokens in (1, 16, 64, 128, 2048)
        # Qwen3-4B's qkv, attention output, gate-up and down projections, and the square of the published figures.
        for outputs, inputs in ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728), (8192, 8192))
    },
    batching=row_batching("x"),
)
