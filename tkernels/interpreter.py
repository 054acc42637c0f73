"""Makes Triton's interpreter truthful about bf16 and fp8 (e4m3), and gives the sanitizers a place to stand.

Measured with Triton 3.6 and 3.7: the interpreter keeps bf16 as raw 16-bit patterns, so arithmetic on them is silently
wrong, and its fp32 -> bf16 cast truncates where a GPU rounds to nearest even, which doubles a correct kernel's error.
The patch rounds, and turns bf16 arithmetic into an error: a kernel widens to fp32 first. Only `tl.dot` takes bf16, as
the matrix units do; what those round is rounded here too (`tkernels.matrix_units`). Casts to e4m3 go wrong in one of
twelve normal values (they round ties up and lose the carry into the exponent), an e4m3 NaN is read as 480, and a
subnormal bf16 number becomes another one: those casts are replaced.
"""

import ast
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

from tkernels.errors import TKernelsError
from tkernels.matrix_units import accumulate, multiply, sum_in_fp16


class Bfloat16ArithmeticError(TKernelsError, TypeError):
    """A kernel computes on bf16 values without widening them; the interpreter would do it on raw bit patterns."""


_TRITON, _SEMANTIC = f"{Path(triton.__file__).parent}{os.sep}", triton.language.semantic.__file__


class BlockTruthError(TKernelsError, ValueError):
    """A kernel branches on a block; `if`, `while`, `and` and `or` take one value."""


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
    """Numbers that numpy computes with: bf16 and e4m3 as fp32, e5m2 as fp16, everything else as it is."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if handle.dtype.scalar == tl.float8e4nv:
        return _E4M3_VALUES[handle.data]
    if handle.dtype.scalar == tl.float8e5:  # the upper half of an fp16 number
        return (handle.data.view(np.uint8).astype(np.uint16) << np.uint16(8)).view(np.float16)
    return np.asarray(handle.data)


def _refuse_bf16(doing: str, *handles: Any) -> None:
    if any(one.dtype.scalar == tl.bfloat16 for one in handles):
        raise Bfloat16ArithmeticError(f"{doing} on bf16: widen with .to(tl.float32) first")


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
    unary_op, reductions = builder.unary_op, triton_interpreter.ReduceOps
    check_reduced, plain_sum = triton_interpreter.ReduceScanOpInterface.check_tensor, reductions.sum
    patch_lang_tensor, masked_load = triton_interpreter._patch_lang_tensor, builder.create_masked_load
    patch_lang_core = triton_interpreter._patch_lang_core

    def rounding_cast(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return triton_interpreter.TensorHandle(round_to_bf16(src.data), tl.bfloat16)
        if src.dtype.scalar == tl.bfloat16 and dst_type.scalar == tl.float32:
            return triton_interpreter.TensorHandle(_as_float(src), tl.float32)
        return cast_impl(self, src, dst_type)

    def rounding_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        to_nearest = rounding_mode is None or "RTNE" in str(rounding_mode)
        if src.dtype.scalar == tl.float8e4nv:
            wide = triton_interpreter.TensorHandle(_as_float(src), tl.float32)
            return wide if dst_type.scalar == tl.float32 else rounding_cast(self, wide, dst_type)
        if to_nearest and dst_type.scalar == tl.float8e4nv:
            return triton_interpreter.TensorHandle(round_to_e4m3(_as_float(src)), tl.float8e4nv)
        if to_nearest and src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return triton_interpreter.TensorHandle(round_to_bf16(src.data), tl.bfloat16)
        return fp_to_fp(self, src, dst_type, rounding_mode)

    def refusing_binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        _refuse_bf16(getattr(op, "__name__", str(op)), lhs, rhs)
        return binary_op(self, lhs, rhs, op)

    def refusing_unary_op(self: Any, arg: Any, op: Any) -> Any:
        _refuse_bf16(getattr(op, "__name__", str(op)), arg)
        return unary_op(self, arg, op)

    def refusing_reduction(self: Any, tensors: Any) -> None:
        _refuse_bf16("a reduction or scan", *(one.handle for one in tensors))
        check_reduced(self, tensors)

    def rounding_sum(self: Any, tensor: Any) -> Any:
        if tensor.handle.dtype.scalar != tl.float16:
            return plain_sum(self, tensor)
        return self.to_tensor(sum_in_fp16(tensor.handle.data, self.axis, self.keep_dims), tensor.dtype)

    def rounding_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: int) -> Any:
        out = accumulate(d.data, _as_float(a), _as_float(b), _precision_name(input_precision))
        return triton_interpreter.TensorHandle(out, d.dtype.scalar)

    def indexable(tensor: Any, scope: Any) -> None:
        # Triton 3.6 makes a loop bound with int() of a one-element array, which numpy 2.4 refuses; 3.7 squeezes it.
        patch_lang_tensor(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())
        tensor.__bool__ = truth

    def truth(tensor: Any) -> bool:
        caller, size = sys._getframe(1).f_code.co_filename, tensor.handle.data.size
        # Triton's loads ask so whether there is an `other`: there is, also where it is a block of a single 0.0, without
        # which what is masked off would be undefined.
        if caller == _SEMANTIC:
            return True
        if size == 1:
            return bool(tensor.handle.data)
        # Triton's takes any block for true, where its compiler refuses one in a kernel.
        if caller.startswith(_TRITON):
            return True
        raise BlockTruthError(f"a block of {size} elements is neither true nor false: tl.where")

    def undefined_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **options: Any) -> Any:
        # A GPU leaves what is masked off undefined where `other` does not say; the interpreter would give zeros, on
        # which a kernel could come to rely.
        if other is None and not mask.data.all():
            other = _undefined(ptrs)
        return masked_load(self, ptrs, mask, other, *rest, **options)

    def with_typed_loops(lang: Any, scope: Any) -> None:
        patch_lang_core(lang, scope)
        scope.set_attr(lang, "range", typed_range)

    triton_interpreter._patch_lang_tensor = indexable
    triton_interpreter._patch_lang_core = with_typed_loops
    triton_interpreter.typed_range = typed_range  # the names of that module are a rewritten kernel's
    triton_interpreter.FunctionRewriter.ast_transformer = _TypedLoops()
    triton_interpreter._patch_lang = _patch_once(triton_interpreter._patch_lang)
    builder.loop_values = lambda self, values: values  # all of them, where no check replaces it
    builder.create_masked_load = undefined_load
    builder.cast_impl = rounding_cast
    builder.create_fp_to_fp = rounding_fp_to_fp
    builder.binary_op = refusing_binary_op
    builder.unary_op = refusing_unary_op
    builder.create_dot = rounding_dot
    triton_interpreter.ReduceScanOpInterface.check_tensor = refusing_reduction
    reductions.sum = rounding_sum


class _TypedLoops(triton_interpreter.ASTTransformer):
    """Triton's rewriting of a kernel, in which Python's `range` is `typed_range` too, as `tl.range` is."""

    def visit_For(self, node: ast.For) -> ast.AST:
        match node.iter:
            case ast.Call(func=ast.Name(id="range") as name):
                name.id = typed_range.__name__
        return self.generic_visit(node)


def typed_range(first: Any, second: Any = None, step: Any = None, **options: Any) -> Iterator[Any]:
    """The values of a kernel's loop as its compiler has them: scalars of the type to which bounds and step promote.

    Triton's interpreter gives plain numbers. One that starts in int64 has to stay so, or what it is multiplied by
    overflows here alone; and two of int32 have to overflow here as they do there.
    """
    bounds = (0, first) if second is None else (first, second)
    ends = (*bounds, 1 if step is None else step)
    semantic = triton_interpreter.interpreter_semantic
    kind = functools.reduce(semantic.integer_promote_impl, (semantic.to_tensor(end).dtype for end in ends))
    dtype = triton_interpreter._get_np_dtype(kind)
    for value in triton_interpreter.interpreter_builder.loop_values(range(*ends)):
        yield tl.tensor(triton_interpreter.TensorHandle(np.array([value], dtype=dtype), kind), kind)


def _patch_once(patch_lang: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Triton patches its language for a launch, and again for every call of a jitted function within it, `tl.sum` among
    them: up to a third of a program's time, for nothing. Here the modules that are patched stay so until the launch is
    over.
    """
    patched: set[int] = set()  # the language's modules that calls around this one have patched

    class Scope:
        def __init__(self, function: Any) -> None:
            seen = {id(one) for one in (tl, tl.core) if any(one is value for value in function.__globals__.values())}
            self.new = seen - patched
            self.inner = patch_lang(function) if self.new or not seen else None
            patched.update(self.new)

        def restore(self) -> None:
            patched.difference_update(self.new)
            if self.inner is not None:
                self.inner.restore()

    return Scope


