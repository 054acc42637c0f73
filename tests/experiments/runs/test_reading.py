"""Folders that are runs, that are none, and that were cut off."""

import json
from pathlib import Path

import pytest

from experiments.document import ExperimentError
from experiments.runs.reading import read_run
from tests.experiments.runs.folders import ENVIRONMENT, RESOLVED, kernel_row, write_run


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = [kernel_row(2.0), kernel_row(3.0, "fused"), kernel_row(4.0, replicate=1)]
    run = read_run(write_run(tmp_path / "mine", written))
    assert [json.loads(row.as_json()) for row in run.rows] == written
    assert (run.name, run.finished, run.repairs) == ("mine", True, ())
    assert (run.environment, run.resolved) == (ENVIRONMENT, RESOLVED)
    assert run.meta["run_id"] == "0123abcd"


@pytest.mark.parametrize("kept", [1, 40, -2, -1])
def test_a_half_written_last_line_is_left_out_and_said(tmp_path: Path, kept: int) -> None:
    file = write_run(tmp_path / "mine", [kernel_row(2.0), kernel_row(3.0, "fused")], finished=None) / "results.jsonl"
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + second[:kept])
    run = read_run(tmp_path / "mine")
    assert not run.finished
    (repair,) = run.repairs
    assert run.lost_rows == (kept != -1)
    if kept == -1:  # all of the row, without its line's end
        assert len(run.rows) == 2
        assert "line 2, the last, is a whole row without its line's end: kept" in repair
    else:
        assert [row.variant for row in run.rows] == ["torch"]
        assert "line 2, the last, is half written" in repair


def test_a_run_that_ended_and_has_fewer_tasks_now_says_so(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "mine", [kernel_row(2.0), kernel_row(3.0, "fused")], tasks=3))
    assert run.lost_rows
    (repair,) = run.repairs
    assert "has the rows of 2 of the 3 tasks that the run ended with" in repair


def test_a_line_cut_inside_a_letter_is_half_written_too(tmp_path: Path) -> None:
    line = json.dumps(kernel_row(2.0, point="naïve"), ensure_ascii=False).encode()
    (write_run(tmp_path / "mine", []) / "results.jsonl").write_bytes(line[: line.index("ï".encode()) + 1])
    run = read_run(tmp_path / "mine")
    assert run.rows == ()
    assert "half written" in run.repairs[0]


def test_the_rows_of_a_task_that_was_cut_off_are_left_out_together(tmp_path: Path) -> None:
    two = [
        kernel_row(2.0, task="a", task_rows=2),
        kernel_row(3.0, task="b", task_rows=2),
        kernel_row(3.0, task="a", task_rows=2),
    ]
    run = read_run(write_run(tmp_path / "mine", two, finished=None))
    assert [row.task for row in run.rows] == ["a", "a"]
    assert "task 'b' has 1 of its 2 rows" in run.repairs[0]


def test_a_run_that_was_cut_off_before_its_first_row_has_none(tmp_path: Path) -> None:
    (write_run(tmp_path / "mine", [], finished=None) / "results.jsonl").unlink()
    assert read_run(tmp_path / "mine").rows == ()


def test_an_experiment_that_was_changed_afterwards_is_noticed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "mine", [kernel_row(2.0)])
    (folder / "resolved.yaml").write_text("name: other\n")
    (repair,) = read_run(folder).repairs
    assert "changed since the run" in repair


def refusal(path: Path) -> str:
    with pytest.raises(ExperimentError) as caught:
        read_run(path)
    (problem,) = caught.value.problems
    assert str(path) in problem
    return problem


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "decode-1", [kernel_row(2.0)])
    assert "no such folder; did you mean 'decode-1'?" in refusal(tmp_path / "decode-2")
    assert "is a file; a run is a folder" in refusal(folder / "run.json")
    (folder / "run.json").unlink()
    assert "not a run of schema 1: there is no run.json (its results.jsonl is from before" in refusal(folder)
    (folder / "results.jsonl").unlink()
    assert "(not a run)" in refusal(folder)


def test_a_newer_schema_is_refused_and_so_is_a_broken_run_json(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "mine", [], schema=2)
    assert "written by a newer tkernels, in schema 2; this one reads schema 1" in refusal(folder)
    for text, message in (
        ('{"schema": "1"}', "must be a number from 1, got '1'"),
        ('{"schema": true}', "must be a number from 1, got True"),
        ('{"schema": 1, "run_id": "a"}', "lacks 'name', 'created', 'finished', 'resolved_sha256', 'tasks', 'executor'"),
        ("[]", "must be an object, got list"),
        ('{"schema', "not JSON"),
    ):
        (folder / "run.json").write_text(text)
        assert message in refusal(folder)


@pytest.mark.parametrize("name", ["resolved.yaml", "environment.json", "results.jsonl"])
def test_a_file_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "mine", [kernel_row(2.0)])
    (folder / name).unlink()
    assert f"{name}: missing" in refusal(folder)


def test_damage_that_no_kill_leaves_is_refused_with_its_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "mine", [kernel_row(2.0), kernel_row(3.0, "fused")])
    file = folder / "results.jsonl"
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first[:50] + b"\n" + second)
    assert "results.jsonl: line 1 is no row: Invalid JSON" in refusal(folder)
    file.write_bytes(first + second.replace(b'"decode"', b'{"a": 1}'))
    assert "line 2 is no row: point: Input should be a valid string" in refusal(folder)
    file.write_bytes(first + first)
    assert "task 'kernels swiglu torch 0' has 2 rows, and says that it wrote 1" in refusal(folder)


def test_an_environment_that_is_missing_or_hollow_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [])
    (folder / "environment.json").write_text('{"device": null, "git": {}}')
    with pytest.raises(ExperimentError, match="environment.json: device: must be an object"):
        read_run(folder)
    (folder / "environment.json").unlink()
    with pytest.raises(ExperimentError, match="environment.json: missing"):
        read_run(folder)
