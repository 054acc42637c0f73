"""What `tk check` says of cases as wide as a model's, and that its replays are the cases that it names."""

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.cli import app
from experiments.commands.choices import parse_axes
from experiments.document import ExperimentError
from tests.tkernels.outside import write_variant
from tkernels import OPS
from tkernels.verification.draws import chooser


def test_the_wide_cases_of_a_variant_that_takes_nothing_outside_its_region_are_counted(tmp_path: Path) -> None:
    wide = (
        """region={"I": (8193, 20000)}, supports=lambda axes, device: None if axes["I"] > 8192 else "wide rows only"""
    )
    folder = write_variant(tmp_path, ('wins="never"', f'wins="never", {wide}"'))
    options = ["--op", "swiglu", "--variant", "doubled", "--variants-from", str(folder), "--examples", "2", "--json"]
    result = CliRunner().invoke(app, ["check", *options])
    (summary,) = json.loads(result.stdout)
    assert (result.exit_code, summary["status"], summary["ok"], summary["left_out"]) == (0, "ok", 2, {})
    assert summary["wide_ok"] >= 2


def test_a_variant_that_takes_no_draw_still_gets_its_wide_cases_and_is_told_what_was_left_out(tmp_path: Path) -> None:
    wide = """supports=lambda axes, device: None if axes["I"] > 2100 else "wide rows only"""
    folder = write_variant(tmp_path, ('wins="never"', f'wins="never", {wide}"'))
    result = CliRunner().invoke(app, ["check", "swiglu", "--variant", "doubled", "--variants-from", str(folder)])
    assert result.exit_code == 0
    assert "0/0   3/3" in result.output
    assert "other drawn cases left out: 0 of 200 draws are supported" in result.output


def test_wide_cases_are_counted_and_the_replay_of_one_fails_the_same_way(tmp_path: Path) -> None:
    changes = [
        ("FACTOR=1,", 'FACTOR=run.config["FACTOR"],'),
        ("configs=(Config(), Config(num_warps=8)), ", ""),
        ('{"": Config()}', '{"": Config(FACTOR=1), "sm_100": Config(FACTOR=2)}'),
    ]
    folder = write_variant(tmp_path, *changes)
    options = ["--op", "swiglu", "--variant", "doubled", "--variants-from", str(folder), "--examples", "2", "--json"]
    result = CliRunner().invoke(app, ["check", *options])
    assert result.exit_code == 1
    (summary,) = json.loads(result.stdout)
    assert (summary["status"], summary["examples"], summary["ok"]) == ("wrong", 2, 2)
    assert (summary["wide"], summary["wide_ok"]) == (3, 2)
    (failure,) = summary["failures"]
    again = CliRunner().invoke(app, [*shlex.split(failure["replay"])[1:], "--json"])
    (repeated,) = json.loads(again.stdout)
    assert (repeated["status"], repeated["examples"], repeated["wide"]) == ("wrong", 1, 0)
    assert repeated["failures"][0]["message"] == failure["message"]


def test_a_variant_that_supports_no_wide_case_is_checked_on_the_others(tmp_path: Path) -> None:
    narrow = "supports=lambda axes, device: 'narrow rows only' if axes['I'] > 300 else None"
    folder = write_variant(tmp_path, ('wins="never"', f'wins="never", {narrow}'))
    result = CliRunner().invoke(app, ["check", "swiglu", "--variant", "doubled", "--variants-from", str(folder)])
    assert result.exit_code == 0, result.output
    assert "20/20" in result.output
    assert "0/0" in result.output


@pytest.mark.parametrize("op", list(OPS))
def test_drawn_axes_are_read_as_a_replay_writes_them(op: str) -> None:
    contract = OPS[op].contract
    for seed in range(50):
        axes = contract.draw_axes(chooser(seed))
        assert parse_axes(contract, ",".join(f"{name}={value}" for name, value in axes.items())) == axes


def test_a_choice_is_read_as_yaml_writes_it_and_said_once() -> None:
    contract = OPS["dequant_gemm"].contract
    assert parse_axes(contract, "sparse=true") == {"sparse": True}
    assert parse_axes(contract, "sparse=false") == {"sparse": False}
    with pytest.raises(ExperimentError, match=r"sparse=yes, but sparse in \(True, False\)$"):
        parse_axes(contract, "sparse=yes")
