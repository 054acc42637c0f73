"""What Triton's interpreter does anew for each operation, done once; what it computes does not change.

Types were made, printed and compared for most of an operation's time, and every integer sum was taken once more to look
for an overflow that nobody hears of: 50 rows of `sample`'s two kernels took 6.2 s, and take 2.0 s so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

_PLAIN = frozenset({tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, float, bool, str, type(None)})


def install() -> None:
    """Patches the interpreter of this process."""
    triton_interpreter._get_np_dtype = _finding_dtypes(triton_interpreter._get_np_dtype)
    triton_interpreter._patch_lang = _patch_once(triton_interpreter._patch_lang)
    # By default an overflow is looked for, by the sum in int64, and not reported. See `replaced.overflow_checks`.
    triton_interpreter.interpreter_builder.options = triton_interpreter.InterpreterOptions(sanitize_overflow=False)
    tl.core._unwrap_if_constexpr = _unwrapping(tl.core._unwrap_if_constexpr)
    tl.block_type.__init__ = _making_blocks(tl.block_type.__init__)
    tl.tensor.__init__ = _make_tensor
    tl.dtype.__eq__ = _comparing(tl.dtype.__eq__, True)
    tl.core.tuple.__eq__ = _comparing(tl.core.tuple.__eq__, tl.constexpr(True))


def _unwrapping(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is tl.constexpr:
            return value.value
        return value if kind in _PLAIN else unwrap(value)

    return unwrapped


def _finding_dtypes(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known = cache(find)
    address = find(tl.pointer_type(tl.int8))
    return lambda kind: address if kind.scalar.is_ptr() else known(kind.scalar)


def _making_blocks(make: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    made: dict[Any, tuple[Any, int, str]] = {}
    shapes: dict[Any, Any] = {}  # one object each, so that comparing two is seldom comparing their sizes

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *shape
        if key not in made:
            make(self, element_ty, shape)
            self.shape = shapes.setdefault(tuple(self.shape), self.shape)
            made[key] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = made[key]

    return make_block


@cache
def _constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """(the number of elements, the sizes), as a tensor has them."""
    return tl.constexpr(prod(shape)), tl.core.tuple([tl.constexpr(size) for size in shape])


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _constants(type.shape if type.is_block() else ())


def _comparing(equal: Callable[[Any, Any], Any], same: Any) -> Callable[[Any, Any], Any]:
    return lambda self, other: same if self is other else equal(self, other)


def _patch_once(patch_lang: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Triton patches its language for a launch, and again for every call of a jitted function within it, `tl.sum` among
    them: up to a third of a program's time, for nothing. Here the modules that are patched stay so until the launch is
    over.
    """
    patched: set[int] = set()  # the language's modules that calls around this one have patched
    seen_by: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()  # a function's own

    class Scope:
        def __init__(self, function: Any) -> None:
            if (seen := seen_by.get(function)) is None:
                values = list(function.__globals__.values())
                seen = {id(one) for one in (tl, tl.core) if any(one is value for value in values)}
                seen_by[function] = seen
            self.new = seen - patched
            self.inner = patch_lang(function) if self.new or not seen else None
            patched.update(self.new)

        def restore(self) -> None:
            patched.difference_update(self.new)
            if self.inner is not None:
                self.inner.restore()

    return Scope
