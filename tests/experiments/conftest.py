"""Runs of small experiments; the checkpoint is the scheduler tests' random one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from experiments.document import read_document
from experiments.planning.plan import Plan, make_sweep
from experiments.runs.folder import RunFolder
from experiments.sweep.runner import run_experiment
from tests.experiments.in_process import InProcess
from tests.experiments.planning.single_plan import make_plan
from tests.tsched.conftest import checkpoint

__all__ = ["checkpoint"]

Write = Callable[..., Path]
Run = Callable[..., RunFolder]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes keyword arguments as an experiment's YAML into tmp_path and returns the file."""

    def write_experiment(**keys: Any) -> Path:
        file = tmp_path / "experiment.yaml"
        file.write_text(yaml.safe_dump({"name": "test", **keys}, sort_keys=False))
        return file

    return write_experiment


@pytest.fixture
def plan(write: Write) -> Callable[..., Plan]:
    return lambda **keys: make_plan(read_document(write(**keys)))


@pytest.fixture
def run(write: Write, tmp_path: Path) -> Run:
    """Runs an experiment into tmp_path/run, its tasks in this process."""

    def run_keys(**keys: Any) -> RunFolder:
        sweep = make_sweep(read_document(write(**keys)))
        return run_experiment(sweep, tmp_path / "run", [], Console(quiet=True), executor=InProcess())

    return run_keys
