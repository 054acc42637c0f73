"""Makes Triton's interpreter truthful: about bf16 and fp8, products, sums, loops, truth and what is masked off.

Measured with Triton 3.6 and 3.7: the interpreter keeps bf16 as raw 16-bit patterns, so arithmetic on them is silently
wrong, and its fp32 -> bf16 cast truncates where a GPU rounds to nearest even, which doubles a correct kernel's error.
The patch rounds, and turns bf16 arithmetic into an error: a kernel widens to fp32 first. Only `tl.dot` takes bf16, as
the matrix units do; what those round is rounded here too (`tkernels.matrix_units`). Casts to and from bf16 and e4m3 are
replaced (`tkernels.interpreter.number_formats`).
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

from tkernels.errors import TKernelsError
from tkernels.interpreter import once
from tkernels.interpreter.loops import TypedLoops, typed_range
from tkernels.interpreter.number_formats import as_float, precision_name, round_to_bf16, round_to_e4m3
from tkernels.matrix_units import accumulate, sum_in_fp16


class Bfloat16ArithmeticError(TKernelsError, TypeError):
    """A kernel computes on bf16 values without widening them; the interpreter would do it on raw bit patterns."""


_TRITON, _SEMANTIC = f"{Path(triton.__file__).parent}{os.sep}", triton.language.semantic.__file__


class BlockTruthError(TKernelsError, ValueError):
    """A kernel branches on a block; `if`, `while`, `and` and `or` take one value."""


def _refuse_bf16(doing: Any, *handles: Any) -> None:
    for one in handles:
        if one.dtype.scalar == tl.bfloat16:
            name = getattr(doing, "__name__", str(doing))
            raise Bfloat16ArithmeticError(f"{name} on bf16: widen with .to(tl.float32) first")


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
            return triton_interpreter.TensorHandle(as_float(src), tl.float32)
        return cast_impl(self, src, dst_type)

    def rounding_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        to_nearest = rounding_mode is None or "RTNE" in str(rounding_mode)
        if src.dtype.scalar == tl.float8e4nv:
            wide = triton_interpreter.TensorHandle(as_float(src), tl.float32)
            return wide if dst_type.scalar == tl.float32 else rounding_cast(self, wide, dst_type)
        if to_nearest and dst_type.scalar == tl.float8e4nv:
            return triton_interpreter.TensorHandle(round_to_e4m3(as_float(src)), tl.float8e4nv)
        if to_nearest and src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return triton_interpreter.TensorHandle(round_to_bf16(src.data), tl.bfloat16)
        return fp_to_fp(self, src, dst_type, rounding_mode)

    def refusing_binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        _refuse_bf16(op, lhs, rhs)
        return binary_op(self, lhs, rhs, op)

    def refusing_unary_op(self: Any, arg: Any, op: Any) -> Any:
        _refuse_bf16(op, arg)
        return unary_op(self, arg, op)

    def refusing_reduction(self: Any, tensors: Any) -> None:
        _refuse_bf16("a reduction or scan", *(one.handle for one in tensors))
        check_reduced(self, tensors)

    def rounding_sum(self: Any, tensor: Any) -> Any:
        if tensor.handle.dtype.scalar != tl.float16:
            return plain_sum(self, tensor)
        return self.to_tensor(sum_in_fp16(tensor.handle.data, self.axis, self.keep_dims), tensor.dtype)

    def rounding_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: int) -> Any:
        out = accumulate(d.data, as_float(a), as_float(b), precision_name(input_precision))
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
    triton_interpreter.FunctionRewriter.ast_transformer = TypedLoops()
    builder.loop_values = lambda self, values: values  # all of them, where no check replaces it
    builder.create_masked_load = undefined_load
    builder.cast_impl = rounding_cast
    builder.create_fp_to_fp = rounding_fp_to_fp
    builder.binary_op = refusing_binary_op
    builder.unary_op = refusing_unary_op
    builder.create_dot = rounding_dot
    triton_interpreter.ReduceScanOpInterface.check_tensor = refusing_reduction
    reductions.sum = rounding_sum
    once.install()
