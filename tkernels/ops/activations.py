"""Activations that several kernels end in, on the device."""

import triton
import triton.language as tl


@triton.jit
def gelu_of(x, TANH: tl.constexpr):
    """fp32 [...] -> the gelu of each, by tanh if TANH: see ops/gelu/contract.py."""
    if TANH:
        # (1 + tanh(u)) / 2 is sigmoid(2 u), which has all its digits where tanh comes near -1 too.
        return x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    else:
        return 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))
