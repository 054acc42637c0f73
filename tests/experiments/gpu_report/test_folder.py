"""A report's folder: a run's folder, which readers of runs read; it goes on, or is refused where it is another's."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from experiments.cli import app
from experiments.document import ExperimentError
from experiments.gpu_report import folder as report_folder
from experiments.gpu_report.folder import ReportFolder, open_report, read_report
from experiments.gpu_report.home import pack
from experiments.gpu_report.steps import Step, new_step
from experiments.runs.rows import Row
from experiments.sweep.tasks import Ended
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


def begin(out: Path, *steps: Step) -> ReportFolder:
    return open_report(out, GPU, steps or STEPS)


def keep(
    report: ReportFolder, step: Step, rows: list[Row], reason: str | None = None, samples: dict[str, Any] | None = None
) -> None:
    report.keep(step, Ended(step, rows, samples, death=reason, doing=step.kind, seconds=2.0), reason)


def test_what_is_of_other_code_is_measured_anew_and_what_failed_keeps_what_it_had(tmp_path: Path) -> None:
    first = begin(tmp_path, *STEPS, OLD)
    rates = {"copy_bytes_per_s": 1.0, "read_bytes_per_s": 2.0, "matmul_flops_per_s": 3.0}
    keep(first, STEPS[0], [STEPS[0].row("r1", "rates", **rates)], samples={"copy": [1.0, 2.0]})
    keep(first, OLD, timed(OLD, 7.0))
    keep(first, STEPS[1], timed(STEPS[1], 9.0), "killed by SIGSEGV")
    first.close()
    again = begin(tmp_path)
    assert again.folder.run_id == first.folder.run_id
    assert [row.task for row in again.folder.rows] == [STEPS[0].key, *[STEPS[1].key] * 3]
    assert again.folder.samples(STEPS[0].key)["copy"] == [1.0, 2.0]
    assert again.journal.left(STEPS) == [STEPS[2], STEPS[3], STEPS[1]]
    assert again.journal.spent == first.journal.spent == {"device": (1.0, 2.0), "time": (1.0, 2.0)}
    keep(again, STEPS[1], [], "timeout: it took longer than 80 s")
    assert [row.stage for row in again.folder.of_task(STEPS[1].key)] == ["check", "kernels", "report"]
    keep(again, STEPS[1], timed(STEPS[1], 6.0))
    again.close()
    last = read_report(tmp_path)
    assert last is not None
    assert [row.task for row in last.rows] == [STEPS[0].key, STEPS[1].key, STEPS[1].key]
    assert last.rows[-1].median_us == 6.0


def test_a_row_that_was_cut_off_is_lost_alone(tmp_path: Path) -> None:
    first = begin(tmp_path)
    keep(first, STEPS[1], timed(STEPS[1], 6.0))
    first.close()
    with open(tmp_path / "results.jsonl", "a") as file:
        file.write('{"run_id": "r1", "task": "ch')  # the machine went down here
    again = begin(tmp_path)
    assert {row.task for row in again.folder.rows} == {STEPS[1].key}
    assert "half written" in again.repairs[0]
    keep(again, STEPS[2], timed(STEPS[2], 9.0))
    again.close()
    last = read_report(tmp_path)
    assert last is not None
    assert last.repairs == ()
    assert {row.task for row in last.rows} == {STEPS[1].key, STEPS[2].key}


def test_what_cannot_run_on_the_device_is_said_without_trying(tmp_path: Path) -> None:
    absent = new_step("time", 1.0, "swiglu", "liger", "-", "T=1", refusal="liger_kernel is not installed")
    narrow = new_step("verify", 1.0, "rms_norm", "rows_per_program", "0", "T=1", refusal="too wide")
    report = begin(tmp_path, *STEPS, absent, narrow)
    for _ in range(2):
        assert report.refuse([*STEPS, absent, narrow]) == STEPS
    assert [(row.stage, row.status, row.reason) for row in report.folder.rows] == [
        ("check", "unsupported", "liger_kernel is not installed"),
        ("hardware", "unsupported", "too wide"),
    ]
    assert report.journal.left([*STEPS, absent, narrow]) == STEPS
    report.close()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"entries": [{"op"', "not a lockfile: JSONDecodeError"),
        ('{"device": "NVIDIA H200", "entries": [{"op": "swiglu", "triton": 3}]}', "entry 1: variant must be text"),
    ],
    ids=["file", "entry"],
)
def test_a_lockfile_that_cannot_be_read_is_set_aside_and_what_it_held_tuned_anew(
    text: str, why: str, tmp_path: Path
) -> None:
    tune = new_step("tune", 1.0, "swiglu", "fused", "new", "I<=8")
    first = begin(tmp_path, *STEPS, tune)
    keep(first, tune, [tune.row("r1", "tuning", point="I<=8", config={"BLOCK": 64})])
    keep(first, STEPS[1], timed(STEPS[1], 6.0))
    first.close()
    (tmp_path / "NVIDIA_H200.json").write_text(text)
    again = begin(tmp_path, *STEPS, tune)
    assert {row.task for row in again.folder.rows} == {STEPS[1].key}
    (said,) = again.repairs
    assert said.startswith(f"{tmp_path / 'NVIDIA_H200.json'}: {why}")
    assert said.endswith("it is now NVIDIA_H200.unreadable, and what it held is tuned anew")
    assert (tmp_path / "NVIDIA_H200.unreadable").exists()
    again.close()
    assert not begin(tmp_path, *STEPS, tune).repairs


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_a_report_of_another_torch_or_triton_is_refused(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path).close()
    other = describe("NVIDIA H200")
    other["versions"] = {**other["versions"], package: "9.9"}
    monkeypatch.setattr(report_folder, "describe_device", lambda device: other)
    with pytest.raises(ExperimentError, match=rf"begun with {package} .*, and this is {package} 9\.9: give another"):
        begin(tmp_path)


def test_two_processes_cannot_have_it(tmp_path: Path) -> None:
    first = begin(tmp_path)
    with pytest.raises(ExperimentError, match="another process is running it"):
        begin(tmp_path)
    first.close()
    begin(tmp_path).close()


def test_a_folder_of_another_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path).close()
    monkeypatch.setattr(report_folder, "describe_device", lambda device: describe("NVIDIA L40S"))
    with pytest.raises(
        ExperimentError, match="holds facts of NVIDIA H200, and this is NVIDIA L40S: give another folder"
    ):
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


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("environment.json", {"device": None, "versions": None}, "lacks device.name, device.arch, device.multiproc"),
        ("environment.json", {"device": None}, "lacks device.name, device.arch, device.multiprocessors, device.cuda, "),
        ("environment.json", {"device": {"name": "NVIDIA H200"}}, "lacks device.arch, device.multiprocessors, device"),
        ("environment.json", {"device": {**describe("")["device"], "name": 5}}, "device.name must be text, got 5"),
        ("environment.json", {"versions": None}, "lacks versions, which a report's has: give another folder"),
        ("run.json", {"spent": 5}, '"spent" must be an object of two numbers of seconds for each kind of step, got 5'),
        ("run.json", {"spent": {"time": 5}}, '"spent" must be an object of two numbers of seconds'),
        ("run.json", {"spent": {"time": [1.0]}}, '"spent" must be an object of two numbers of seconds'),
        ("run.json", {"spent": {"time": [1.0, "2"]}}, '"spent" must be an object of two numbers of seconds'),
        ("run.json", {"spent": {"time": [1.0, float("nan")]}}, '"spent" must be an object of two numbers of seconds'),
        ("run.json", {"spent": {"time": [-30.0, 1.0]}}, '"spent" must be an object of two numbers of seconds'),
        ("run.json", {"failures": []}, '"failures" must be an object of a count for each step, got []'),
        ("run.json", {"failures": {"device": "x"}}, '"failures" must be an object of a count for each step'),
    ],
)
@pytest.mark.parametrize("is_home", [False, True], ids=["folder", "home"])
def test_a_damaged_file_of_a_report_is_named_by_the_command_and_by_its_dry_run(
    file: str, changes: dict[str, Any], said: str, is_home: bool, tmp_path: Path
) -> None:
    begin(tmp_path).close()
    whole = json.loads((tmp_path / file).read_text())
    kept = {name: value for name, value in {**whole, **changes}.items() if value is not None or name not in changes}
    (tmp_path / file).write_text(json.dumps(kept))
    where = tmp_path / file
    if is_home:
        pack(tmp_path, [])
        for own in tmp_path.iterdir():
            if own.is_file():
                own.unlink()
        where = tmp_path / "home" / "report.tar.gz" / file
    dry = CliRunner().invoke(app, ["gpu-report", "--out", str(tmp_path), "--dry-run"])
    assert dry.exit_code == 2
    assert " ".join(f"{where}: {said}".split()) in " ".join(dry.stderr.replace("\n", " ").split())
    with pytest.raises(ExperimentError, match=re.escape(f"{tmp_path / file}: {said}")):
        begin(tmp_path)


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
    keep(folder, STEPS[0], [STEPS[0].row("r1", "rates", **rates)])
    for step, median in zip(STEPS[1:3], medians, strict=True):
        keep(folder, step, timed(step, median))
    found: dict[str, Any] = {"test": "drawn cases", "point": "I=8", "runs": 2, "runs_right": 2}
    keep(folder, STEPS[3], [STEPS[3].row("r1", "hardware", **found)])
    folder.finish({})
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
    keep(folder, STEPS[0], [STEPS[0].row("r1", "report")])
    folder.close()
    dry = CliRunner().invoke(app, ["gpu-report", "--out", str(tmp_path), "--dry-run"])
    assert "1 steps are done" in dry.stdout
    assert "copy and read bandwidth" not in dry.stdout


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file of a folder."""
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_dry_run_reads_what_was_brought_home_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder = begin(tmp_path / "there")
    keep(folder, STEPS[0], [STEPS[0].row("r1", "report")])
    folder.close()
    out = tmp_path / "here"
    shutil.copytree(tmp_path / "there" / "home", out / "home")
    before = contents(out)
    dry = CliRunner().invoke(app, ["gpu-report", "--out", str(out), "--dry-run"], catch_exceptions=False)
    assert "1 steps are done" in dry.stdout
    assert contents(out) == before
    assert [one.name for one in out.iterdir()] == ["home"]


@pytest.mark.parametrize(
    ("name", "versions", "said"),
    [
        ("NVIDIA L40S", {}, "it holds facts of NVIDIA L40S, and this is NVIDIA H200: give another folder."),
        ("NVIDIA H200", {"triton": "9.9"}, "it was begun with triton 9.9, and this is triton "),
        ("NVIDIA H200", {}, None),
    ],
)
def test_a_dry_run_says_that_the_folder_would_be_refused(
    name: str, versions: dict[str, str], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    then = {**describe(name), "versions": {**report_folder.installed(), **versions}}
    monkeypatch.setattr(report_folder, "describe_device", lambda device: then)
    begin(tmp_path).close()
    dry = CliRunner().invoke(app, ["gpu-report", "--out", str(tmp_path), "--dry-run"], catch_exceptions=False)
    refused = f"With NVIDIA H200 and what is installed here, the command would refuse {tmp_path}: "
    assert (refused in dry.stdout) is (said is not None)
    assert said is None or f"{refused}{said}" in dry.stdout
