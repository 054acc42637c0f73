"""Two programs of a launch may touch an element that one of them writes only where something orders the two.

The interpreter runs programs one after the other, so the results of most races are right there. This looks at the order
that the kernel itself makes instead: barriers, and atomics with release and acquire semantics.
"""

from tkernels.config import Config
from tkernels.contract import Case
from tkernels.variant import Variant
from tkernels.verification.races import check_races
from tkernels.verification.sanitizers.base import Sanitizer, without_launches


def _run(variant: Variant, case: Case, config: Config | None) -> str | None:
    check_races(variant, case, config)
    return None


SANITIZER = Sanitizer(
    "race",
    "two programs that touch an element which one of them writes, with nothing that orders the two",
    _run,
    unfit=without_launches,
    max_programs=32,
    grows=True,
)
