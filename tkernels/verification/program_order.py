"""The programs of a grid, and the interpreter made to run them in another order."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from triton.runtime import interpreter as triton_interpreter

from tkernels.interpreter.replaced import replaced_methods


def programs_of(grid: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The indices (x, y, z) of a grid's programs, in the order in which the interpreter runs them."""
    return list(itertools.product(*(range(size) for size in (*grid, 1, 1)[:3])))


def _ordered(programs: list[tuple[int, ...]], order: str) -> list[tuple[int, ...]]:
    if order == "reversed":
        return programs[::-1]
    permutation = np.random.default_rng(int(order.split()[1])).permutation(len(programs))
    return [programs[i] for i in permutation]


@contextmanager
def permuted_programs(grid: tuple[int, ...], order: str) -> Iterator[None]:
    """Makes one launch run its programs in another order: "reversed", or "shuffled N" with N as the seed."""
    programs = programs_of(grid)
    places = dict(zip(programs, _ordered(programs, order), strict=True))
    set_program = triton_interpreter.interpreter_builder.set_grid_idx

    def set_permuted(*program: int) -> None:
        set_program(*places[program])

    with replaced_methods(set_grid_idx=set_permuted):
        yield
