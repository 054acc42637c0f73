"""A few programs of a grid that no interpreter could walk, each at its place and until it has made enough accesses."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from triton.runtime import interpreter as triton_interpreter

from tkernels.config import Config
from tkernels.interpreter.accesses import Access, watch_accesses
from tkernels.interpreter.replaced import replaced_methods
from tkernels.launch import Door
from tkernels.verification.addresses import sanitizing_door
from tkernels.verification.kernel_errors import raised_from

_ACCESSES = 500
"""Of one program, which are enough: where few programs walk a whole batch, their first steps are looked at."""


class _EnoughError(Exception):
    """A program has made so many accesses that the next one may begin."""


def run_programs(grid: Sequence[int], programs: Iterable[tuple[int, ...]], run_one: Callable[[Access], None]) -> None:
    """Interprets some programs of a grid, one launch each.

    Args:
        grid: What `tl.num_programs` says.
        programs: Their indices in it, of three dims.
        run_one: Launches a grid of one program, and has every access of it seen by what it is given.
    """
    builder = triton_interpreter.interpreter_builder
    set_dim, set_program = builder.set_grid_dim, builder.set_grid_idx
    whole = three_dims(grid)
    for program in programs:
        accesses = itertools.count()

        def watch(*access: Any, accesses: Iterator[int] = accesses) -> None:
            if next(accesses) == _ACCESSES:
                raise _EnoughError

        place = replaced_methods(
            set_grid_dim=lambda *one: set_dim(*whole), set_grid_idx=lambda *zero, p=program: set_program(*p)
        )
        with place:
            try:
                run_one(watch)
            except Exception as error:
                if not any(isinstance(one, _EnoughError) for one in raised_from(error)):
                    raise


def three_dims(grid: Sequence[int]) -> tuple[int, ...]:
    """A grid with the dims of one program that it leaves out."""
    return (*grid, 1, 1)[:3]


def door_of_ends(first: Sequence[tuple[int, ...]]) -> Door:
    """Runs of each launch as many programs as a smaller one has, at both ends of its grid.

    Args:
        first: The grid of each launch of the smaller one.
    """
    grids = iter(first)

    def door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        def run_one(watch: Access) -> None:
            with watch_accesses(watch):
                sanitizing_door(kernel, (1, 1, 1), arguments, config)

        pairs = list(zip(three_dims(grid), three_dims(next(grids)), strict=True))
        begin = itertools.product(*(range(min(whole, few)) for whole, few in pairs))
        end = itertools.product(*(range(max(whole - few, 0), whole) for whole, few in pairs))
        run_programs(grid, dict.fromkeys((*begin, *end)), run_one)

    return door
