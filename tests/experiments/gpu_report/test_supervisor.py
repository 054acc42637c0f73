"""A report's processes: what is done when a step raises, hangs, dies or runs out of time, and that the others go on."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from experiments.cli import app
from experiments.commands import gpu_report as command
from experiments.gpu_report import folder as report_folder
from experiments.gpu_report import precompile
from experiments.gpu_report.folder import open_report, read_report
from experiments.gpu_report.steps import Step, new_step, steps_left
from experiments.gpu_report.supervisor import RunStep, run_steps, seconds_for, step_runner
from experiments.gpu_report.worker import Action, Job, carry_out
from experiments.runs.folder import RunFolder
from experiments.runs.rows import Row
from experiments.sweep.tasks import Ended
from tests.experiments.gpu_report.recorded import describe
from tkernels import OPS, Tuning

STEPS = [
    new_step("device", 1.0),
    new_step("check", 1.0, "swiglu", "fused", "0"),
    new_step("engine", 1.0, "Qwen3-0.6B"),
]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_folder, "describe_device", lambda device: describe("NVIDIA H200"))


def begin(out: Path) -> RunFolder:
    return open_report(out, torch.device("cuda", 0), STEPS)


@pytest.fixture
def report(tmp_path: Path) -> Iterator[RunFolder]:
    folder = begin(tmp_path / "report")
    yield folder
    folder.close()


def note(job: Job) -> Iterator[Row]:
    yield job.row("report")


def raises(job: Job) -> Iterator[Row]:
    found: dict[str, Any] = {"test": "drawn cases", "point": "I=8", "runs": 2, "runs_right": 2}
    yield job.row("hardware", **found)
    raise ValueError("no such thing")


def in_process(actions: Mapping[str, Action], asked: list[str] | None = None) -> RunStep:
    """Does steps in this process."""

    def run_step(step: Step) -> Ended:
        ended = Ended(step)
        if asked is not None:
            asked.append(step.kind)
        action = actions.get(step.kind, note)
        carry_out(Job(step, "r1", OPS, CPU, Tuning(), ended.hear), {step.kind: action})
        return ended

    return run_step


def run(folder: RunFolder, run_step: RunStep, **more: Callable[[], float]) -> list[str]:
    """The kinds of steps that are left."""
    run_steps(steps_left(STEPS, folder.rows), folder, time.time() + 60.0, run_step, **more)
    return [step.kind for step in steps_left(STEPS, folder.rows)]


def reason_of(folder: RunFolder, step: Step) -> str:
    return str(folder.of_task(step.key)[-1].reason)


def test_a_step_that_raises_is_recorded_with_what_it_knew_and_the_next_begins(report: RunFolder) -> None:
    assert run(report, in_process({"check": raises})) == ["check"]
    known, failed = report.of_task(STEPS[1].key)
    assert (known.stage, known.runs_right) == ("hardware", 2)
    assert (known.host_peak_bytes or 0) > 1e6
    assert None not in (known.load_before, known.load_after)
    assert (failed.stage, failed.reason) == ("report", "ValueError: no such thing")


def test_a_report_that_goes_on_does_what_is_left_and_nothing_else(tmp_path: Path) -> None:
    asked: list[str] = []
    first = begin(tmp_path)
    assert run(first, in_process({"check": raises}, asked)) == ["check"]
    first.close()
    again = begin(tmp_path)
    assert run(again, in_process({}, asked)) == []
    assert run(again, in_process({}, asked)) == []
    again.close()
    assert asked == ["device", "check", "engine", "check"]


def test_a_lost_device_ends_the_step_whoever_caught_the_error(
    report: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(job: Job) -> None:
        if job.step.kind == "check":
            raise RuntimeError("the device is lost to this process: illegal address")

    monkeypatch.setattr(Job, "require_device", broken)
    assert run(report, in_process({"check": note})) == ["check"]
    assert reason_of(report, STEPS[1]) == "RuntimeError: the device is lost to this process: illegal address"
    assert len(report.of_task(STEPS[1].key)) == 1  # what it found is nothing to go by


def test_a_broken_device_is_asked_for_after_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def illegal(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", illegal)
    job = Job(STEPS[1], "r1", OPS, torch.device("cuda", 0), Tuning(), lambda message: None)
    with pytest.raises(RuntimeError, match="lost to this process: an illegal memory access"):
        job.require_device()


def dies(reason: str, kind: str = "check") -> RunStep:
    well = in_process({})
    return lambda step: Ended(step, death=reason, doing=step.kind) if step.kind == kind else well(step)


def test_a_step_that_kills_its_process_costs_no_other(report: RunFolder) -> None:
    assert run(report, dies("killed by SIGSEGV")) == ["check"]
    assert reason_of(report, STEPS[1]) == "killed by SIGSEGV"


def test_a_step_without_a_row_is_not_done(report: RunFolder) -> None:
    assert run(report, in_process({"check": lambda job: iter(())})) == ["check"]
    assert reason_of(report, STEPS[1]) == "its process ended without a row"


def test_time_ends_a_report(report: RunFolder) -> None:
    times = iter([time.time(), time.time() + 3600.0, time.time() + 3600.0])
    late = "timeout: it took longer than 60 s"
    assert run(report, dies(late, "device"), now=lambda: next(times)) == ["device", "check", "engine"]
    assert reason_of(report, STEPS[0]) == f"out of time: {late}"
    assert {row.task for row in report.rows} == {STEPS[0].key}
    assert run(report, dies(late), now=lambda: time.time() + 3600.0) == ["device", "check", "engine"]


def test_a_step_is_given_its_seconds_when_it_begins(report: RunFolder) -> None:
    """A minute at least, four times its estimate, and 20 s past the deadline at most."""
    given: list[float | None] = []
    well = in_process({})

    def run_step(step: Step) -> Ended:
        given.append(step.timeout)
        return well(step)

    steps = [STEPS[0], new_step("mark", 50.0, point="batch 1")]
    run_steps(steps, report, time.time() + 100.0, run_step)
    assert given[0] == 60.0
    assert given[1] is not None
    assert 118.0 < given[1] <= 120.0
    assert seconds_for(steps[1]) == 200.0


def test_a_process_that_cannot_begin_is_not_started_for_ever(report: RunFolder) -> None:
    asked: list[str] = []

    def run_step(step: Step) -> Ended:
        asked.append(step.kind)
        return Ended(step, death="the server of its replicate ended: exit status 1")

    assert len(run(report, run_step)) == 3
    assert asked == ["device"]


def test_the_tuned_configs_that_a_step_used_are_noted(report: RunFolder) -> None:
    used = {"swiglu.fused[I=8]": {"found": "exact"}}
    well = in_process({})

    def run_step(step: Step) -> Ended:
        ended = well(step)
        ended.used = used
        return ended

    run(report, run_step)
    assert report.used == used


def test_the_command_goes_on_until_nothing_is_left_and_writes_the_table_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actions: dict[str, Action] = {"check": raises}

    @contextmanager
    def runner(folder: RunFolder, device: str) -> Iterator[RunStep]:
        yield in_process(actions)

    monkeypatch.setattr(command, "cuda_device", lambda name, what: CPU)
    monkeypatch.setattr(command, "make_steps", lambda *given: STEPS)
    monkeypatch.setattr(command, "step_runner", runner)
    words = ["gpu-report", "--out", str(tmp_path), "--minutes", "1"]
    first = CliRunner().invoke(app, words, catch_exceptions=False)
    assert first.exit_code == 1
    assert "2 of 3 steps are done" in " ".join(first.stderr.split())
    assert f"left: {STEPS[1].key}" in first.stderr
    table = (tmp_path / "report.md").read_text()
    assert f"- {STEPS[1].key}: ValueError: no such thing" in table
    assert "NVIDIA H200, sm_90" in table
    actions.clear()
    second = CliRunner().invoke(app, words, catch_exceptions=False)
    assert second.exit_code == 0
    assert "1 of 3 steps are left" in second.stderr
    assert "Not done" not in (tmp_path / "report.md").read_text()
    recorded = read_report(tmp_path)
    assert recorded is not None
    assert recorded.finished
    assert {row.task for row in recorded.rows} == {step.key for step in STEPS}
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a worker says where there is no GPU")
def test_a_real_process_without_a_gpu_says_so_and_is_not_started_for_ever(report: RunFolder) -> None:
    with step_runner(report, "cuda:0") as run_step:
        run_steps(STEPS, report, time.time() + 60.0, run_step)
    assert report.rows == []
    log = (report.path / "worker.log").read_text()
    assert "torch.cuda.set_device(device)" in log
    assert log.count("its process left with exit status 1; last printed: ") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a share of the precompilation says where there is no GPU")
def test_a_share_of_the_precompilation_that_dies_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "processes", lambda: 1)
    (problem,) = precompile.in_parallel(torch.device("cuda", 0), 60.0)
    assert problem.startswith("its process left with exit status 1; last printed: ")
