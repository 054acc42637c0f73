"""Runs that are really killed; twenty of them: `python -m tests.experiments.sweep.kill_runs --times 20`."""

from pathlib import Path

import pytest

from tests.experiments.sweep.kill_runs import differences, facts_of, trial, write_experiment


@pytest.mark.slow
def test_a_run_that_was_killed_ends_with_the_rows_of_one_that_was_not(tmp_path: Path) -> None:
    small = {"replicates": None, "peers": None, "workload": None, "model": None, "scheduler": None}
    file = write_experiment(tmp_path, **small, shapes={"swiglu": [{"T": 2, "I": 8}]})
    assert trial(file, tmp_path, times=1, seed=3) == []
    whole = facts_of(tmp_path / "whole")
    assert whole.total() == 5
    fewer = whole.copy()
    fewer[next(iter(fewer))] += 1  # a row twice is one too much
    assert len(differences(whole, fewer)) == 1
    assert len(differences(fewer, whole)) == 1
