"""The same run over a Ray cluster, one that is started for the test."""

from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from experiments.cli import app
from experiments.document import read_document
from experiments.planning.plan import make_sweep
from experiments.sweep.local import Local
from experiments.sweep.on_ray import OnRay
from experiments.sweep.runner import run_experiment
from experiments.sweep.tasks import Executor
from tests.experiments.conftest import Write
from tests.experiments.sweep.kill_runs import differences, facts_of
from tests.tkernels.outside import write_variant

pytest.importorskip("ray", reason="the extra `ray` is not installed")


@pytest.mark.slow
def test_on_ray_a_run_has_the_rows_that_it_has_here(write: Write, tmp_path: Path) -> None:
    """Also of a task that dies at a point: told by the same process, in the same words, and gone on with."""
    dies = "    tokens, width = out.shape\n    if tokens == 2: import os; print('on my way', flush=True); os._exit(3)\n"
    write_variant(tmp_path / "mine", ("    tokens, width = out.shape\n", dies))
    shapes = {"swiglu": [{"T": [2, 3], "I": 8}]}
    file = write(kernels={"swiglu": ["torch", "doubled"]}, variants_from=["mine"], shapes=shapes)
    found = {}
    executors: list[Executor] = [Local(), OnRay()]
    for executor in executors:
        sweep = make_sweep(read_document(file))
        folder = run_experiment(sweep, tmp_path / executor.name, [], Console(quiet=True), executor=executor)
        assert folder.meta["executor"] == executor.name
        assert folder.meta["finished"]
        found[executor.name] = facts_of(folder.path)
        dead, alive = [row for row in folder.rows if row.stage == "check" and row.variant == "doubled"]
        assert alive.status == "ok"
        assert str(dead.reason).startswith("its process left with exit status 3; last printed: on my way")
    assert found["local"].total() == 8
    assert differences(found["local"], found["ray"]) == []


def test_an_executor_that_there_is_not(write: Write) -> None:
    done = CliRunner().invoke(app, ["run", str(write(kernels={"swiglu": "torch"})), "--executor", "rya"])
    assert done.exit_code == 2
    assert "--executor: unknown 'rya': there is local, ray; did you mean 'ray'?" in done.stderr
