"""What Triton's number formats are to numpy: bf16 and fp8 are bit patterns, read as numbers, rounded to as a GPU does.

Triton's casts to e4m3 go wrong in one of twelve normal values (they round ties up and lose the carry into the
exponent), an e4m3 NaN is read as 480, and a subnormal bf16 number becomes another one.
"""

from typing import Any

import numpy as np
import triton.language as tl


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """fp32 [...] -> bf16 bit patterns [...] as uint16, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # Adding 0x7FFF plus the lowest kept bit carries into the kept half exactly when rounding up is right.
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    quiet = ((bits >> np.uint32(16)) | np.uint32(0x0040)).astype(np.uint16)
    return np.where(np.isnan(values), quiet, rounded)


_E4M3_LARGEST = 0x7E  # 448; the code after it is NaN, and there is no infinity


def round_to_e4m3(values: np.ndarray) -> np.ndarray:
    """Floats [...] -> fp8 e4m3 codes [...] as uint8, rounded to nearest, ties to even; NaN beyond what rounds to 448.

    GPUs differ in what they make of larger values (NVIDIA's saturate): a kernel that means 448 clamps.
    """
    wide = np.asarray(values, dtype=np.float64)
    size = np.where(np.isfinite(wide), np.abs(wide), 0.0)
    # -6 is the smallest normal value's exponent, whose spacing the subnormals and 0 share.
    exponent = np.frexp(np.maximum(size, 2.0**-6))[1] - 1
    steps = np.rint(np.ldexp(size, 3 - exponent))  # 8 to 16 for a normal value, 0 to 8 for a subnormal one
    code = np.minimum((exponent + 6) * 8 + steps, 0x7F)  # 16 steps carry into the exponent
    code = np.where(np.isfinite(wide), code, 0x7F).astype(np.uint8)
    return code | (np.signbit(wide).astype(np.uint8) << 7)


def _e4m3_values() -> np.ndarray:
    """What each of the 256 codes means, fp32."""
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(1.0 * mantissa, -9))
    values[_E4M3_LARGEST + 1] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


_E4M3_VALUES = _e4m3_values()


def as_float(handle: Any) -> np.ndarray:
    """Numbers that numpy computes with: bf16 and e4m3 as fp32, e5m2 as fp16, everything else as it is."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if handle.dtype.scalar == tl.float8e4nv:
        return _E4M3_VALUES[handle.data]
    if handle.dtype.scalar == tl.float8e5:  # the upper half of an fp16 number
        return (handle.data.view(np.uint8).astype(np.uint16) << np.uint16(8)).view(np.float16)
    return np.asarray(handle.data)


def precision_name(input_precision: Any) -> str:
    """ "tf32" of Triton's enum value."""
    return str(input_precision.name).lower()
