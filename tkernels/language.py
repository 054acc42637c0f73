"""The few device functions that kernels of every op share."""

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

from tkernels.mode import MODE

INTERPRETING = tl.constexpr(MODE == "interpret")
_CACHE_LINE = tl.constexpr(128)  # bytes, of NVIDIA's L2


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


@triton.jit
def wait_for_earlier_launches():
    """Waits for all launches ahead of this one; then the next may begin, which waits likewise.

    A launch with the option `launch_pdl` begins while the one ahead of it still runs (programmatic dependent launch, on
    sm_90 and newer). What comes before this call may only read what no launch writes, as weights, and write nothing.
    Every program has to come here, or a launch would end before those that it was to wait for, and the next with it.
    The next begins no earlier than when all programs have come here, so what launches before this one wrote is there.
    Elsewhere, and in a launch without the option, there is nothing to wait for.
    """
    if not INTERPRETING:  # noqa: SIM102  # where it interprets, no target is asked for
        if cuda_capability_geq(9):
            gdc_wait()
            gdc_launch_dependents()


@triton.jit
def prefetch_rows(row_ptrs, mask, first, end, WIDTH: tl.constexpr):
    """Asks for elements `first` to `first + WIDTH` of each row in the L2 cache, for those before `end`.

    For weights, ahead of `wait_for_earlier_launches`: the first of them are there when the wait is over. Nothing is
    kept in a register, and what is written meanwhile is seen. There is nothing to do where WIDTH is 0 and elsewhere
    than on sm_90 and newer, where launches can begin early.

    row_ptrs, mask: [rows, 1], the place of a row's element 0 and whether there is such a row.
    """
    if not INTERPRETING:  # noqa: SIM102  # where it interprets, no target is asked for
        if cuda_capability_geq(9) and WIDTH > 0:
            LINE: tl.constexpr = _CACHE_LINE * 8 // row_ptrs.dtype.element_ty.primitive_bitwidth  # elements
            LINES: tl.constexpr = (WIDTH + LINE - 1) // LINE
            offs = first + tl.arange(0, LINES)[None, :] * LINE
            tl.inline_asm_elementwise(
                "{ .reg .pred there; setp.ne.s32 there, $2, 0; @there prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
                "=r,l,r",
                [(row_ptrs + offs).to(tl.int64), (mask & (offs < end)).to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
