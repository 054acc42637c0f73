"""A report's processes: what is done when a step raises, hangs, dies or runs out of time, and that a rerun goes on."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from experiments.gpu_report import precompile
from experiments.gpu_report.journal import Journal, done_steps, facts
from experiments.gpu_report.steps import Step
from experiments.gpu_report.supervisor import RunWorker, seconds_for, supervise, worker_runner
from experiments.gpu_report.worker import DeviceLostError, Job, OutOfTimeError, carry_out
from tkernels import OPS
from tkernels.isolation import Ending

STEPS = [Step("device", 1.0), Step("check", 1.0, "swiglu", "fused", "0"), Step("engine", 1.0, "Qwen3-0.6B")]
CPU = torch.device("cpu")


def job(folder: Path, seconds: float = 100.0) -> Job:
    return Job(Journal(folder), OPS, CPU, time.time() + seconds)


def note(step: Step, job: Job) -> None:
    job.journal.append(step.name, "fact", kind=step.kind)


def raises(error: Exception) -> Callable[[Step, Job], None]:
    def action(step: Step, job: Job) -> None:
        note(step, job)
        raise error

    return action


def ends(folder: Path) -> dict[str, str]:
    return {line["step"]: line["status"] for line in Journal(folder).lines() if line["event"] == "end"}


def test_a_step_that_raises_is_written_down_and_the_next_begins(tmp_path: Path) -> None:
    actions = {"device": note, "check": raises(ValueError("no such thing")), "engine": note}
    carry_out(STEPS, job(tmp_path), actions)
    assert ends(tmp_path) == {STEPS[0].name: "done", STEPS[1].name: "failed", STEPS[2].name: "done"}
    (failed,) = [line for line in Journal(tmp_path).lines() if line.get("status") == "failed"]
    assert failed["reason"] == "ValueError: no such thing"
    assert len(facts(Journal(tmp_path).lines())) == 3  # what a failing step knew is kept


def test_nothing_begins_past_the_deadline_and_a_stopped_step_is_not_done(tmp_path: Path) -> None:
    carry_out(STEPS, job(tmp_path, seconds=-1.0), {"device": note, "check": note, "engine": note})
    assert Journal(tmp_path).lines() == []
    carry_out(STEPS, job(tmp_path), {"device": note, "check": raises(OutOfTimeError()), "engine": note})
    assert ends(tmp_path)[STEPS[1].name] == "stopped"


def test_a_lost_device_ends_the_process_whoever_caught_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job, "lost", lambda self: "illegal address" if ends(tmp_path) else None)
    with pytest.raises(DeviceLostError):
        carry_out(STEPS, job(tmp_path), {"device": note, "check": note, "engine": note})
    assert ends(tmp_path) == {STEPS[0].name: "done", STEPS[1].name: "failed"}


FINISHED = Ending(1.0)
CRASHED = Ending(1.0, "killed by SIGSEGV", signal=11)
HUNG = Ending(60.0, "timeout: it took longer than 60 s", timed_out=True, signal=9)


def run_with(folder: Path, worker: RunWorker, now: Callable[[], float] = time.time) -> tuple[str, ...]:
    return supervise(STEPS, Journal(folder), time.time() + 60.0, worker, now=now).left


def test_a_rerun_does_what_is_left_and_nothing_else(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def worker(steps: Sequence[Step]) -> Ending:
        asked.append([step.kind for step in steps])
        failing = {"device": note, "check": raises(ValueError("today")), "engine": note}
        carry_out(steps, job(tmp_path), failing if len(asked) == 1 else dict.fromkeys(failing, note))
        return FINISHED

    assert run_with(tmp_path, worker) == (STEPS[1].name,)
    assert run_with(tmp_path, worker) == ()
    assert run_with(tmp_path, worker) == ()
    assert asked == [["device", "check", "engine"], ["check"]]


def test_a_step_that_kills_its_process_costs_no_other(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def worker(steps: Sequence[Step]) -> Ending:
        asked.append([step.kind for step in steps])
        if len(asked) == 1:
            carry_out(steps[:1], job(tmp_path), {"device": note})
            Journal(tmp_path).append(steps[1].name, "begin")  # and here it died
            return CRASHED
        carry_out(steps, job(tmp_path), {"engine": note})
        return FINISHED

    assert run_with(tmp_path, worker) == (STEPS[1].name,)
    assert asked == [["device", "check", "engine"], ["engine"]]
    (died,) = [line for line in Journal(tmp_path).lines() if line.get("status") == "failed"]
    assert died["reason"] == "its process died: killed by SIGSEGV"


def test_an_earlier_run_that_was_cut_off_ends_no_step_of_this_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(STEPS[2].name, "begin")
    journal.append(STEPS[2].name, "end", status="failed", reason="then")
    journal.append(STEPS[0].name, "begin")  # and here its supervisor was killed
    long_ago = [json.dumps({**line, "at": 1.0}) + "\n" for line in journal.lines()]
    journal.path.write_text("".join(long_ago))

    started: list[Sequence[Step]] = []

    def worker(steps: Sequence[Step]) -> Ending:
        started.append(steps)
        if len(started) < 4:
            journal.append(steps[0].name, "begin")
        return CRASHED

    run_with(tmp_path, worker)
    assert [[step.kind for step in steps] for steps in started] == [
        ["device", "check", "engine"], ["check", "engine"], ["engine"],
    ]  # fmt: skip


def test_a_step_that_hangs_is_ended(tmp_path: Path) -> None:
    started: list[Step] = []

    def worker(steps: Sequence[Step]) -> Ending:
        if started:
            carry_out(steps, job(tmp_path), {"check": note, "engine": note})
            return FINISHED
        Journal(tmp_path).append(steps[0].name, "begin")
        started.append(steps[0])
        return HUNG

    assert run_with(tmp_path, worker) == (STEPS[0].name,)
    assert [line["reason"] for line in Journal(tmp_path).lines() if line.get("status") == "stopped"] == [
        "stopped after 60 s"
    ]


def test_time_ends_a_report(tmp_path: Path) -> None:
    late = iter([0.0, *[time.time() + 3600.0] * 9])

    def worker(steps: Sequence[Step]) -> Ending:
        Journal(tmp_path).append(steps[0].name, "begin")
        return HUNG

    assert len(run_with(tmp_path, worker, lambda: next(late))) == 3
    (stopped,) = [line for line in Journal(tmp_path).lines() if line["event"] == "end"]
    assert stopped["reason"] == "stopped: out of time"
    assert done_steps(Journal(tmp_path).lines()) == set()


def test_a_step_is_given_its_seconds_before_it_begins(tmp_path: Path) -> None:
    """A minute at least, four times its estimate, and 20 s past the deadline at most."""
    given: list[float] = []
    steps = [Step("device", 1.0), Step("mark", 50.0, point="batch 1")]
    begun = Job(Journal(tmp_path), OPS, CPU, time.time() + 100.0, given.append)
    carry_out(steps, begun, {"device": note, "mark": note})
    assert given[0] == 60.0
    assert 118.0 < given[1] <= 120.0
    assert seconds_for(steps[1]) == 200.0


def test_a_worker_that_cannot_start_is_not_started_for_ever(tmp_path: Path) -> None:
    calls: list[int] = []

    def worker(steps: Sequence[Step]) -> Ending:
        calls.append(len(steps))
        return Ending(0.0, "its server did not start: exit status 1")

    assert len(run_with(tmp_path, worker)) == 3
    assert calls == [3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a worker says where there is no GPU")
def test_a_real_worker_without_a_gpu_says_so_and_is_not_started_for_ever(tmp_path: Path) -> None:
    with worker_runner(tmp_path, "cuda:0", time.time() + 60.0) as run_worker:
        outcome = supervise(STEPS, Journal(tmp_path), time.time() + 60.0, run_worker)
    assert (len(outcome.left), outcome.workers) == (3, 1)
    log = (tmp_path / "worker.log").read_text()
    assert "torch.cuda.set_device(device)" in log
    assert "its process left with exit status 1; last printed: " in log
    assert Journal(tmp_path).lines() == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a share of the precompilation says where there is no GPU")
def test_a_share_of_the_precompilation_that_dies_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "processes", lambda: 1)
    fact = precompile.in_parallel(torch.device("cuda", 0), 60.0)
    assert (fact["kind"], fact["processes"]) == ("precompile", 1)
    (problem,) = fact["problems"]
    assert problem.startswith("its process left with exit status 1; last printed: ")
