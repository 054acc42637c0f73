"""The few device functions that kernels of every op share."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from tkernels.mode import MODE

INTERPRETING = tl.constexpr(MODE == "interpret")


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with fp32 accumulation: [M, K] @ [K, N] -> [M, N].

    "ieee" keeps fp32 operands off the tf32 path, whose error (2**-11) is thousands of times fp32's own.
    """
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def nearest_even(x):
    """fp32 [...] below 2**22 in size, rounded to whole numbers, ties to even, still fp32.

    Not by adding and taking away 1.5 * 2**23 on a GPU too: the compiler makes one instruction of that sum and of the
    product that x is, which then is not rounded before its ties are.
    """
    if INTERPRETING:
        return (x + 12582912.0) - 12582912.0
    else:
        return libdevice.nearbyint(x)  # `rint` is missing for AMD in Triton 3.6
