"""What Triton's types and tensors say of themselves, whether the interpreter of the process is patched or not."""

from itertools import product
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

SHAPES = ([1], [8], [16], [4, 8], [8, 4], [2, 1, 4])


def describe() -> list[Any]:
    """Every figure of types and tensors; of blocks each twice, the second time by a tuple of Triton's."""
    dtypes = [tl.int1, tl.int32, tl.uint8, tl.float16, tl.bfloat16, tl.float32, tl.float8e4nv, tl.int64]
    dtypes += [tl.pointer_type(tl.float32), tl.pointer_type(tl.float32, const=True), tl.pointer_type(tl.int8)]
    blocks = [tl.block_type(dtype, shape) for dtype, shape in product(dtypes, SHAPES)]
    blocks += [tl.block_type(dtype, tl.tuple(shape)) for dtype, shape in product(dtypes, SHAPES)]
    tensors = [tl.tensor(None, kind) for kind in (*blocks, *dtypes)]
    said: list[Any] = [
        (
            str(one.type), str(one.dtype), one.dtype.is_ptr() and one.dtype.const, [size.value for size in one.shape],
            one.numel.value, str(interpreter._get_np_dtype(one.type)), one.type.scalar == one.dtype,
        )
        for one in tensors
    ]  # fmt: skip
    said.append([[str(one == other) for other in (*blocks, *dtypes)] for one in (*blocks, *dtypes)])
    said.append([[str(one.shape == other.shape) for other in tensors] for one in tensors])
    unwrap = tl.core._unwrap_if_constexpr
    seven = tl.constexpr(7)
    said.append([unwrap(seven), unwrap([seven, [7]]), unwrap((seven, "a")), unwrap(7.5), unwrap(None), unwrap(True)])
    try:
        tl.block_type(tl.int32, [])
    except TypeError as error:
        said.append(str(error))
    return said
