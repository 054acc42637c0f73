"""swiglu: the gate of a transformer's MLP, silu(gate) * up (Shazeer, GLU Variants Improve Transformer, 2020)."""

from typing import Any

import torch
import torch.nn.functional as F

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, Int, Output, Scalar, Tensor, dtype_axis
from tkernels.inputs import LAYOUTS, ROW_KINDS, Draws, dtype_of
from tkernels.ops.activations import CLAMPED_GATE


def reference(gate_up: torch.Tensor, *, limit: float | None = None) -> torch.Tensor:
    """silu(gate) * up, where silu(g) = g * sigmoid(g).

    Args:
        gate_up: [T, 2 I], any float dtype, free row stride: gate in the first I columns, up in the last I, as one fused
            projection writes them.
        limit: At least 2**-10: the clamped form, g * sigmoid(1.702 g) * (u + 1) with g = min(gate, limit) and u =
            up within -limit and limit.

    Returns:
        out [T, I], as gate_up.

    Source: the clamped form is gpt-oss's (OpenAI, 2025).
    """
    gate, up = gate_up.chunk(2, dim=-1)  # [T, I] each
    if limit is None:
        return gate * torch.sigmoid(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(CLAMPED_GATE * gate) * (up + 1)


def baseline(gate_up: torch.Tensor, *, limit: float | None = None) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is None:
        return F.silu(gate).mul_(up)
    gate = gate.clamp(max=limit)
    return torch.sigmoid(CLAMPED_GATE * gate).mul_(gate).mul_(up.clamp(-limit, limit) + 1)


LIMIT = Scalar(float, optional=True, low=2.0**-10, axis=True)
"""The rule for `limit`: 0 would leave nothing of a gate."""

LIMITS = Int("limit", 0, 2**31 - 1, (0, 7), "of gate and up, in the clamped form; 0 is none")


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    shape, dtype = (int(axes["T"]), int(axes["I"])), dtype_of(axes["activation"])
    gate = draws.normal(shape, dtype, axes["values"])
    # A huge gate saturates the sigmoid at both ends; a huge up beside it would overflow fp16 in any implementation, and
    # of a faint one nothing would be left.
    up = draws.normal(shape, dtype, "ordinary" if axes["values"] in ("huge", "outlier", "faint") else axes["values"])
    limit = float(axes.get("limit", 0)) or None
    return {"gate_up": draws.laid_out(torch.cat((gate, up), dim=-1), axes["layout"]), "limit": limit}


def bytes_moved(case: Case) -> int:
    gate_up = case.inputs["gate_up"]
    return 3 * int(gate_up.numel()) // 2 * int(gate_up.element_size())


def flops(case: Case) -> int:
    return 5 * int(case.inputs["gate_up"].numel()) // 2  # exp, add, divide and two products for each output


CONTRACT = Contract(
    name="swiglu",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("T", 0, 2**31 - 1, (0, 1, 2, 3, 5), "tokens", batch=True, wide=(2,)),
        Int("I", 1, 2**20, (1, 8, 33, 100, 257, 1030, 2100), "intermediate size", wide=(9728,)),
        dtype_axis("activation"),
        LIMITS,
        Choice("layout", LAYOUTS),
        Choice("values", ROW_KINDS),
    ),
    # A huge element alone may be all in the function's tail, of which fp32 formulas that are right leave more or less.
    constraints=(Constraint("I > 1 or values != 'huge'"),),
    arguments={"gate_up": Tensor("T 2*I", "activation"), "limit": LIMIT},
    outputs={"out": Output("T I", "activation")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="fused",
    benchmarks={
        f"T={tokens},I={width}": {"T": tokens, "I": width, "activation": "bfloat16", "limit": 0}
        for tokens, width in ((1, 9728), (64, 9728), (4096, 9728), (8192, 14336))
    },
    inspected={"clamped": {"limit": 7}},
    batching=row_batching("gate_up"),
)
