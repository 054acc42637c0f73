"""A grid's programs run in any order on a GPU: reruns and permuted grids must give the same bits.

The interpreter runs programs one after the other, each to its end, so a race shows itself as a dependence on their
order. What no order of whole programs shows, two programs that store different values to one element, is found by
keeping what each stores; so is one store whose own lanes do, of which a GPU keeps any.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from triton.runtime import interpreter as triton_interpreter

from tkernels.config import Config
from tkernels.contract import Case
from tkernels.errors import TKernelsError
from tkernels.inputs import clone_inputs, roughen_floats
from tkernels.interpreter.replaced import replaced_methods
from tkernels.launch import Door
from tkernels.mode import MODE
from tkernels.variant import Variant
from tkernels.verification.addresses import place_of, sanitizing_door
from tkernels.verification.calls import call, first_difference
from tkernels.verification.check import check_case
from tkernels.verification.program_order import permuted_programs, programs_of
from tkernels.verification.sanitizers.base import Sanitizer

ORDERS = ("reversed", "shuffled 1", "shuffled 2")


class StoreConflictError(TKernelsError, RuntimeError):
    """Two programs of one launch, or two lanes of one store, store different values to the same element."""


@dataclass
class _Stores:
    """What each program of a launch stores: (program, addresses, bit patterns), and whether there were atomics."""

    kept: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)
    atomics: bool = False

    def conflict(self) -> tuple[int, int, int] | None:
        """(address, program, another program) of a conflict.

        None where programs use atomics: they may hand an element on, and only the permutations can tell.
        """
        if self.atomics or not any(len(where) for _, where, _ in self.kept):
            return None
        programs = np.concatenate([np.full(len(where), program) for program, where, _ in self.kept])
        addresses, values = (np.concatenate([kept[i] for kept in self.kept]) for i in (1, 2))
        # By address, then program, then time (lexsort is stable): a program's last store to an element is what counts.
        order = np.lexsort((programs, addresses))
        programs, addresses, values = programs[order], addresses[order], values[order]
        last = np.append((addresses[1:] != addresses[:-1]) | (programs[1:] != programs[:-1]), True)
        programs, addresses, values = programs[last], addresses[last], values[last]
        bad = np.flatnonzero((addresses[1:] == addresses[:-1]) & (values[1:] != values[:-1]))
        if not len(bad):
            return None
        return int(addresses[bad[0]]), int(programs[bad[0]]), int(programs[bad[0] + 1])


def _torn(addresses: np.ndarray, patterns: np.ndarray) -> int | None:
    """An address to which one store's lanes bring different bit patterns."""
    order = np.lexsort((patterns, addresses))
    addresses, patterns = addresses[order], patterns[order]
    bad = np.flatnonzero((addresses[1:] == addresses[:-1]) & (patterns[1:] != patterns[:-1]))
    return int(addresses[bad[0]]) if len(bad) else None


def permuting_door(order: str) -> Door:
    """The interpreter with the grid in another order, which refuses stores that conflict."""
    builder = triton_interpreter.interpreter_builder

    def door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        programs = programs_of(grid)
        number = {program: index for index, program in enumerate(programs)}
        stores = _Stores()
        store = builder.create_masked_store

        def kept_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            addresses, values, live = np.broadcast_arrays(ptrs.data, value.data, mask.data)
            live = live.astype(bool)
            width = values.dtype.itemsize
            patterns = np.ascontiguousarray(values[live]).view(f"u{width}").astype(np.uint64)
            where = addresses[live].astype(np.int64)
            if (address := _torn(where, patterns)) is not None:
                raise StoreConflictError(
                    f"{kernel.__name__}: lanes of one store of program {builder.grid_idx} store different values at "
                    f"{place_of(arguments, address)}"
                )
            stores.kept.append((number[builder.grid_idx], where, patterns))
            return store(ptrs, value, mask, *rest)

        def noted(atomic: Callable[..., Any]) -> Callable[..., Any]:
            def note(*args: Any) -> Any:
                stores.atomics = True
                return atomic(*args)

            return note

        noting = replaced_methods(
            create_masked_store=kept_store,
            create_atomic_rmw=noted(builder.create_atomic_rmw),
            create_atomic_cas=noted(builder.create_atomic_cas),
        )
        with permuted_programs(grid, order), noting:
            sanitizing_door(kernel, grid, arguments, config)
        if conflict := stores.conflict():
            address, one, other = conflict
            raise StoreConflictError(
                f"{kernel.__name__}: programs {programs[one]} and {programs[other]} store different values at "
                f"{place_of(arguments, address)}"
            )

    return door


def _run(variant: Variant, case: Case, config: Config | None) -> str | None:
    inputs = roughen_floats(case.inputs, case.seed)
    first = call(variant, clone_inputs(inputs), config)
    if variant.deterministic and (why := first_difference(first, call(variant, clone_inputs(inputs), config))):
        return f"a rerun differs: {why}"
    permutable = variant.launch is not None and MODE == "interpret"  # a GPU orders programs as it likes
    for order in ORDERS if permutable else ():
        if variant.deterministic:
            again = call(variant, clone_inputs(inputs), config, door=permuting_door(order))
            if why := first_difference(first, again):
                return f"with its programs {order}: {why}"
        else:  # its bits may change, its result may not
            result = check_case(variant, case, config, door=permuting_door(order))
            if result.status != "ok":
                return f"with its programs {order}: {result.status} {result.reason}"
    return None


SANITIZER = Sanitizer(
    "order",
    "bits that depend on the run or on the order of programs; stores that conflict",
    _run,
    max_programs=32,
    grows=True,
    # The bits of fp32 results show an order of summation that a rounding to 16 bits hides.
    fixed={"activation": "float32"},
    interpreted=False,
)
