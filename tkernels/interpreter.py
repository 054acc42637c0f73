"""Makes Triton's interpreter truthful about bf16 and fp8 (e4m3), and gives the sanitizers a place to stand.

Measured with Triton 3.6 and 3.7: the interpreter keeps bf16 as raw 16-bit patterns, so arithmetic on them is silently
wrong, and its fp32 -> bf16 cast truncates where a GPU rounds to nearest even, which doubles a correct kernel's error.
The patch rounds, and turns bf16 arithmetic into an error: a kernel widens to fp32 first (`tl.dot` through
`language.dot`). Casts to e4m3 go wrong in one of twelve normal values (they round ties up and lose the carry into the
exponent), an e4m3 NaN is read as 480, and a subnormal bf16 number becomes another one: those casts are replaced.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

from tkernels.errors import TKernelsError


class Bfloat16ArithmeticError(TKernelsError, TypeError):
    """A kernel computes on bf16 values without widening them; the interpreter would do it on raw bit patterns."""


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


def _as_float(handle: Any) -> np.ndarray:
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.asarray(handle.data)


def _undefined(pointers: Any) -> Any:
    """What a lane that nobody loads may hold: NaN, or a number that is no index of anything."""
    kind = pointers.get_element_ty()
    codes = {tl.bfloat16: 0x7FC0, tl.float8e4nv: 0x7F, tl.float8e5: 0x7F}
    dtype = triton_interpreter._get_np_dtype(kind)
    value = codes.get(kind, np.nan if kind.is_floating() else min(1_000_003, 2 ** (8 * dtype.itemsize - 1) - 1))
    return triton_interpreter.TensorHandle(np.full(pointers.data.shape, value, dtype=dtype), kind)


def install() -> None:  # noqa: C901  the methods that replace Triton's own, a few lines each
    """Patches the interpreter of this process. Called once, when tkernels is imported in an interpreting process."""
    builder = triton_interpreter.InterpreterBuilder
    cast_impl, fp_to_fp, binary_op = builder.cast_impl, builder.create_fp_to_fp, builder.binary_op
    patch_lang_tensor, masked_load = triton_interpreter._patch_lang_tensor, builder.create_masked_load

    def rounding_cast(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return triton_interpreter.TensorHandle(round_to_bf16(src.data), tl.bfloat16)
        if src.dtype.scalar == tl.bfloat16 and dst_type.scalar == tl.float32:
            return triton_interpreter.TensorHandle(_as_float(src), tl.float32)
        return cast_impl(self, src, dst_type)

    def rounding_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        to_nearest = rounding_mode is None or "RTNE" in str(rounding_mode)
        if src.dtype.scalar == tl.float8e4nv:
            wide = triton_interpreter.TensorHandle(_E4M3_VALUES[src.data], tl.float32)
            return wide if dst_type.scalar == tl.float32 else rounding_cast(self, wide, dst_type)
        if to_nearest and dst_type.scalar == tl.float8e4nv:
            return triton_interpreter.TensorHandle(round_to_e4m3(_as_float(src)), tl.float8e4nv)
        if to_nearest and src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return triton_interpreter.TensorHandle(round_to_bf16(src.data), tl.bfloat16)
        return fp_to_fp(self, src, dst_type, rounding_mode)

    def refusing_binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if tl.bfloat16 in (lhs.dtype.scalar, rhs.dtype.scalar):
            raise Bfloat16ArithmeticError(f"{getattr(op, '__name__', op)} on bf16: widen with .to(tl.float32) first")
        return binary_op(self, lhs, rhs, op)

    def indexable(tensor: Any, scope: Any) -> None:
        # Triton 3.6 makes a loop bound with int() of a one-element array, which numpy 2.4 refuses; 3.7 squeezes it.
        patch_lang_tensor(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    def undefined_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **options: Any) -> Any:
        # A GPU leaves what is masked off undefined where `other` does not say; the interpreter would give zeros, on
        # which a kernel could come to rely.
        if other is None and not mask.data.all():
            other = _undefined(ptrs)
        return masked_load(self, ptrs, mask, other, *rest, **options)

    triton_interpreter._patch_lang_tensor = indexable
    builder.create_masked_load = undefined_load
    builder.cast_impl = rounding_cast
    builder.create_fp_to_fp = rounding_fp_to_fp
    builder.binary_op = refusing_binary_op


class RunawayError(TKernelsError, RuntimeError):
    """A program that makes more accesses than any honest one: its loop does not end."""


MAX_ACCESSES = 50_000
"""Of one program. 64k tokens in blocks of 16 take 12,000; a loop without end reaches the bound within seconds."""

Access = Callable[[np.ndarray, np.ndarray, int, str], None]
"""(addresses, mask, bytes per element, "load" or "store" or "atomic") -> None, or raises.

