"""The soak of one minute: `python -m tests.tsched.serving.soak` is the longer one."""

from pathlib import Path

import pytest

from tests.tsched.serving.soak import run


@pytest.mark.slow
def test_mixed_load_and_a_killed_worker_leave_nothing_behind(tmp_path: Path) -> None:
    soak, wrong = run("tiny", tmp_path, 60)
    assert not wrong
    assert {"whole", "left", "refused", "error frame"} <= soak.answers.keys()
