"""moe_mlp: the MLP of a mixture of experts: each token's chosen experts, added up."""

from collections.abc import Sequence
from typing import Any

import torch

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, Int, Output, Tensor, Value, dtype_axis
from tkernels.inputs import KINDS, LAYOUTS, Draws, dtype_of
from tkernels.ops.experts import ROUTINGS, distinct_experts, draw_experts, layout_of_weights, tile_of_pairs
from tkernels.ops.grouped_matmul import contract as grouped_matmul
from tkernels.ops.grouped_matmul._argument import (
    BITS,
    CODING,
    DENSE_BITS,
    ORDER,
    ExpertWeights,
    Weight,
    coding_axes,
    coding_rules,
)
from tkernels.ops.grouped_matmul.contract import TOKEN_CLASSES, draw_experts_weight
from tkernels.ops.served_models import SERVED_MIXTURES
from tkernels.ops.sort_by_expert import contract as sort_by_expert
from tkernels.ops.swiglu import contract as swiglu
from tkernels.ops.swiglu.contract import LIMIT, LIMITS
from tkernels.quantized.codes import ORDERS
from tkernels.quantized.row_codes import BLOCK
from tkernels.quantized.stacked import StackedWeight
from tkernels.quantized.stacked_scaled import StackedScaledWeight


def reference(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    limit: float | None = None,
) -> torch.Tensor:
    """out[t] = sum over k of weights[t, k] * mlp(x[t]) of expert e = experts[t, k], where the MLP of an expert is
    down[e] @ swiglu(gate_up[e] @ x[t] + gate_up_bias[e]) + down_bias[e].

    Args:
        x: [T, H], any float dtype, free row stride.
        experts: [T, K] int32 in [-1, E), free row stride, as `route` makes them; -1: the pair is no part of the sum.
        weights: [T, K] float32, free row stride: what each expert counts.
        gate_up: [E, 2 I, H], as x, free strides but the last: the gate's I rows, then the up projection's; or a
            StackedWeight or StackedScaledWeight of E experts, 2 I outputs and H inputs.
        down: [E, H, I], likewise; or stored as gate_up.
        gate_up_bias: [E, 2 I], as x.
        down_bias: [E, H], as x.
        limit: swiglu's, for the clamped form.

    Returns:
        out [T, H], as x: the sum in the order of k, rounded once. Of a token without experts zeros.

    Source: Shazeer et al., Outrageously Large Neural Networks, 2017.
    """
    return _composed(grouped_matmul.reference, swiglu.reference, x, experts, weights, gate_up, down,
                     (gate_up_bias, down_bias), limit)  # fmt: skip


def baseline(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    limit: float | None = None,
) -> torch.Tensor:
    return _composed(grouped_matmul.baseline, swiglu.baseline, x, experts, weights, gate_up, down,
                     (gate_up_bias, down_bias), limit)  # fmt: skip


def _composed(
    multiply: Any,
    activate: Any,
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    biases: Sequence[torch.Tensor | None],
    limit: float | None,
) -> torch.Tensor:
    num_experts = int(gate_up.shape[0])
    tile = tile_of_pairs(experts.numel(), num_experts)
    order, starts, *tiles = sort_by_expert.reference(experts, num_experts, tile)
    routing = (experts, order, starts, tile, *tiles)
    pairs = activate(multiply(x, gate_up, *routing, bias=biases[0]), limit=limit)  # [T K, I]
    return multiply(pairs, down, *routing, bias=biases[1], combine=weights)


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    tokens, top_k, experts, hidden, width = (int(axes[name]) for name in ("T", "K", "E", "H", "I"))
    dtype = dtype_of(axes["activation"])
    x, dense = draws.product_operands(tokens, experts * 2 * width, hidden, axes["values"])
    made: dict[str, Weight] = {}
    if axes["values"] == "huge":  # a huge up beside a huge gate would overflow fp16 in any implementation
        dense.view(experts, 2, width, hidden)[:, 1] /= 128
    for name, shape in {"gate_up": (experts, 2 * width, hidden), "down": (experts, hidden, width)}.items():
        if axes["bits"] == DENSE_BITS:
            values = dense if name == "gate_up" else draws.product_operands(0, experts * hidden, width)[1]
            made[name] = draws.laid_out(values.view(shape).to(dtype), axes["layout"])
        else:
            coded = draw_experts_weight({**axes, "weight_layout": axes["layout"]}, draws, shape, f"{name}_")
            if name == "gate_up" and axes["values"] == "huge":
                _ups_of(coded, width).div_(128)
            made[name] = coded
    chosen = draw_experts(draws, tokens, top_k, experts, str(axes["routing"]), dropped=bool(axes["dropped"]))
    weights = draws.normal((tokens, top_k), torch.float32).abs()
    arguments: dict[str, Any] = {
        "x": draws.laid_out(x.to(dtype), axes["layout"]),
        "experts": draws.laid_out(chosen, axes["layout"]),
        "weights": draws.laid_out(weights, layout_of_weights(str(axes["layout"]), seed)),
        **made,
        "limit": float(axes["limit"]) or None,
    }
    for name, outputs in (("gate_up_bias", 2 * width), ("down_bias", hidden)):
        bias = draws.normal((experts, outputs), dtype) if axes[name] else None
        arguments[name] = None if bias is None else draws.laid_out(bias, axes["layout"])
    return arguments