A tensor descriptor's access comes twice: as "box load" or "box store" with the whole box, masked where it leaves the
descriptor's shape, and as the masked load or store that it is made of.
"""


@contextmanager
def replaced_methods(**methods: Callable[..., Any]) -> Iterator[None]:
    """Gives the interpreter's builder other methods for a while. Contexts nest: each restores what it found."""
    builder = triton_interpreter.interpreter_builder
    before = {name: vars(builder).get(name) for name in methods}
    vars(builder).update(methods)  # an instance's attribute shadows its class's method
    try:
        yield
    finally:
        for name, method in before.items():
            if method is None:
                delattr(builder, name)
            else:
                setattr(builder, name, method)


_ACCESSES: dict[str, tuple[str, Callable[..., tuple[Any, Any]]]] = {
    "create_masked_load": ("load", lambda ptrs, mask, *rest: (ptrs, mask.data)),
    "create_masked_store": ("store", lambda ptrs, value, mask, *rest: (ptrs, mask.data)),
    "create_descriptor_load": ("box load", lambda descriptor, offsets, *rest: descriptor.materialize_pointers(offsets)),
    "create_descriptor_store": ("box store", lambda descriptor, value, at: descriptor.materialize_pointers(at)),
    "create_atomic_rmw": ("atomic", lambda op, ptr, val, mask, *rest: (ptr, mask.data)),
    "create_atomic_cas": ("atomic", lambda ptr, *rest: (ptr, np.ones_like(ptr.data, dtype=bool))),
}
"""Method of the builder -> the access that it makes, and (pointers, mask) from its arguments."""


@contextmanager
def watch_accesses(check: Access) -> Iterator[None]:
    """Calls `check` before every load, store and atomic that the interpreter makes, and stops a loop without end."""
    builder = triton_interpreter.interpreter_builder
    program, count = None, 0

    def watched(method: Callable[..., Any], access: str, find: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
        def watch(*arguments: Any, **options: Any) -> Any:
            nonlocal program, count
            program, count = builder.grid_idx, count + 1 if builder.grid_idx == program else 1
            if count > MAX_ACCESSES:
                raise RunawayError(
                    f"program {program} has made {MAX_ACCESSES} accesses and goes on: its loop does not end"
                )
            pointers, mask = find(*arguments)
            check(pointers.data, mask, max(1, pointers.get_element_ty().primitive_bitwidth // 8), access)
            return method(*arguments, **options)

        return watch

    with replaced_methods(**{name: watched(getattr(builder, name), *how) for name, how in _ACCESSES.items()}):
        yield


@contextmanager
def overflow_checks() -> Iterator[None]:
    """Makes integer +, - and * raise where an int32 result does not fit, as a GPU's debug build would."""
    builder = triton_interpreter.interpreter_builder
    before = builder.options
    builder.options = triton_interpreter.InterpreterOptions(debug=True, sanitize_overflow=True)
    try:
        yield
    finally:
        builder.options = before


@contextmanager
def exact_products() -> Iterator[None]:
    """Makes `tl.dot` sum its products in fp64 and round once, so that where a row lies in its tile changes no bit.

    numpy's fp32 product treats the last rows of a tile differently from the first (seen: the last bit), which no matrix
    unit does.
    """
    dot = triton_interpreter.interpreter_builder.create_dot

    def exact_dot(a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if min(a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth) < 16:
            return dot(a, b, d, *rest)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return triton_interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    with replaced_methods(create_dot=exact_dot):
        yield
