"""What products of 8-bit codes share: a tile of codes on the matrix units, and what becomes of its sums."""

import triton
import triton.language as tl

from tkernels.contract import Axes
from tkernels.device import DeviceFacts
from tkernels.language import dot
from tkernels.quantized.row_codes import unsupported_codes

_SHORT = ("sm_89", "sm_90", "sm_120", "interpreter")
"""Architectures whose matrix units sum fp8 products in fewer bits than fp32's, those of Ada and Hopper in about 14
(Zhang et al., SageAttention2, 2024; DeepSeek-AI, DeepSeek-V3, 2024, section 3.3.2). Of sm_120's nothing is known here,
and they are taken for such. The interpreter's sums are not short, and go the same way, so that it is tested."""


def sums_are_short(device: DeviceFacts) -> bool:
    """Whether the sums of fp8 products are to be taken out of the matrix units, to fp32, after every tile."""
    return device.arch in _SHORT


def unsupported_sums(axes: Axes, device: DeviceFacts) -> str | None:
    """Why a Triton variant cannot multiply these codes to this result, or None where it can."""
    if reason := unsupported_codes(axes, device):
        return reason
    is_short = sums_are_short(device) and device.arch != "interpreter"
    if axes["codes"] == "float8_e4m3fn" and axes["out"] == "float32" and is_short:
        return f"the matrix units of {device.arch} sum fp8 products in fewer bits than a float32 result has"
    return None


@triton.jit
def zero_sums(ROWS: tl.constexpr, COLUMNS: tl.constexpr, code: tl.constexpr):
    """[ROWS, COLUMNS] of what sums products of such codes: int32, which is exact, or fp32."""
    if code == tl.int8:
        return tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    else:
        return tl.zeros((ROWS, COLUMNS), dtype=tl.float32)


@triton.jit
def with_products(sums, a, b, SHORT: tl.constexpr):
    """sums + a @ b of codes: [R, K] @ [K, C] -> [R, C]. SHORT: see `sums_are_short`."""
    if a.dtype == tl.int8:
        return tl.dot(a, b, sums, out_dtype=tl.int32)
    elif SHORT:
        # A promise of how many products may be summed in the units keeps the compiler from putting `sums` there too.
        return sums + tl.dot(a, b, max_num_imprecise_acc=a.shape[1])
    else:
        return dot(a, b, sums)


@triton.jit
def rescaled(sums, scale_ptr, weight_scale_ptr, bias_ptr, offs_m, offs_n, mask_m, mask_n):
    """Sums [M, N] of codes' products as the result [M, N], in fp32.

    The token's scale first: the product of two scales can be too small for fp32 where that of all three is not.
    """
    scale = tl.load(scale_ptr + offs_m, mask=mask_m)  # what is masked off is not stored
    weight_scale = tl.load(weight_scale_ptr + offs_n, mask=mask_n)
    out = sums.to(tl.float32) * scale[:, None] * weight_scale[None, :]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + offs_n, mask=mask_n).to(tl.float32)[None, :]
    return out
