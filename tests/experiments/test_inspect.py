"""`tk inspect`: what it prints, what it refuses, and its exit status; the compiler is stood in for by rows."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from experiments.cli import app
from experiments.commands import inspect
from tkernels.verification.ahead_of_time import CompilationError
from tkernels.verification.inspection import expected
from tkernels.verification.inspection.rows import CompiledKernel

GOOD = CompiledKernel(
    "swiglu", "fused", "swiglu_fused", "sm_90", {"BLOCK": 1024}, "ok", registers=32, spill_bytes=0, shared_bytes=0,
    occupancy=1.0, access_bytes={"16": 1.0}, grid=(8192, 14), waves=54.3, compile_s=0.1,
)  # fmt: skip
ABSENT = replace(GOOD, arch="sm_80", status="unsupported", reason="why not; this is sm_80", registers=None, kernel="")


@pytest.fixture
def interrupted() -> bool:
    """Whether Ctrl-C comes after the first variant's rows for the first architecture."""
    return False


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, interrupted: bool) -> list[CompiledKernel]:
    """The rows that the compiler hands back, for a test to fill."""
    rows: list[CompiledKernel] = []

    def stand_in(archs: Sequence[str], names: Sequence[str], **options: Any) -> list[CompiledKernel]:
        if interrupted:
            options["on_whole"](archs[0], names[0], rows)
            raise KeyboardInterrupt
        return rows

    monkeypatch.setattr(inspect, "compile_for", stand_in)
    monkeypatch.setattr(expected, "FOLDER", Path("/nowhere"))
    return rows


def tk(*words: str) -> Result:
    return CliRunner().invoke(app, ["inspect", *words], env={"COLUMNS": "100"})


def test_good_rows_are_a_table_and_status_0(compiled: list[CompiledKernel]) -> None:
    compiled += [GOOD, ABSENT]
    done = tk("--op", "swiglu", "--variant", "fused")
    assert done.exit_code == 0, done.output
    assert "8192x14" in done.output
    assert "- swiglu.fused (sm_80): why not" in done.output
    assert "2 rows, 0 failing" in done.output


@pytest.mark.parametrize("interrupted", [True])
def test_what_was_compiled_before_a_signal_is_shown(compiled: list[CompiledKernel]) -> None:
    compiled += [GOOD]
    done = tk("--op", "swiglu", "--variant", "fused", "--arch", "sm_90,sm_80")
    assert done.exit_code == 130
    assert "8192x14" in done.stdout
    said = "interrupted: 1 of 2 compilations done; not reached, or not whole: swiglu.fused for sm_80"
    assert done.stderr.splitlines()[-1] == f"exit status 130: {said}"


def test_the_overview_has_a_column_for_each_architecture_and_marks_what_fails(compiled: list[CompiledKernel]) -> None:
    compiled += [
        GOOD,
        ABSENT,
        replace(GOOD, variant="grid_stride", kernel="swiglu_grid_stride", spill_bytes=8, registers=255),
    ]
    done = tk("--op", "swiglu")
    assert done.exit_code == 1
    lines = {
        line.split()[0]: line.split()[1:] for line in done.output.splitlines() if line[:3] == " " * 3 and line.strip()
    }
    assert lines == {"fused": ["32", "-"], "grid_stride": ["255!"]}
    assert "FAIL swiglu.grid_stride engine sm_90 (swiglu_grid_stride): spills 8 bytes" in done.output


def test_json_rows_carry_their_failures_and_every_figure_of_the_issue(compiled: list[CompiledKernel]) -> None:
    compiled += [replace(GOOD, narrow=("fused.py:34 bf16 2",))]
    done = tk("--json")
    (row,) = json.loads(done.stdout)
    assert done.exit_code == 1
    assert row["failures"] == ["narrow (16 bytes are wanted): fused.py:34 bf16 2"]
    wanted = "op variant kernel config default arch status registers spill_bytes shared_bytes occupancy "
    wanted += "matrix_instructions access_bytes compile_s"
    assert set(wanted.split()) <= set(row)