def _ups_of(weight: StackedWeight | StackedScaledWeight, width: int) -> torch.Tensor:
    """The scales of the up projection."""
    if isinstance(weight, StackedScaledWeight):
        return weight.scales[:, width // BLOCK :]
    return weight.scales[..., width:]


def bytes_moved(case: Case) -> int:
    """The distinct experts' weights, x, the result, and the routing."""
    x, experts = case.inputs["x"], case.inputs["experts"]
    parts = [case.inputs[name] for name in ("gate_up", "down", "gate_up_bias", "down_bias")]
    of_one = sum(part.nbytes // part.shape[0] for part in parts if part is not None)
    return int(distinct_experts(experts) * of_one + 2 * x.numel() * x.element_size() + 8 * experts.numel())


def flops(case: Case) -> int:
    """Two products, the first with two halves."""
    _, hidden, width = case.inputs["down"].shape
    return 6 * int((case.inputs["experts"] >= 0).sum()) * int(hidden) * int(width)


def _benchmark(tokens: int, sizes: tuple[int, int, int, int], bits: int, group_size: int = 0) -> dict[str, Value]:
    experts, top_k, hidden, width = sizes
    point: dict[str, Value] = {"T": tokens, "K": top_k, "E": experts, "H": hidden, "I": width}
    point |= {"bits": bits, "coding": "uniform"}
    for prefix in ("gate_up_", "down_"):
        coding = {"group_size": group_size, "padding": 0, "symmetric": True, "permuted": False}
        point |= {f"{prefix}{name}": value for name, value in coding.items()}
    dtypes: dict[str, Value] = {"activation": "bfloat16", "weight": "bfloat16"}
    plain: dict[str, Value] = {"gate_up_bias": False, "down_bias": False, "limit": 0}
    return point | dtypes | plain | {"routing": "uniform", "dropped": False}


def _benchmarks() -> dict[str, dict[str, Value]]:
    """The dense ones last, as the last is the typical one."""
    dense = {
        "Mixtral-8x7B": (1, 16, 256, 4096),
        "Qwen3-30B-A3B": (1, 8, 64, 512, 4096, 32768),
    }
    published: dict[str, Value] = {"coding": "e2m1", "gate_up_bias": True, "down_bias": True, "limit": 7}
    points = {
        f"T={tokens},gpt-oss-20b,MXFP4": _benchmark(tokens, SERVED_MIXTURES["gpt-oss-20b"], 4, 32) | published
        for tokens in (1, 16, 256, 4096)
    }
    blocks: dict[str, Value] = {"coding": "e4m3"}
    points |= {
        f"T={tokens},Qwen3-30B-A3B,FP8": _benchmark(tokens, SERVED_MIXTURES["Qwen3-30B-A3B"], 8, 128) | blocks
        for tokens in (1, 8, 64, 512, 4096)
    }
    points |= {
        f"T={tokens},Qwen3-30B-A3B,W4": _benchmark(tokens, SERVED_MIXTURES["Qwen3-30B-A3B"], 4, 128)
        for tokens in (1, 8, 64, 512, 4096)
    }
    return points | {
        f"T={size},{name}": _benchmark(size, SERVED_MIXTURES[name], DENSE_BITS)
        for name, tokens in dense.items()
        for size in tokens
    }


CONTRACT = Contract(
    name="moe_mlp",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("T", 0, 2**31 - 1, (0, 1, 2, 3, 9, 20), "tokens", batch=True, wide=(6,), classes=TOKEN_CLASSES),
        Int("K", 1, 64, (1, 2, 4), "experts of a token"),
        Int("E", 1, 2**12, (4, 5, 8, 1), "experts"),
        BITS,
        CODING,
        *coding_axes(Int("H", 1, 2**24, (8, 64, 37, 128, 72), "hidden size", wide=(136,)), "gate_up_"),
        *coding_axes(
            Int("I", 1, 2**23, (8, 32, 37, 128, 40), "intermediate size of an expert", wide=(72, 256)), "down_"
        ),
        ORDER,
        dtype_axis("activation"),
        dtype_axis("weight"),
        Choice("gate_up_bias", (False, True)),
        Choice("down_bias", (False, True)),
        LIMITS,
        Choice("dropped", (False, True), "whether some pairs have no expert"),
        Choice("routing", ROUTINGS),
        Choice("layout", LAYOUTS),
        Choice("values", KINDS),
    ),
    constraints=(
        Constraint("K <= E"),
        Constraint("T * K < 2**31"),
        *coding_rules("H", "gate_up_"),
        *coding_rules("I", "down_"),
        Constraint("weight == activation"),
    ),
    arguments={
        "x": Tensor("T H", "activation", read_wide=True),
        "experts": Tensor("T K", "int32"),
        "weights": Tensor("T K", "float32"),
        "gate_up": ExpertWeights("E 2*I H", "gate_up_"),
        "down": ExpertWeights("E H I", "down_"),
        "gate_up_bias": Tensor("E 2*I", "activation", optional=True),
        "down_bias": Tensor("E H", "activation", optional=True),
        "limit": LIMIT,
    },
    outputs={"out": Output("T H", "activation")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="auto",
    benchmarks=_benchmarks(),
    inspected={"e2m1": {"coding": "e2m1"}},
    loaded={"order": ORDERS[0]},
    batching=row_batching("x", "experts", "weights"),
    work="gemm",
    sections=("sort", "up", "down"),
)
