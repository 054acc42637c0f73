"""A report's processes: what is done when a step raises, hangs, dies or runs out of time, and that the others go on."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from experiments.cli import app
from experiments.commands import gpu_report as command
from experiments.gpu_report import folder as report_folder
from experiments.gpu_report.estimates import CONTEXT_S
from experiments.gpu_report.folder import ReportFolder, open_report, read_report
from experiments.gpu_report.pieces import Piece
from experiments.gpu_report.processes import step_runner
from experiments.gpu_report.steps import Step, new_step
from experiments.gpu_report.supervisor import GRACE_S, Machine, OnEnded, RunStep, run_steps, seconds_for
from experiments.gpu_report.worker import ACTIONS, Action, Job, carry_out, carry_out_all
from experiments.runs.rows import Row
from experiments.sweep.tasks import Ended
from tests.experiments.gpu_report.recorded import describe
from tkernels import OPS, Tuning
from tkernels.clocks import Clocks

STEPS = [
    new_step("device", 1.0),
    new_step("check", 1.0, "swiglu", "fused", "0"),
    new_step("engine", 1.0, "Qwen3-0.6B"),
]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_folder, "describe_device", lambda device: describe("NVIDIA H200"))


def begin(out: Path) -> ReportFolder:
    return open_report(out, torch.device("cuda", 0), STEPS)


@pytest.fixture
def report(tmp_path: Path) -> Iterator[ReportFolder]:
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

    def run_step(steps: Sequence[Step], on_ended: OnEnded) -> None:
        for step in steps:
            ended = Ended(step)
            if asked is not None:
                asked.append(step.kind)
            action = actions.get(step.kind, note)
            carry_out(Job(step, "r1", OPS, CPU, Tuning(), ended.hear), {step.kind: action})
            ended.seconds = step.seconds
            on_ended(ended)

    return run_step


def run(folder: ReportFolder, run_step: RunStep, **more: Callable[[], float]) -> list[str]:
    """The kinds of steps that are left."""
    run_steps(STEPS, folder, time.time() + 60.0, run_step, Machine(1), **more)
    return [step.kind for step in folder.journal.left(STEPS)]


def reason_of(report: ReportFolder, step: Step) -> str:
    return str(report.folder.of_task(step.key)[-1].reason)


def test_a_step_that_raises_is_recorded_with_what_it_knew_and_the_next_begins(report: ReportFolder) -> None:
    assert run(report, in_process({"check": raises})) == ["check"]
    known, failed = report.folder.of_task(STEPS[1].key)
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
    report: ReportFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(job: Job) -> None:
        if job.step.kind == "check":
            raise RuntimeError("the device is lost to this process: illegal address")

    monkeypatch.setattr(Job, "require_device", broken)
    assert run(report, in_process({"check": note})) == ["check"]
    assert reason_of(report, STEPS[1]) == "RuntimeError: the device is lost to this process: illegal address"
    assert len(report.folder.of_task(STEPS[1].key)) == 1  # what it found is nothing to go by


def test_a_broken_device_is_asked_for_after_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def illegal(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", illegal)
    job = Job(STEPS[1], "r1", OPS, torch.device("cuda", 0), Tuning(), lambda message: None)
    with pytest.raises(RuntimeError, match="lost to this process: an illegal memory access"):
        job.require_device()


def dies(reason: str, kind: str = "check") -> RunStep:
    well = in_process({})

    def run_step(steps: Sequence[Step], on_ended: OnEnded) -> None:
        for step in steps:
            if step.kind == kind:
                on_ended(Ended(step, death=reason, doing=step.kind))
                return
            well([step], on_ended)

    return run_step


def test_a_step_that_kills_its_process_costs_no_other(report: ReportFolder) -> None:
    assert run(report, dies("killed by SIGSEGV")) == ["check"]
    assert reason_of(report, STEPS[1]) == "killed by SIGSEGV"


def test_a_step_without_a_row_is_not_done(report: ReportFolder) -> None:
    assert run(report, in_process({"check": lambda job: iter(())})) == ["check"]
    assert reason_of(report, STEPS[1]) == "its process ended without a row"


def test_time_ends_a_report(report: ReportFolder) -> None:
    begun = time.time()
    at = [begun]

    def late(steps: Sequence[Step], on_ended: OnEnded) -> None:
        at[0] += 75.0
        on_ended(Ended(steps[0], death="timeout: it took longer than 75 s", doing="device", seconds=75.0))

    run_steps(STEPS, report, begun + 60.0, late, Machine(1), now=lambda: at[0])
    assert reason_of(report, STEPS[0]) == "out of time: timeout: it took longer than 75 s"
    assert report.journal.failures == {}
    assert {row.task for row in report.folder.rows} == {STEPS[0].key}
    assert run(report, dies("x"), now=lambda: begun + 3600.0) == ["device", "check", "engine"]


def test_a_step_is_given_its_seconds_when_it_begins(report: ReportFolder) -> None:
    """80 s at least, four times its estimate, and 20 s past the deadline at most."""
    given: dict[str, float | None] = {}
    well = in_process({})

    def run_step(steps: Sequence[Step], on_ended: OnEnded) -> None:
        given.update({step.kind: step.timeout for step in steps})
        well(steps, on_ended)

    steps = [STEPS[0], new_step("mark", 50.0, point="batch 1")]
    run_steps(steps, report, time.time() + 100.0, run_step, Machine(1))
    assert given["device"] == 80.0
    assert given["mark"] is not None
    assert 118.0 < given["mark"] <= 100.0 + GRACE_S
    assert seconds_for(steps[1]) == 200.0
    assert seconds_for(steps[1], 5.0) == 500.0


def order(todo: Sequence[Step], left: float, report: ReportFolder, **more: Any) -> list[list[str]]:
    """The kinds of each group that is begun, by a clock that stands still."""
    groups: list[list[str]] = []
    well = in_process({})

    def run_step(steps: Sequence[Step], on_ended: OnEnded) -> None:
        groups.append([step.kind for step in steps])
        well(steps, on_ended)

    run_steps(todo, report, left, run_step, Machine(4, **more), now=lambda: 0.0)
    return groups


def test_no_step_begins_that_cannot_end_and_a_shorter_one_takes_its_place(report: ReportFolder) -> None:
    long, short = new_step("engine", 50.0, "Qwen3-4B"), new_step("check", 5.0, "swiglu", "fused", worth=2)
    parts = new_step("mark", 500.0, point="prefix_cache", least=20.0)
    assert order([long, parts, short], 40.0, report) == [["mark"], ["check"]]
    assert order([long, parts, short], 10.0, report) == []
    assert order([long, parts, short], 60.0, report) == [["engine"]]


def test_steps_that_share_a_process_are_begun_together_as_far_as_they_end(report: ReportFolder) -> None:
    steps = [new_step("time", 10.0, "swiglu", "fused", point=f"T={size}", process="swiglu") for size in range(4)]
    other = new_step("time", 10.0, "rms_norm", "torch", process="rms_norm")
    assert order([*steps, other], 30.0 + CONTEXT_S, report) == [["time"] * 3, ["time"], ["time"]]


def test_what_steps_need_is_made_before_them_once_and_for_all_that_end(report: ReportFolder) -> None:
    pieces = [Piece("config", 4.0, "swiglu", "fused", "0", {"T": size}) for size in range(3)]
    steps = [new_step("tune", 10.0, "swiglu", "fused", point=piece.key, pieces=[piece]) for piece in pieces]
    made: list[list[str]] = []
    well = in_process({})

    def run_step(given: Sequence[Step], on_ended: OnEnded) -> None:
        made.extend([piece.key for piece in step.pieces] for step in given)
        well(given, on_ended)

    machine = Machine(4, {pieces[0].key})
    run_steps(steps, report, 28.0, run_step, machine, now=lambda: 0.0)
    assert made == [[], [pieces[1].key], [], [pieces[2].key], []]  # the first is there; 28 s are enough for one more
    assert report.journal.spent["precompile"][0] > 0
    assert not report.folder.of_task("precompile")


def test_steps_are_reckoned_at_the_pace_of_those_before(report: ReportFolder) -> None:
    steps = [new_step("time", 10.0, "swiglu", "fused", point=f"T={size}") for size in range(40)]
    clock, begun = [0.0], [0]

    def slow(given: Sequence[Step], on_ended: OnEnded) -> None:
        begun[0] += 1
        clock[0] += 30.0
        ended = Ended(given[0], doing="time", seconds=30.0)
        ended.rows.append(given[0].row("r1", "report"))
        on_ended(ended)

    run_steps(steps, report, 1000.0, slow, Machine(1), now=lambda: clock[0])
    assert clock[0] <= 1000.0
    assert 25.0 < report.journal.pace.ratio("time") * 12.0 < 31.0
    assert begun[0] >= 32


def test_the_other_steps_of_a_peer_that_ends_its_process_wait_for_another_command(report: ReportFolder) -> None:
    about: dict[str, Any] = {"process": "rms_norm.flashinfer", "is_peer": True}
    peer = [new_step("time", 1.0, "rms_norm", "flashinfer", point=f"T={size}", **about) for size in range(3)]
    assert order_of_dead([*peer, STEPS[2]], report) == ["time rms_norm.flashinfer T=0", "engine Qwen3-0.6B"]
    assert order_of_dead([*peer, STEPS[2]], report) == [f"time rms_norm.flashinfer T={size}" for size in (1,)]


def order_of_dead(steps: Sequence[Step], report: ReportFolder) -> list[str]:
    """The titles of what is begun, where every step of a peer ends its process."""
    titles: list[str] = []
    well, dead = in_process({}), dies("killed by SIGSEGV", "time")

    def run_step(given: Sequence[Step], on_ended: OnEnded) -> None:
        titles.append(given[0].title)
        (dead if given[0].is_peer else well)(given[:1], on_ended)

    run_steps(steps, report, 1000.0, run_step, Machine(1), now=lambda: 0.0)
    return titles


def test_a_process_that_cannot_begin_is_not_started_for_ever(report: ReportFolder) -> None:
    asked: list[str] = []

    def run_step(steps: Sequence[Step], on_ended: OnEnded) -> None:
        asked.append(steps[0].kind)
        on_ended(Ended(steps[0], death="the server of its replicate ended: exit status 1"))

    assert len(run(report, run_step)) == 3
    assert asked == ["device"]


def test_the_tuned_configs_that_a_step_used_are_noted(report: ReportFolder) -> None:
    used = {"swiglu.fused[I=8]": {"found": "exact"}}

    def run_step(steps: Sequence[Step], on_ended: OnEnded) -> None:
        ended = Ended(steps[0], doing="device", used=used)
        ended.rows.append(steps[0].row("r1", "report"))
        on_ended(ended)

    run(report, run_step)
    assert report.folder.used == used


def test_a_process_ends_before_a_step_that_would_not_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Telling:
        def __call__(self, message: Any) -> None:
            told.append(message.get("step"))

        def within(self, seconds: float) -> None:
            told.append(round(seconds))

    steps = [
        replace(new_step("device", seconds, point=str(seconds)), timeout=80.0, deadline=time.time() + 30.0)
        for seconds in (50.0, 10.0, 45.0)
    ]
    monkeypatch.setitem(ACTIONS, "device", note)
    carry_out_all(steps, lambda step: Job(step, "r1", OPS, CPU, Tuning(), lambda message: None), Telling())  # type: ignore[arg-type]
    assert told == [steps[0].key, 50, steps[1].key, 50]


def test_the_command_goes_on_until_nothing_is_left_and_writes_the_table_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actions: dict[str, Action] = {"check": raises}

    @contextmanager
    def runner(out: Path, run_id: str, device: str) -> Iterator[RunStep]:
        yield in_process(actions)

    monkeypatch.setattr(command, "drawing", lambda models: nullcontext())
    monkeypatch.setattr(command, "device_facts", lambda device: None)
    monkeypatch.setattr(command, "read_clocks", lambda device: Clocks.unknown("not read"))
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


def test_the_dry_run_says_what_each_command_does_and_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = new_step("time", 1.0, "swiglu", "liger", "-", "T=1", refusal="liger_kernel is not installed")
    long = new_step("engine", 500.0, "Qwen3-4B")
    monkeypatch.setattr(command, "make_steps", lambda *given: [*STEPS, absent, long])
    monkeypatch.setenv("COLUMNS", "200")
    words = ["gpu-report", "--out", str(tmp_path / "new"), "--dry-run", "--minutes", "0.4,0.1,9"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["device", "1"] in [line[:2] for line in lines]
    assert ["engine", "Qwen3-4B", "3"] in [line[:3] for line in lines]
    assert "3 would end within 0.4 minutes of command 1." in done.stdout
    assert "0 would end within 0.1 minutes of command 2." in done.stdout
    assert "cannot run here, and the report says so: 1 (1 time)." in done.stdout
    assert "not begun" not in done.stdout
    assert "the kernels' marks and the first of the engine's: all is there after command 3" in done.stdout
    short = CliRunner().invoke(app, [*words[:-1], "0.4"], catch_exceptions=False)
    assert "1 of their 5 steps are left; the same command goes on with the rest" in short.stdout
    assert "not begun: 1 (1 engine); cannot run here, and the report says so: 1 (1 time)." in short.stdout
    assert "Qwen3-4B" not in short.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a worker says where there is no GPU")
def test_a_real_process_without_a_gpu_says_so_and_is_not_started_for_ever(report: ReportFolder) -> None:
    with step_runner(report.path, report.folder.run_id, "cuda:0") as run_step:
        run_steps(STEPS, report, time.time() + 60.0, run_step, Machine(1))
    assert report.folder.rows == []
    log = (report.path / "worker.log").read_text()
    assert "torch.cuda.set_device(device)" in log
    assert log.count("its process left with exit status 1; last printed: ") == 1
