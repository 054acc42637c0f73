"""`tk new`: what it writes is right as it stands, for every op, and bad input writes nothing."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from experiments.cli import app
from experiments.commands import new
from experiments.commands.requests import NewRequest
from experiments.document import read_document
from experiments.planning.plan import make_sweep
from tests.tkernels.outside import write_variant
from tkernels import OPS, Registry
from tkernels.verification.check import check_case
from tkernels.verification.draws import drawn_cases


def tk(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every op has a new variant."""
    folder = tmp_path_factory.mktemp("written") / "mine"
    for op in OPS:
        assert tk("new", op, "mine", "--in", folder).exit_code == 0
    return folder


@pytest.fixture(scope="module")
def ops(folder: Path) -> Registry:
    return OPS.with_variants_from(folder)


@pytest.mark.parametrize("op", OPS)
def test_what_is_written_joins_and_is_right(op: str, folder: Path, ops: Registry) -> None:
    variant = ops[op].variants["mine"]
    assert variant.file == folder.resolve() / op / "mine.py"
    case, config = next(drawn_cases(variant, 1))
    assert check_case(variant, case, config, offsets=False).status == "ok"


@pytest.mark.parametrize("op", OPS)
def test_all_of_its_device_code_is_there_to_be_changed(op: str, folder: Path, ops: Registry) -> None:
    source = (folder / op / "mine.py").read_text()
    marks = [source.index(mark) for mark in ("# The work begins here", "# What runs on the host", "# What is declared")]
    assert marks == sorted(marks)
    kernels = ops[op].variants["mine"].kernels
    assert [name for name in kernels if name.startswith(f"{op}_mine")]
    assert all(marks[0] < source.index(f"def {name}(") < marks[1] for name in kernels)
    assert max(map(len, source[marks[0] :].splitlines())) <= 120


@pytest.mark.parametrize("op", OPS)
def test_its_experiment_calls_it(op: str, folder: Path) -> None:
    sweep = make_sweep(read_document(folder / op / "mine.yaml"), broken={})
    assert [pick.variant for pick in sweep.plans[0].picks[op]] == ["torch", "mine"]
    written = yaml.safe_load((folder / op / "mine.yaml").read_text())
    assert ("workload" in written) != ("shapes" in written)
    assert all(plan.unsupported == {} for plan in sweep.plans)


def test_one_may_start_from_any_variant_with_a_kernel_and_from_ones_own(tmp_path: Path) -> None:
    assert tk("new", "paged_decode", "first", "--in", tmp_path, "--from", "last_arriver").exit_code == 0
    assert tk("new", "paged_decode", "second", "--in", tmp_path, "--from", "first").exit_code == 0
    variants = OPS.with_variants_from(tmp_path)["paged_decode"].variants
    assert "paged_decode_second" in variants["second"].kernels
    assert variants["second"].kernels.keys() >= {"attend_keys", "combine_parts", "store_part"}


NO_NAMES = ("my-own", "my own", "../x", "größe", "_mine", "A", "mineToo", "None", "2nd", "")


def files_in(folder: Path) -> dict[Path, str]:
    return {file: file.read_text() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["paged_decod", "x"], "unknown op 'paged_decod': there is add_layer_norm"),
        (["paged_decod", "x"], "did you mean 'paged_decode'?"),
        *((["swiglu", name], f"NAME {name}: {name!r} is no name in lower case as Python") for name in NO_NAMES),
        (["swiglu", "class"], "NAME class: 'class' is a word of Python's own"),
        (["swiglu", "contract"], "contract.py would define an op"),
        (["swiglu", "torch"], "swiglu already has a variant 'torch', in "),
        (["swiglu", "fused"], "swiglu already has a variant 'fused', in "),
        (["swiglu", "liger"], "swiglu already has a variant 'liger', in "),
        (["swiglu", "doubled"], "doubled.py exists"),
        (["swiglu", "noted"], "noted.yaml exists"),
        (["dequant_gemm", "x", "--from", "tilde"], "to start from: dequantize_then_matmul, gemv, lookup_gemv, split_k"),
        (["dequant_gemm", "x", "--from", "tilde"], "did you mean 'tiled'?"),
        (["dequant_gemm", "x", "--from", "auto"], "--from auto: dequant_gemm has these to start from"),
        (["made_of_torch", "x"], "made_of_torch has no variant with a kernel of its own to start from"),
    ],
)
def test_bad_input_says_why_and_writes_nothing(arguments: list[str], said: str, tmp_path: Path) -> None:
    write_variant(tmp_path)
    (tmp_path / "swiglu" / "noted.yaml").write_text("mine")
    (tmp_path / "made_of_torch").mkdir()
    contract = "from dataclasses import replace\nfrom tkernels.ops.swiglu.contract import CONTRACT as S\n"
    (tmp_path / "made_of_torch" / "contract.py").write_text(
        f"{contract}CONTRACT = replace(S, name='made_of_torch', default='torch')\n"
    )
    before = files_in(tmp_path)
    refused = tk("new", *arguments, "--in", tmp_path)
    assert refused.exit_code == 2
    assert said in refused.stderr
    assert files_in(tmp_path) == before


def test_without_from_a_variant_named_none_is_not_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "swiglu").mkdir()
    (tmp_path / "swiglu" / "None.py").write_text("raise SystemExit\n")
    monkeypatch.setattr(new, "open_registry", lambda folders: pytest.fail(f"{folders} were imported"))
    assert new.run(NewRequest("swiglu", "mine", tmp_path)) == 0


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refused = tk("new", "swiglu", "x", "--in", tmp_path / "file")
    assert refused.exit_code == 2
    assert f"error: {tmp_path / 'file'}" in refused.stderr
    refused = tk("new", "swiglu", "x", "--in", "/proc/mine")
    assert (refused.exit_code, refused.stderr.startswith("error: /proc/mine")) == (2, True)


def typed(folder: Path, op: str, command: str) -> list[str]:
    """A command of the written file's docstring, of those that start so."""
    source = (folder / op / "mine.py").read_text()
    (line,) = [line for line in source.splitlines() if line.startswith(f"    tk {command}")]
    return shlex.split(line)[1:]


@pytest.mark.slow
@pytest.mark.parametrize("op", ["paged_decode", "rms_norm"])
def test_what_is_written_passes_every_check(op: str, folder: Path) -> None:
    one = ["--op", op, "--variant", "mine", "--variants-from", folder]
    checked = tk("check", *one, "--json")
    assert checked.exit_code == 0, checked.stdout
    assert tk("check", *one, "--sanitize", "all", "--examples", 1).exit_code == 0  # its start has passed with all
    assert tk("inspect", *one, "--arch", "sm_90").exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("op", ["paged_decode", "dequant_gemm"])
def test_its_experiment_runs(op: str, folder: Path, tmp_path: Path) -> None:
    done = tk("run", folder / op / "mine.yaml", "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert {row["status"] for row in rows if row["stage"] == "check" and row["variant"] == "mine"} == {"ok"}
