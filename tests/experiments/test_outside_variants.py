"""A broken file of outside variants refuses what names it, and nothing else."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.cli import app
from experiments.commands import choices
from experiments.commands.choices import choose_variants
from experiments.document import ExperimentError, read_document
from experiments.peers import with_peers
from experiments.planning.plan import make_sweep
from tests.experiments.conftest import Write
from tests.tkernels.outside import write_variant
from tkernels import OPS


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder of a sound file and one that exits."""
    write_variant(tmp_path / "mine")
    return write_variant(tmp_path / "mine", ("VARIANT =", "import os; os._exit(3)\nVARIANT ="), name="exits")


def test_an_experiment_is_refused_for_a_broken_file_that_it_names_and_no_other(write: Write, two: Path) -> None:
    shapes = {"swiglu": [{"T": 2, "I": 8}]}
    sound = make_sweep(read_document(write(kernels={"swiglu": ["doubled"]}, variants_from=[str(two)], shapes=shapes)))
    assert [pick.variant for pick in sound.plans[0].picks["swiglu"]] == ["doubled"]
    assert [file.name for file in sound.plans[0].ops.broken] == ["exits.py"]
    file = write(kernels={"swiglu": ["doubled", "exits"]}, variants_from=[str(two)], shapes=shapes)
    with pytest.raises(ExperimentError) as refused:
        make_sweep(read_document(file))
    (problem,) = refused.value.problems
    assert problem.startswith("kernels.swiglu[1] (experiment.yaml, line ")
    assert "swiglu variant 'exits' is not available: " in problem
    assert "cannot be imported: its process left with exit status 3" in problem


def test_commands_go_on_without_it_unless_they_are_asked_for_it(two: Path) -> None:
    listed = CliRunner().invoke(app, ["ops", "--json", "--variants-from", str(two)])
    assert listed.exit_code == 0
    rows = {row["variant"]: row for row in json.loads(listed.stdout) if row["op"] == "swiglu"}
    assert rows["doubled"]["supported"]
    assert (rows["exits"]["kind"], rows["exits"]["supported"]) == ("unavailable", False)
    assert "exit status 3" in rows["exits"]["reason"]
    shown = CliRunner().invoke(app, ["ops", "--variants-from", str(two)])
    assert "swiglu.exits: " in shown.stdout
    one = ["check", "--op", "swiglu", "--variant", "doubled", "--examples", "1", "--variants-from", str(two)]
    assert CliRunner().invoke(app, one).exit_code == 0
    refused = CliRunner().invoke(app, ["check", "--op", "swiglu", "--variants-from", str(two)])
    assert refused.exit_code == 2
    assert f"error: --variants-from: {two / 'swiglu' / 'exits.py'}: cannot be imported: " in refused.stderr


@pytest.mark.parametrize(
    ("ends", "said"),
    [("exit(0)", "it raised SystemExit: 0"), ("axes['H']", "KeyError: 'H'"), ("print('flood' * 999)", None)],
)
def test_what_says_whether_it_is_supported_harms_itself_alone(
    ends: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_variant(tmp_path, ('wins="never"', f'wins="never", supports=lambda axes, device: {ends}'))
    monkeypatch.setattr(choices, "broken_files", lambda folders: {})  # a trial asks it less than a list or a check
    listed = CliRunner().invoke(app, ["ops", "swiglu", "--json", "--variants-from", str(folder)])
    assert listed.exit_code == 0
    rows = {row["variant"]: row for row in json.loads(listed.stdout)["variants"]}
    assert rows["fused"]["supported"]
    assert rows["doubled"]["supported"] == (said is None)
    if said is not None:
        assert f"{folder / 'swiglu' / 'doubled.py'}: cannot be asked what it supports: " in rows["doubled"]["reason"]
        assert said in rows["doubled"]["reason"]
    one = ["check", "swiglu", "--variant", "doubled", "--examples", "8", "--variants-from", str(folder)]
    checked = CliRunner().invoke(app, [*one, "--json"])
    (summary,) = json.loads(checked.stdout)
    assert (checked.exit_code, summary["status"]) == ((0, "ok") if said is None else (1, "failed"))
    assert (said or "flood") in checked.stderr
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(("op", "variant"), [("swiglu", "mine"), ("swigluy", None)])
def test_a_name_that_is_nowhere_says_which_folders_were_looked_in_and_what_was_left_out(
    tmp_path: Path, op: str, variant: str | None
) -> None:
    folder = write_variant(tmp_path, op="swiglux", name="mine")
    file, reason = folder / "swiglux" / "mine.py", f"{folder / 'swiglux'}: unknown op 'swiglux'"
    with pytest.raises(ExperimentError) as refused:
        choose_variants(with_peers(OPS.with_variants_from(folder, {file: reason})), op, variant)
    unknown, left_out = refused.value.problems
    assert f"--variants-from {folder} was looked in too" in unknown
    assert left_out == f"--variants-from: {reason}"


def test_two_ops_that_differ_are_refused() -> None:
    done = CliRunner().invoke(app, ["check", "swiglu", "--op", "gelu"])
    assert (done.exit_code, done.stderr) == (2, "error: swiglu and --op gelu: these are two ops; name one\n")
