"""The schedules of the small size catch each planted fault. Which one and how: python -m tests.tsched.planted_bugs"""

from __future__ import annotations

import pytest

from tests.tsched.planted_bugs import BUGS, SHARING_BUGS, PlantedBug, first_failure, planted
from tests.tsched.test_schedules import NUM_HASH_SCHEDULES, NUM_SHARING_SCHEDULES


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: PlantedBug) -> None:
    with planted(bug):
        assert first_failure(NUM_HASH_SCHEDULES) is not None, f"no schedule notices that {bug.name}"


@pytest.mark.slow
@pytest.mark.parametrize("bug", SHARING_BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_of_sharing_is_caught(bug: PlantedBug) -> None:
    with planted(bug):
        assert first_failure(NUM_SHARING_SCHEDULES, "shared") is not None, f"no schedule notices that {bug.name}"
