"""The soak of half a minute: `python -m tests.tsched.serving.soak` is the longer one."""

from pathlib import Path

import pytest

from tests.tsched.serving.soak import run


@pytest.mark.slow
def test_mixed_load_and_a_killed_worker_leave_nothing_behind(checkpoint: Path) -> None:
    soak, wrong, _ = run(checkpoint, 30)
    assert not wrong
    assert {"whole", "left", "refused"} <= soak.answers.keys()
