"""Two programs of a launch may touch an element that one of them writes only where something orders the two.

The interpreter runs programs one after the other, so the results of most races are right there. This looks at the order
that the kernel itself makes instead: barriers, and atomics with release and acquire semantics.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from tkernels.config import Config
from tkernels.contract import Case
from tkernels.inputs import clone_inputs, roughen_floats
from tkernels.launch import Door
from tkernels.variant import Variant
from tkernels.verification.addresses import sanitizing_door
from tkernels.verification.calls import call
from tkernels.verification.program_order import permuted_programs
from tkernels.verification.races import RaceError, describe_race, recorded_accesses
from tkernels.verification.sanitizers.base import Sanitizer, without_launches

ORDERS = (None, "reversed")
"""What a program does may depend on who came before it: who is last reads what the others left."""


def racing_door(order: str | None) -> Door:
    """The interpreter, in its own order or another, which refuses a launch whose programs race."""

    def door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        with permuted_programs(grid, order) if order else nullcontext(), recorded_accesses(grid) as history:
            sanitizing_door(kernel, grid, arguments, config)
        if race := history.find_race():
            raise RaceError(f"{kernel.__name__}: {describe_race(history, race, grid, arguments)}")

    return door


def _run(variant: Variant, case: Case, config: Config | None) -> str | None:
    inputs = roughen_floats(case.inputs, case.seed)
    for order in ORDERS:
        call(variant, clone_inputs(inputs), config, door=racing_door(order))
    return None


SANITIZER = Sanitizer(
    "race",
    "two programs that touch an element which one of them writes, with nothing that orders the two",
    _run,
    unfit=without_launches,
    max_programs=32,
)