def _precision_name(input_precision: Any) -> str:
    """ "tf32" of Triton's enum value."""
    return str(input_precision.name).lower()


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

_STORES = ("create_masked_store", "create_atomic_rmw", "create_atomic_cas")


@contextmanager
def watch_accesses(check: Access) -> Iterator[None]:
    """Calls `check` before every load, store and atomic that the interpreter makes, and stops a loop without end."""
    builder = triton_interpreter.interpreter_builder
    program, count = None, 0

    def stop_runaway() -> None:
        nonlocal program, count
        program, count = builder.grid_idx, count + 1 if builder.grid_idx == program else 1
        if count > MAX_ACCESSES:
            raise RunawayError(f"program {program} has made {MAX_ACCESSES} accesses and goes on: its loop does not end")

    with replaced_methods(**_watched(_ACCESSES, check, stop_runaway)):
        yield


@contextmanager
def watch_stores(check: Access) -> Iterator[None]:
    """Calls `check` before every store and atomic, one of a descriptor's box among them once."""
    with replaced_methods(**_watched(_STORES, check)):
        yield


def _watched(
    names: Iterable[str], check: Access, before: Callable[[], None] = lambda: None
) -> dict[str, Callable[..., Any]]:
    """These methods of the builder, each behind `before` and a `check` of its access."""

    def watched(method: Callable[..., Any], access: str, find: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
        def watch(*arguments: Any, **options: Any) -> Any:
            before()
            pointers, mask = find(*arguments)
            check(pointers.data, mask, element_bytes(pointers), access)
            return method(*arguments, **options)

        return watch

    builder = triton_interpreter.interpreter_builder
    return {name: watched(getattr(builder, name), *_ACCESSES[name]) for name in names}


def element_bytes(pointers: Any) -> int:
    """How wide what a block of pointers points at is."""
    return max(1, int(pointers.get_element_ty().primitive_bitwidth) // 8)


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

    def exact_dot(a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: int) -> Any:
        product = multiply(_as_float(a), _as_float(b), _precision_name(input_precision), np.float64)
        return triton_interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    with replaced_methods(create_dot=exact_dot):
        yield
