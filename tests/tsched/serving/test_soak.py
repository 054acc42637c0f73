"""Minutes of load: nothing is left over, and every request is accounted for."""

from pathlib import Path

import pytest

from tests.tsched.serving.soak import soak


@pytest.mark.slow
def test_three_minutes_with_cancels_refusals_and_a_kill_leave_nothing(checkpoint: Path, tmp_path: Path) -> None:
    assert soak(str(checkpoint), tmp_path, minutes=3, at_once=24) == []
