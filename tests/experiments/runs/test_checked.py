"""Which outside variants are said to have never been put through `tk check`."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.cli import app
from experiments.document import parse_document
from experiments.planning.plan import make_sweep
from experiments.runs.checked import unchecked_variants
from tests.experiments.runs.false_alarms import VARIANT


def unchecked(folder: Path) -> list[str]:
    text = "name: a\nkernels: {swiglu: [torch, mine]}\nshapes: {swiglu: [{T: 2, I: 8}]}\nvariants_from: [variants]\n"
    return unchecked_variants(make_sweep(parse_document(text, "a.yaml", folder, ())).plans)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "variants" / "swiglu" / "mine.py"
    file.parent.mkdir(parents=True)
    file.write_text(VARIANT.format(op="swiglu", slower=0.0))
    return file


def check(folder: Path, *options: str) -> int:
    words = ["check", "--op", "swiglu", "--variant", "mine", "--variants-from", str(folder / "variants"), *options]
    return CliRunner().invoke(app, words).exit_code


def test_a_variant_is_unchecked_until_tk_check_finds_it_right_and_again_when_it_changes(
    mine: Path, tmp_path: Path
) -> None:
    assert unchecked(tmp_path) == ["swiglu.mine"]
    assert check(tmp_path, "--axes", "T=2") == 0
    assert unchecked(tmp_path) == ["swiglu.mine"]  # not all of its axes were drawn
    assert check(tmp_path, "--examples", "2") == 0
    assert unchecked(tmp_path) == ["swiglu.mine"]  # fewer cases than a check has
    assert check(tmp_path) == 0
    assert unchecked(tmp_path) == []
    mine.write_text(mine.read_text() + "# another\n")
    assert unchecked(tmp_path) == ["swiglu.mine"]


def test_a_variant_whose_drawn_cases_were_left_out_stays_unchecked(mine: Path, tmp_path: Path) -> None:
    rare = "supports=lambda axes, device: None if axes['I'] > 2100 else 'wide rows only')"
    head, _, _ = mine.read_text().rstrip().rpartition(")")
    mine.write_text(f"{head}, {rare}\n")
    assert check(tmp_path) == 0  # its wide cases are right
    assert unchecked(tmp_path) == ["swiglu.mine"]


def test_a_variant_that_is_wrong_stays_unchecked(mine: Path, tmp_path: Path) -> None:
    mine.write_text(mine.read_text().replace("result = baseline(*arguments, **options)",
                                             "result = baseline(*arguments, **options) * 2"))  # fmt: skip
    assert check(tmp_path, "--examples", "2") == 1
    assert unchecked(tmp_path) == ["swiglu.mine"]
