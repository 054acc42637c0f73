"""What a GPU's matrix units and 16-bit sums round, and numpy would not: for the interpreter.

Triton's interpreter ignores `input_precision` and sums fp16 numbers in fp32, so a kernel is right there whose product
has 11 bits on a GPU. As its PTX says (Triton 3.7, sm_80 and sm_90), "tf32", the default for fp32 operands, hands them
to the units as they are, which take the upper 19 bits; "tf32x3" rounds the upper part to nearest (cvt.rna) and
multiplies what is left over too.
"""

import numpy as np
import numpy.typing as npt

_TF32_BITS = np.uint32(0xFFFFE000)  # sign, exponent and 10 bits of the fraction
_UNIT_DEPTH = 16
"""Products that a unit sums at once (mma.m16n8k16, wgmma k16) before a 16-bit accumulator rounds."""


def truncate_to_tf32(values: np.ndarray) -> np.ndarray:
    """fp32 [...] as a matrix unit reads it: the lower 13 bits dropped; NaN stays NaN."""
    kept = (np.ascontiguousarray(values).view(np.uint32) & _TF32_BITS).view(np.float32)
    return np.where(np.isnan(values), values, kept)


def round_to_tf32(values: np.ndarray) -> np.ndarray:
    """fp32 [...] to the nearest tf32, ties away from zero, as cvt.rna does; what is not finite stays."""
    bits = np.ascontiguousarray(values).view(np.uint32) + np.uint32(0x1000)
    return np.where(np.isfinite(values), (bits & _TF32_BITS).view(np.float32), values)


def multiply(a: np.ndarray, b: np.ndarray, precision: str, dtype: npt.DTypeLike) -> np.ndarray:
    """a @ b as a GPU rounds its operands, summed in `dtype`: [..., M, K] @ [..., K, N] -> [..., M, N].

    Args:
        precision: `tl.dot`'s `input_precision`: "ieee", "tf32" or "tf32x3". Only fp32 operands are rounded.
    """
    if precision == "ieee" or a.dtype != np.float32 or b.dtype != np.float32:
        return np.matmul(a, b, dtype=dtype)
    if precision == "tf32":
        return np.matmul(truncate_to_tf32(a), truncate_to_tf32(b), dtype=dtype)
    if precision != "tf32x3":
        raise ValueError(f"input_precision {precision!r} is none that the interpreter knows: ieee, tf32, tf32x3")
    upper_a, upper_b = round_to_tf32(a), round_to_tf32(b)
    with np.errstate(invalid="ignore"):  # inf - inf and inf * 0, which is where Triton takes 0 too
        lower_a, lower_b = truncate_to_tf32(a - upper_a), truncate_to_tf32(b - upper_b)
        lower = np.matmul(lower_a, upper_b, dtype=dtype) + np.matmul(upper_a, lower_b, dtype=dtype)
        return np.where(np.isnan(lower), 0, lower) + np.matmul(upper_a, upper_b, dtype=dtype)


def accumulate(acc: np.ndarray, a: np.ndarray, b: np.ndarray, precision: str) -> np.ndarray:
    """acc + a @ b, [..., M, N] in acc's dtype; fp16 sums round after every 16 products, as the units' do."""
    if acc.dtype != np.float16:
        return multiply(a, b, precision, acc.dtype) + acc
    for begin in range(0, a.shape[-1], _UNIT_DEPTH):
        depth = slice(begin, begin + _UNIT_DEPTH)
        acc = (acc + multiply(a[..., depth], b[..., depth, :], precision, np.float32)).astype(np.float16)
    return acc


def sum_in_fp16(values: np.ndarray, axis: int | None, keepdims: bool) -> np.ndarray:
    """The sum of fp16 numbers by halves, every addition rounded to fp16; numpy's rounds the fp32 sum once."""
    whole = values.reshape(-1) if axis is None else np.moveaxis(values, axis, -1)
    while (size := whole.shape[-1]) > 1:
        whole = whole[..., : (size + 1) // 2] + np.pad(
            whole[..., (size + 1) // 2 :], [(0, 0)] * (whole.ndim - 1) + [(0, size % 2)]
        )
    if not keepdims:
        return whole[..., 0]
    return whole.reshape([1] * values.ndim) if axis is None else np.moveaxis(whole, -1, axis)
