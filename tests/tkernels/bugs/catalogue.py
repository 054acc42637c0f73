"""All rebuilt bugs."""

from collections.abc import Mapping

from tests.tkernels.bugs import attention, codes, races, rows, sums
from tests.tkernels.bugs.bug import Bug

BUGS: Mapping[str, Bug] = {bug.name: bug for room in (attention, rows, codes, sums, races) for bug in room.BUGS}
"""By name."""
