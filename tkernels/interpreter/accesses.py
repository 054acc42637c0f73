"""Every load, store and atomic that an interpreted kernel makes, seen before it is made."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from triton.runtime import interpreter as triton_interpreter

from tkernels.errors import TKernelsError
from tkernels.interpreter.replaced import replaced_methods


class RunawayError(TKernelsError, RuntimeError):
    """A program that makes more accesses than any honest one: its loop does not end."""


MAX_ACCESSES = 50_000
"""Of one program. 64k tokens in blocks of 16 take 12,000; a loop without end reaches the bound within seconds."""

Access = Callable[[np.ndarray, np.ndarray, int, str], None]
"""(addresses, mask, bytes per element, "load" or "store" or "atomic") -> None, or raises.

A tensor descriptor's access comes twice: as "box load" or "box store" with the whole box, masked where it leaves the
descriptor's shape, and as the masked load or store that it is made of.
"""


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
