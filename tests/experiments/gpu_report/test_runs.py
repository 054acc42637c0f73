"""A report's processes: what is done when a step raises, hangs, dies or runs out of time, and that a rerun goes on."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from experiments.gpu_report.journal import Journal, done_steps, facts
from experiments.gpu_report.steps import Step
from experiments.gpu_report.supervisor import Process, supervise
from experiments.gpu_report.worker import DeviceLostError, Job, OutOfTimeError, carry_out
from tkernels import OPS

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


class Finished:
    """A process that has ended."""

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        raise AssertionError("it had ended")

    def wait(self, timeout: float | None = None) -> int:
        return self.code


class Hanging(Finished):
    """A process that never ends by itself."""

    def __init__(self) -> None:
        super().__init__(-9)
        self.killed = False

    def poll(self) -> int | None:
        return self.code if self.killed else None

    def kill(self) -> None:
        self.killed = True


class Clock:
    """Seconds that pass when somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = time.time()

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += 10 * seconds


def run_with(folder: Path, worker: Callable[[Sequence[Step]], Process], minutes: float = 60.0) -> tuple[str, ...]:
    clock = Clock()
    journal = Journal(folder)
    deadline = clock.now() + 60 * minutes
    return supervise(STEPS, journal, deadline, worker, now=clock.now, sleep=clock.sleep).left


def test_a_rerun_does_what_is_left_and_nothing_else(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def worker(steps: Sequence[Step]) -> Process:
        asked.append([step.kind for step in steps])
        failing = {"device": note, "check": raises(ValueError("today")), "engine": note}
        carry_out(steps, job(tmp_path), failing if len(asked) == 1 else dict.fromkeys(failing, note))
        return Finished(0)

    assert run_with(tmp_path, worker) == (STEPS[1].name,)
    assert run_with(tmp_path, worker) == ()
    assert run_with(tmp_path, worker) == ()
    assert asked == [["device", "check", "engine"], ["check"]]


def test_a_step_that_kills_its_process_costs_no_other(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def worker(steps: Sequence[Step]) -> Process:
        asked.append([step.kind for step in steps])
        if len(asked) == 1:
            carry_out(steps[:1], job(tmp_path), {"device": note})
            Journal(tmp_path).append(steps[1].name, "begin")  # and here it died
            return Finished(-11)
        carry_out(steps, job(tmp_path), {"engine": note})
        return Finished(0)

    assert run_with(tmp_path, worker) == (STEPS[1].name,)
    assert asked == [["device", "check", "engine"], ["engine"]]
    (died,) = [line for line in Journal(tmp_path).lines() if line.get("status") == "failed"]
    assert died["reason"] == "its process died (exit -11)"


def test_an_earlier_run_that_was_cut_off_ends_no_step_of_this_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(STEPS[2].name, "begin")
    journal.append(STEPS[2].name, "end", status="failed", reason="then")
    journal.append(STEPS[0].name, "begin")  # and here its supervisor was killed
    long_ago = [json.dumps({**line, "at": 1.0}) + "\n" for line in journal.lines()]
    journal.path.write_text("".join(long_ago))

    class Slow(Finished):
        """Starts when it is asked the third time, and dies in its first step."""

        asked = 0

        def poll(self) -> int | None:
            self.asked += 1
            if self.asked < 3:
                return None
            if self.asked == 3:
                journal.append(started[-1][0].name, "begin")
            return self.code

    started: list[Sequence[Step]] = []

    def worker(steps: Sequence[Step]) -> Process:
        started.append(steps)
        return Slow(-11)

    run_with(tmp_path, worker)
    assert [[step.kind for step in steps] for steps in started] == [
        ["device", "check", "engine"], ["check", "engine"], ["engine"],
    ]  # fmt: skip


def test_a_step_that_hangs_is_ended(tmp_path: Path) -> None:
    started: list[Hanging] = []

    def worker(steps: Sequence[Step]) -> Process:
        if started:
            carry_out(steps, job(tmp_path), {"check": note, "engine": note})
            return Finished(0)
        Journal(tmp_path).append(steps[0].name, "begin")
        started.append(Hanging())
        return started[0]

    assert run_with(tmp_path, worker) == (STEPS[0].name,)
    assert started[0].killed
    assert [line["reason"] for line in Journal(tmp_path).lines() if line.get("status") == "stopped"] == [
        "stopped after 60 s"
    ]


def test_time_ends_a_report(tmp_path: Path) -> None:
    def worker(steps: Sequence[Step]) -> Process:
        Journal(tmp_path).append(steps[0].name, "begin")
        return Hanging()

    assert len(run_with(tmp_path, worker, minutes=0.1)) == 3
    (stopped,) = [line for line in Journal(tmp_path).lines() if line["event"] == "end"]
    assert stopped["reason"] == "stopped: out of time"
    assert done_steps(Journal(tmp_path).lines()) == set()


def test_a_worker_that_cannot_start_is_not_started_for_ever(tmp_path: Path) -> None:
    calls: list[int] = []

    def worker(steps: Sequence[Step]) -> Process:
        calls.append(len(steps))
        return Finished(1)

    assert len(run_with(tmp_path, worker)) == 3
    assert calls == [3]
