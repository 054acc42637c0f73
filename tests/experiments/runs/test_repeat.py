"""`tk repeat`: a run again, and what changed."""

import json
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from experiments.cli import app
from experiments.commands import repeat
from experiments.commands.repeat import print_changes
from experiments.runs.reading import read_run
from experiments.sweep.runner import RunInterrupted
from tests.experiments.runs.false_alarms import write_experiment
from tests.experiments.runs.folders import ENVIRONMENT, write_run
from tests.experiments.runs.test_verdicts import changed, timed


def tk(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_a_repeated_run_says_what_changed(tmp_path: Path) -> None:
    file = write_experiment(tmp_path, 1)
    file.write_text(f"# Is it the same?\n{file.read_text()}")
    mine = tmp_path / "variants" / "swiglu" / "mine.py"
    assert tk("run", file, "--out", tmp_path / "first").exit_code == 0
    mine.write_text(mine.read_text().replace("return result", "return result * 1.5"))
    result = tk("repeat", tmp_path / "first", "--out", tmp_path / "again")
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "again beside first: of 3 figures, 3 cannot tell" in text
    assert "1 and 1 processes; 5 each are needed: put `replicates: 5` or more into the YAML" in text
    assert "check, swiglu, T=64,I=1024, float32, mine, process 0: ok, then wrong" in text
    assert "sources.swiglu.mine: " in text
    assert "swiglu, T=64,I=1024, float32: mine, median_us" in text.partition("Only in first")[2]
    first, again = (read_run(tmp_path / name) for name in ("first", "again"))
    assert first.meta["resolved_sha256"] == again.meta["resolved_sha256"]
    assert first.meta["run_id"] != again.meta["run_id"]
    assert (again.path / "experiment.yaml").read_text() == file.read_text()
    assert f"Report: {again.path / 'report.html'}" in text
    assert "Is it the same?" in (again.path / "report.html").read_text()
    shutil.rmtree(tmp_path / "variants")
    result = tk("repeat", tmp_path / "first")
    assert result.exit_code == 2
    assert f"the sources that it was run with are in {tmp_path / 'first' / 'sources'}" in " ".join(
        result.stderr.split()
    )
    assert (tmp_path / "first" / "sources" / "swiglu" / "mine.py").read_text().count("return result\n") == 1
    assert (
        json.loads((tmp_path / "first" / "columns.json").read_text())["stages"]["kernels"]["median_us"]["unit"] == "us"
    )


def test_elsewhere_the_rest_is_said_all_the_same(tmp_path: Path) -> None:
    environment = changed(changed(dict(ENVIRONMENT), "device", "name", to="GPU"), "versions", "torch", to="2.14")
    before = read_run(write_run(tmp_path / "a", timed(0, torch=1)))
    after = read_run(write_run(tmp_path / "b", timed(1, torch=1), environment=environment))
    console = Console(width=80, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    print_changes(console, before, after)
    text = console.export_text()
    assert "Speeds are not compared" in text
    assert "device of a and b: name: some CPU, then GPU" in text
    assert "versions.torch: 2.13, then 2.14" in text


def test_one_that_is_interrupted_says_how_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def interrupted(sweep: Any, out: Path, overrides: list[str], console: Console) -> NoReturn:
        given.append((sweep.document.text, overrides))
        raise RunInterrupted(out)

    monkeypatch.setattr(repeat, "run_experiment", interrupted)
    first = write_run(tmp_path / "first", timed(0, torch=1), environment={**ENVIRONMENT, "overrides": ["repeats=1"]})
    (first / "experiment.yaml").write_text("# Why?\nname: test\n")
    again = tmp_path / "again"
    result = tk("repeat", first, "--out", again)
    assert result.exit_code == 130
    assert f"goes on with: tk run {again}/resolved.yaml --resume {again}" in result.stderr
    assert f"tk compare {first} {again}" in result.stderr
    assert given == [("# Why?\nname: test\n", ["repeats=1"])]


def test_what_is_no_run_cannot_be_repeated(tmp_path: Path) -> None:
    result = tk("repeat", tmp_path)
    assert result.exit_code == 2
    assert "not a run of schema 1" in " ".join(result.stderr.split())
