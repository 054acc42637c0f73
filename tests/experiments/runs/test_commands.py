"""`tk runs` and `tk compare`, as a user meets them; and results.jsonl in the hands of others."""

import io
import json
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pandas
import pytest
from typer.testing import CliRunner, Result

from experiments.cli import app
from experiments.runs.folder import new_run_id
from experiments.runs.rows import Row
from tests.experiments.runs.folders import ENVIRONMENT, kernel_row, write_run
from tests.experiments.runs.test_verdicts import changed, failed, timed

ROOT = Path(__file__).parents[3]


def tk(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """A run, and one in which a variant is slower and a package newer."""
    environment = changed(dict(ENVIRONMENT), "versions", "triton", to="3.6")
    return (
        write_run(tmp_path / "before", timed(0, yardstick=True, torch=1, fused=2)),
        write_run(tmp_path / "after", timed(2, yardstick=True, torch=1, fused=2.4), environment=environment),
    )


def test_runs_are_listed_with_their_state_the_newest_last(tmp_path: Path) -> None:
    dirty = changed(dict(ENVIRONMENT), "git", "dirty", to=True)
    write_run(tmp_path / "b", [kernel_row(1.0)], created="2026-01-01T00:00:00+00:00", environment=dirty)
    cut_off = [kernel_row(1.0), failed(kernel_row(1.0, "fused"))]
    write_run(tmp_path / "a", cut_off, finished=None, tasks=5)
    (tmp_path / "none" / "inside").mkdir(parents=True)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "results.jsonl").touch()
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "run.json").write_text('{"schema": 7}')
    write_run(tmp_path / ".hidden", [])
    result = tk("runs", tmp_path, "--json")
    assert result.exit_code == 0
    listed = json.loads(result.stdout)["runs"]
    assert [one["name"] for one in listed] == ["newer", "old", "b", "a"]
    newer, old, first, second = listed
    assert "written by a newer tkernels" in newer["reason"]
    assert "its results.jsonl is from before" in old["reason"]
    assert (first["state"], first["git"], first["rows"], first["failures"]) == ("finished", "cccccccc + diff", 1, 0)
    assert (second["state"], second["failures"], second["finished"]) == ("resumable, 2 of 5 tasks", 1, False)
    table = tk("runs", tmp_path).stdout
    assert "resumable" in table
    assert "2026-01-01 00:00" in table


def test_a_run_is_listed_under_a_name_that_can_be_copied(tmp_path: Path) -> None:
    name = "decode-by-context-20261121-211954-r0a6a9c67"
    write_run(tmp_path / name, [kernel_row(2.0)])
    assert any(line.split()[:1] == [name] for line in tk("runs", tmp_path).stdout.splitlines())


def test_no_runs_and_no_folder_are_said(tmp_path: Path) -> None:
    assert "no runs in" in tk("runs", tmp_path).stdout
    result = tk("runs", tmp_path / "runs")
    assert result.exit_code == 2
    assert "no such folder; `tk run` makes runs/" in result.stderr


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_run_is_no_folder_of_runs(tmp_path: Path, as_json: tuple[str, ...]) -> None:
    result = tk("runs", write_run(tmp_path / "a", []), *as_json)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{tmp_path / 'a'}: is a run itself; `tk runs {tmp_path / 'a'}/..` lists it" in result.stderr


def test_a_comparison_says_its_verdicts_and_what_else_differs(two: tuple[Path, Path]) -> None:
    result = tk("compare", *two)
    assert result.exit_code == 0
    assert "after beside before: of 2 figures, 1 worse, 1 within noise" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    (fused,) = [line for line in lines if line[:1] == ["fused"]]
    assert fused[-1] == "worse"
    assert fused[3].startswith("+")
    assert "versions.triton: 3.5, then 3.6" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80 or "At least 8 processes" in result.stdout


def test_a_comparison_as_json_has_all_of_it(two: tuple[Path, Path]) -> None:
    first, second = two
    found = json.loads(tk("compare", first, second, first, "--json").stdout)["comparisons"]
    assert [(one["first"], one["second"]) for one in found] == [("before", "after"), ("before", "before")]
    fused = found[0]["verdicts"][1]
    assert fused["effect"]["outcome"] == "worse"
    assert fused["effect"]["low"] < fused["effect"]["ratio"] < fused["effect"]["high"]
    assert fused["processes"] == [8, 8]
    assert found[0]["circumstances"] == ["versions.triton: 3.5, then 3.6"]
    assert {one["effect"]["outcome"] for one in found[1]["verdicts"]} == {"within noise"}


