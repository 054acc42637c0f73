"""Numbers out of codes of 4 bits that are floats, on the device.

A code's two bits of exponent and one of mantissa become the lowest of the exponent and the highest of the mantissa of a
wider float, its sign that one's sign: the code's value times a power of two, subnormal where the code is. One product
takes the power of two out, exactly, for no arithmetic here flushes subnormals. (As in MARLIN's kernels for FP4: two
codes at a time, in the halves of a register.)
"""

import triton
import triton.language as tl

from tkernels.language import INTERPRETING
from tkernels.ops.dequant_gemm._unpack import by_output, for_each_code, pairs_in

_FROM_FP16 = tl.constexpr(2.0**14)
_FROM_FP32 = tl.constexpr(2.0**126)  # bf16 has as many bits of exponent


@triton.jit
def unpacked_e2m1(packed, scale, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """e2m1(code) * scale as a tile of the weight, [BLOCK_N, BLOCK_K] in DTYPE, rounded once. As `unpacked`."""
    pairs = pairs_in(packed, packed, 4)
    if tl.float32 == DTYPE:
        codes = by_output(tl.join(pairs & 0xFFFF, pairs >> 16), 4, BLOCK_N, BLOCK_K)
        numbers = (((codes & 8) << 28) | ((codes & 7) << 22)).to(tl.float32, bitcast=True) * _FROM_FP32
    else:
        SHIFT: tl.constexpr = 9 if tl.float16 == DTYPE else 6
        pairs = ((pairs & 0x00080008) << 12) | ((pairs & 0x00070007) << SHIFT)
        halves = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).to(DTYPE, bitcast=True)
        if INTERPRETING:  # it has no arithmetic on bf16
            halves = halves.to(tl.float32)
        numbers = by_output(halves, 4, BLOCK_N, BLOCK_K) * (_FROM_FP16 if tl.float16 == DTYPE else _FROM_FP32)
    weight = numbers * for_each_code(scale, BLOCK_N, BLOCK_K).to(numbers.dtype)
    return weight.to(DTYPE)


@triton.jit
def e2m1_of_field(packed, FIELD: tl.constexpr):
    """The value of one field of each word, in fp32."""
    PLACE: tl.constexpr = 4 * FIELD
    magnitude = packed << (22 - PLACE) if PLACE < 22 else packed >> (PLACE - 22)
    sign = (packed << (28 - PLACE)) & -(2**31)
    return (sign | (magnitude & (7 << 22))).to(tl.float32, bitcast=True) * _FROM_FP32


@triton.jit
def e2m1_products(packed, x, BLOCK_W: tl.constexpr):
    """e2m1(code) * x of all codes of a word, summed: x [places of the tile] -> [BLOCK_W, BLOCK_N].

    Words are interleaved: the codes of even places are in the low half, those of odd ones in the high half.
    """
    even, odd = tl.split(tl.reshape(x, (BLOCK_W, 2, 2, 2)))  # [BLOCK_W, 2, 2] each: places by their bits
    x04, x26 = tl.split(even)  # [BLOCK_W, 2] each
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    products = e2m1_of_field(packed, 0) * x0[:, None]
    products += e2m1_of_field(packed, 4) * x1[:, None]
    products += e2m1_of_field(packed, 1) * x2[:, None]
    products += e2m1_of_field(packed, 5) * x3[:, None]
    products += e2m1_of_field(packed, 2) * x4[:, None]
    products += e2m1_of_field(packed, 6) * x5[:, None]
    products += e2m1_of_field(packed, 3) * x6[:, None]
    products += e2m1_of_field(packed, 7) * x7[:, None]
    return products
