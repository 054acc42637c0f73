"""A report's folder: a run's folder, which readers of runs read; it goes on, or is refused where it is another's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from experiments.cli import app
from experiments.document import ExperimentError
from experiments.gpu_report import folder as report_folder
from experiments.gpu_report.folder import open_report, read_report
from experiments.gpu_report.steps import Step, new_step
from experiments.runs.folder import RunFolder
from tests.experiments.gpu_report.recorded import describe, timed

GPU = torch.device("cuda", 0)
STEPS = [
    new_step("device", 1.0),
    new_step("time", 1.0, "swiglu", "fused", "new", "T=4096,I=9728"),
    new_step("time", 1.0, "swiglu", "torch", "-", "T=4096,I=9728"),
    new_step("check", 1.0, "swiglu", "fused", "new"),
]
OLD = new_step("time", 1.0, "swiglu", "fused", "old", "T=4096,I=9728")


@pytest.fixture(autouse=True)
def _an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_folder, "describe_device", lambda device: describe("NVIDIA H200"))


def begin(out: Path, *steps: Step) -> RunFolder:
    return open_report(out, GPU, steps or STEPS)


def test_what_failed_and_what_is_of_other_code_is_measured_anew(tmp_path: Path) -> None:
    first = begin(tmp_path, *STEPS, OLD)
    rates = {"copy_bytes_per_s": 1.0, "read_bytes_per_s": 2.0, "matmul_flops_per_s": 3.0}
    first.record([STEPS[0].row(first.run_id, "rates", **rates)], {"copy": [1.0, 2.0]})
    first.record(timed(OLD, 7.0))
    first.record([STEPS[3].row(first.run_id, "report", "failed", "killed by SIGSEGV")])
    first.close()
    known = read_report(tmp_path)
    assert known is not None
    assert [row.task for row in known.rows] == [STEPS[0].key, OLD.key, OLD.key, STEPS[3].key]
    again = begin(tmp_path)
    assert (again.run_id, [row.task for row in again.rows]) == (first.run_id, [STEPS[0].key])
    assert again.samples(STEPS[0].key)["copy"] == [1.0, 2.0]
    again.record(timed(STEPS[1], 6.0))
    again.close()
    last = read_report(tmp_path)
    assert last is not None
    assert [row.task for row in last.rows] == [STEPS[0].key, STEPS[1].key, STEPS[1].key]


def test_a_row_that_was_cut_off_is_lost_alone(tmp_path: Path) -> None:
    first = begin(tmp_path)
    first.record(timed(STEPS[1], 6.0))
    first.close()
    with open(tmp_path / "results.jsonl", "a") as file:
        file.write('{"run_id": "r1", "task": "ch')  # the machine went down here
    again = begin(tmp_path)
    assert {row.task for row in again.rows} == {STEPS[1].key}
    assert "half written" in again.repairs[0]
    again.record(timed(STEPS[2], 9.0))
    again.close()
    last = read_report(tmp_path)
    assert last is not None
    assert last.repairs == ()
    assert {row.task for row in last.rows} == {STEPS[1].key, STEPS[2].key}


def test_two_processes_cannot_have_it(tmp_path: Path) -> None:
    first = begin(tmp_path)
    with pytest.raises(ExperimentError, match="another process is running it"):
        begin(tmp_path)
    first.close()
    begin(tmp_path).close()


def test_a_folder_of_another_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path).close()
    monkeypatch.setattr(report_folder, "describe_device", lambda device: describe("NVIDIA L40S"))
    with pytest.raises(ExperimentError, match="holds facts of NVIDIA H200, and this is NVIDIA L40S"):
        begin(tmp_path)
    monkeypatch.undo()


@pytest.mark.parametrize("words", [["gpu-report", "--dry-run", "--out"], ["results-table"]])
def test_a_folder_of_facts_is_refused_by_name(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "NVIDIA_H200"
    out.mkdir()
    (out / "facts.jsonl").write_text('{"step": "device", "event": "begin", "at": 1.0}\n')
    with pytest.raises(ExperimentError, match="facts.jsonl of an earlier tkernels"):
        begin(out)
    assert [file.name for file in out.iterdir()] == ["facts.jsonl"]
    monkeypatch.setattr("experiments.commands.results_table.RESULTS", tmp_path)
    refused = CliRunner().invoke(app, [*words, str(out)] if words[-1] == "--out" else words)
    assert refused.exit_code == 2
    said = " ".join(refused.stderr.split())
    assert "its rows are in results.jsonl now" in said.replace("a report's", "its")
    assert "remove facts.jsonl to begin anew here" in said


def test_the_folder_of_a_run_is_no_report(tmp_path: Path) -> None:
    begin(tmp_path).close()
    meta = (tmp_path / "run.json").read_text()
    (tmp_path / "run.json").write_text(meta.replace("gpu-report", "decode-attention"))
    with pytest.raises(ExperimentError, match="is a run of 'decode-attention', not a GPU report"):
        begin(tmp_path)


def finished(out: Path, *medians: float) -> Path:
    """A report of one timed variant beside torch, and of what the other steps find."""
    folder = begin(out)
    rates = {"copy_bytes_per_s": 4.3e12, "read_bytes_per_s": 4.4e12, "matmul_flops_per_s": 7.9e14}
    folder.record([STEPS[0].row(folder.run_id, "rates", **rates)])
    for step, median in zip(STEPS[1:3], medians, strict=True):
        folder.record(timed(step, median))
    found: dict[str, Any] = {"test": "drawn cases", "point": "I=8", "runs": 2, "runs_right": 2}
    folder.record([STEPS[3].row(folder.run_id, "hardware", **found)])
    folder.finish("nearest", {}, {})
    folder.close()
    return out


def test_what_reads_runs_reads_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    one, other = finished(tmp_path / "one", 50.0, 60.0), finished(tmp_path / "other", 40.0, 61.0)
    runner = CliRunner()
    compared = runner.invoke(app, ["compare", str(one), str(other)], catch_exceptions=False)
    assert compared.exit_code == 0, compared.stderr
    said = " ".join(compared.stdout.split())
    assert "swiglu, T=4096,I=9728, bfloat16: median_us, us fused 50 40 -20.0%" in said
    arms = runner.invoke(app, ["compare", str(one)], catch_exceptions=False)
    assert (arms.exit_code, "fused" in arms.stdout, "torch" in arms.stdout) == (0, True, True)
    shown = runner.invoke(app, ["report", str(one), "--format", "md"], catch_exceptions=False)
    assert shown.exit_code == 0, shown.stderr
    assert "NVIDIA H200" in shown.stdout
    assert "| fused" in shown.stdout
    written = runner.invoke(app, ["report", str(one)], catch_exceptions=False)
    assert written.exit_code == 0, written.stderr
    assert (one / "report.html").exists()
    listed = runner.invoke(app, ["runs", str(tmp_path)], catch_exceptions=False)
    assert "one" in listed.stdout
    assert "finished" in listed.stdout


def test_a_dry_run_over_a_report_leaves_out_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder = begin(tmp_path)
    folder.record([STEPS[0].row(folder.run_id, "report")])
    folder.close()
    dry = CliRunner().invoke(app, ["gpu-report", "--out", str(tmp_path), "--dry-run"])
    assert "1 steps are done" in dry.stdout
    assert "copy and read bandwidth" not in dry.stdout
