"""Activations that several kernels end in, on the device."""

from typing import Any

import triton
import triton.language as tl

CLAMPED_GATE = 1.702
"""What the clamped form of swiglu multiplies the gate with in its sigmoid: x * sigmoid(1.702 x) is near gelu(x)."""

_CLAMPED_GATE = tl.constexpr(CLAMPED_GATE)


@triton.jit
def swiglu_of(gate, up, limit, CLAMPED: tl.constexpr):
    """fp32 [...] twice -> the activation of each, in the clamped form if CLAMPED: see ops/swiglu/contract.py."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate * tl.sigmoid(gate * _CLAMPED_GATE) * (up + 1.0)
    else:
        return gate * tl.sigmoid(gate) * up


def limit_arguments(limit: float | None) -> dict[str, Any]:
    """A `limit` as kernels take it."""
    return {"limit": limit or 0.0, "CLAMPED": limit is not None}


@triton.jit
def gelu_of(x, TANH: tl.constexpr):
    """fp32 [...] -> the gelu of each, by tanh if TANH: see ops/gelu/contract.py."""
    if TANH:
        # (1 + tanh(u)) / 2 is sigmoid(2 u), which has all its digits where tanh comes near -1 too.
        return x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    else:
        return 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))