def test_of_several_runs_one_that_may_not_be_compared_hides_no_other(two: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = two
    environment = changed(dict(ENVIRONMENT), "device", "name", to="some GPU")
    gpu = write_run(tmp_path / "gpu", timed(1, torch=1), environment=environment)
    result = tk("compare", first, gpu, tmp_path / "none", second)
    assert result.exit_code == 2
    assert "after beside before: of 2 figures, 1 worse" in result.stdout
    assert "device of before and gpu" in result.stderr
    assert "none: no such folder" in result.stderr
    found = json.loads(tk("compare", first, gpu, second, "--json").stdout)
    assert [one["second"] for one in found["comparisons"]] == ["after"]
    (refused,) = found["refused"]
    assert "device of before and gpu" in refused
    alone = tk("compare", first, gpu)
    assert (alone.exit_code, alone.stdout) == (2, "")


def test_that_a_run_was_cut_off_is_said(two: tuple[Path, Path], tmp_path: Path) -> None:
    cut = write_run(tmp_path / "cut", timed(1, yardstick=True, torch=1, fused=2), finished=None, tasks=40)
    assert "cut was cut off after 16 of 40 tasks." in tk("compare", two[0], cut).stdout
    assert "cut was cut off after 16 of 40 tasks." in tk("compare", cut).stdout
    (found,) = json.loads(tk("compare", two[0], cut, "--json").stdout)["comparisons"]
    assert found["cut_off"] == ["cut was cut off after 16 of 40 tasks"]
    assert "cut off" not in tk("compare", *two).stdout
    early = write_run(tmp_path / "early", [], finished=None, tasks=40)
    for refused in (tk("compare", two[0], early), tk("compare", early)):
        assert refused.exit_code == 2
        assert "error: early was cut off after 0 of 40 tasks" in refused.stderr


def test_a_single_run_compares_its_arms(two: tuple[Path, Path]) -> None:
    result = tk("compare", two[0])
    assert "The arms of before: of 1 figure, 1 worse" in result.stdout


def test_bad_input_is_refused_with_alternatives(two: tuple[Path, Path], tmp_path: Path) -> None:
    result = tk("compare", *two, "--across", "divice")
    assert result.exit_code == 2
    assert "there is device, dtype, model, threads, workload; did you mean 'device'?" in result.stderr
    assert tk("compare", tmp_path).exit_code == 2
    other = write_run(
        tmp_path / "gpu", timed(1, torch=1), environment=changed(dict(ENVIRONMENT), "device", "name", to="some GPU")
    )
    result = tk("compare", two[0], other)
    assert result.exit_code == 2
    assert "--across device compares them all the same" in result.stderr
    assert tk("compare", two[0], other, "--across", "device").exit_code == 0


@pytest.mark.parametrize("command", ["runs", "compare"])
def test_no_torch_is_loaded(two: tuple[Path, Path], command: str) -> None:
    code = (
        "import sys, typer\n"
        "from experiments.cli import app\n"
        "try: app(sys.argv[1:], standalone_mode=False)\n"
        "except typer.Exit as end: assert end.exit_code == 0\n"
        "assert not {'torch', 'triton', 'tkernels'} & set(sys.modules)\n"
    )
    arguments = [str(two[0].parent)] if command == "runs" else list(map(str, two))
    done = subprocess.run([sys.executable, "-c", code, command, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "before" in done.stdout


def test_pandas_and_duckdb_read_the_rows_as_they_are(tmp_path: Path) -> None:
    rows = [*timed(0, 3, yardstick=True, torch=1, fused=2), failed(kernel_row(1.0, "broken"))]
    file = write_run(tmp_path / "a", rows) / "results.jsonl"
    frame = pandas.read_json(file, lines=True)
    assert list(frame.stage.unique()) == ["kernels"]
    medians = frame[frame.status == "ok"].groupby("variant").median_us.median()
    assert medians["fused"] > medians["torch"] > 0
    assert frame.median_us.dtype == "float64"
    assert frame[frame.status == "failed"].reason.item() == "out of memory"
    found = duckdb.sql(
        f"SELECT variant, count(*), median(median_us / yardstick_us) FROM read_json('{file}') "
        "WHERE status = 'ok' GROUP BY variant ORDER BY variant"
    ).fetchall()
    assert [(variant, count) for variant, count, _ in found] == [("fused", 3), ("torch", 3)]
    assert found[0][2] / found[1][2] == pytest.approx(2, rel=0.1)


def test_a_figure_that_came_out_infinite_leaves_its_column_one_of_numbers(tmp_path: Path) -> None:
    common: dict[str, Any] = {
        "run_id": "r0", "arm": {"swiglu": "fused"}, "op": "swiglu", "variant": "fused", "dtype": "float32",
        "device": "cpu", "point": "decode", "seed": 0, "rms_error_ratio": None,
    }  # fmt: skip
    rows = [
        Row(stage="check", **common, status="ok", max_error_ratio=0.5),
        Row(
            stage="check", **common, status="wrong", max_error_ratio=float("inf"), reason="max error", replay="tk check"
        ),
    ]
    file = tmp_path / "results.jsonl"
    file.write_text("".join(row.as_json() + "\n" for row in rows))
    frame = pandas.read_json(file, lines=True)
    assert frame.max_error_ratio.dtype == "float64"
    assert frame[frame.max_error_ratio.isna()].not_finite.item() == "max_error_ratio is infinite"
    found = duckdb.sql(f"SELECT max_error_ratio, not_finite FROM read_json('{file}')")
    assert str(found.types[0]) == "DOUBLE"
    assert found.fetchall() == [(0.5, None), (None, "max_error_ratio is infinite")]


@pytest.mark.parametrize("drawn", ["00123456", "12e45678"])
def test_no_run_id_is_taken_for_a_number(drawn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: drawn)
    line = json.dumps({"run_id": new_run_id()})
    assert pandas.read_json(io.StringIO(line), lines=True).run_id.item() == new_run_id()