def test_rows_worse_than_the_expected_table_fail(
    compiled: list[CompiledKernel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(expected, "FOLDER", tmp_path)
    compiled.append(replace(GOOD, loop_instructions=100))
    assert tk("--op", "swiglu", "--update-expected").exit_code == 0
    assert tk("--op", "swiglu").exit_code == 0
    compiled[0] = replace(GOOD, access_bytes={"16": 0.5, "8": 0.5})
    done = tk("--op", "swiglu")
    assert done.exit_code == 1
    assert "50% of the main loop's bytes in 16-byte accesses, 100% before (expected table)" in done.output
    compiled[0] = replace(GOOD, loop_instructions=103)
    done = tk("--op", "swiglu")
    assert done.exit_code == 1
    assert "its longest loop has 103 instructions, 100 before (expected table)" in done.output


def test_an_update_of_one_op_keeps_the_others_rows_and_drops_those_of_no_variant(
    compiled: list[CompiledKernel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(expected, "FOLDER", tmp_path)
    other = replace(GOOD, op="rms_norm", variant="two_pass")
    compiled += [GOOD, other, replace(GOOD, variant="gone")]
    tk("--update-expected")
    compiled[:] = [replace(GOOD, registers=40)]
    tk("--update-expected", "--op", "swiglu")
    (path,) = tmp_path.iterdir()
    table = expected.read(path)
    assert {(row.op, row.variant, row.registers) for row in table.values()} == {
        ("swiglu", "fused", 40), ("rms_norm", "two_pass", 32),
    }  # fmt: skip


def test_diff_of_two_files_shows_what_changed_and_fails_where_it_is_worse(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path, row in zip(paths, (GOOD, replace(GOOD, registers=64)), strict=True):
        path.write_text(json.dumps([{**row.as_json(), "failures": []}]))
    done = tk("--diff", *map(str, paths), "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == [{"row": GOOD.name, "changed": {"registers": [32, 64]}}]
    assert "No row differs" in tk("--diff", str(paths[0]), str(paths[0])).output
    paths[1].write_text(json.dumps([replace(GOOD, spill_bytes=8).as_json()]))
    assert tk("--diff", *map(str, paths)).exit_code == 1
    for path, count in zip(paths, (100, 103), strict=True):
        path.write_text(json.dumps([replace(GOOD, loop_instructions=count).as_json()]))
    assert tk("--diff", *map(str, paths)).exit_code == 1
    assert tk("--diff", *map(str, reversed(paths))).exit_code == 0
    paths[1].write_text("[{}]")
    done = tk("--diff", *map(str, paths))
    assert done.exit_code == 2
    assert "is no output of tk inspect --json" in done.output


def test_diff_of_two_variants_compares_them_launch_by_launch(compiled: list[CompiledKernel]) -> None:
    compiled += [GOOD, replace(GOOD, variant="grid_stride", registers=40)]
    done = tk("--op", "swiglu", "--diff", "fused", "grid_stride", "--json")
    assert done.exit_code == 0
    assert [one["changed"] for one in json.loads(done.stdout)] == [{"registers": [32, 40]}]


def test_a_tool_that_is_missing_is_a_message_and_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> list[CompiledKernel]:
        raise CompilationError("compiling for sm_90 failed: Cannot find nvdisasm")

    monkeypatch.setattr(inspect, "compile_for", fails)
    done = tk()
    assert done.exit_code == 2
    assert "Cannot find nvdisasm" in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arch", "sm_91"], "there is sm_80, sm_86"),
        (["--op", "swiglu", "--variant", "torch"], "no Triton variant"),
        (["--dump", "sass"], "name an op with --op"),
        (["--op", "swiglu", "--dump", "llir"], "neither ptx nor sass"),
        (["--axes", "T=4"], "name it with --op"),
        (["--diff", "fused", "grid_stride"], "needs --op"),
        (["--op", "swiglu", "--diff", "fused", "torch"], "not a Triton variant"),
        (["--update-expected", "--op", "swiglu", "--axes", "T=4"], "at the points of every run"),
    ],
)
def test_what_cannot_be_inspected_is_refused(words: list[str], message: str) -> None:
    done = tk(*words)
    assert done.exit_code == 2
    assert message in done.output
