"""A grid's programs run in any order on a GPU: reruns and permuted grids must give the same bits.

The interpreter runs programs one after the other, each to its end: what depends on that order shows itself when it is
another. What no order of whole programs shows is for `race` to find.
"""

from collections.abc import Mapping
from typing import Any

from tkernels.config import Config
from tkernels.contract import Case
from tkernels.inputs import clone_inputs, roughen_floats
from tkernels.launch import Door
from tkernels.mode import MODE
from tkernels.variant import Variant
from tkernels.verification.addresses import sanitizing_door
from tkernels.verification.calls import call, first_difference
from tkernels.verification.check import check_case
from tkernels.verification.program_order import permuted_programs
from tkernels.verification.sanitizers.base import Sanitizer

ORDERS = ("reversed", "shuffled 1", "shuffled 2")


def permuting_door(order: str) -> Door:
    """The interpreter with the grid in another order."""

    def door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        with permuted_programs(grid, order):
            sanitizing_door(kernel, grid, arguments, config)

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
    "bits that depend on the run or on the order of programs",
    _run,
    max_programs=32,
    grows=True,
    # The bits of fp32 results show an order of summation that a rounding to 16 bits hides.
    fixed={"activation": "float32"},
    interpreted=False,
)
