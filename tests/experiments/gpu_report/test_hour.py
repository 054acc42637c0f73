"""A report on borrowed machines, each bare and soon gone: what three commands of nine minutes do, over many seeds."""

import random
from contextlib import suppress

import pytest

from experiments.gpu_report.forecast import Clockwork, Remembered, foretell
from experiments.gpu_report.journal import OUT_OF_TIME, Journal
from experiments.gpu_report.steps import Step
from experiments.gpu_report.supervisor import GRACE_S, Machine, run_steps
from experiments.gpu_report.worth import make_steps
from experiments.peers import with_peers
from experiments.sweep.tasks import Ended
from tests.experiments.gpu_report.simulated import Device, Killed
from tkernels import OPS
from tkernels.device import TARGETS

COMMAND_S = 9 * 60.0
FEW, MANY = range(20), pytest.param(range(200), marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    return [step for step in make_steps(with_peers(OPS), TARGETS["sm_90"]) if step.refusal is None]


def device_of(steps: list[Step], seed: int) -> Device:
    """A machine of that seed, on which something hangs, dies, and compiles for a minute: all of it what marks need."""
    chosen = random.Random(seed)
    first = [step for step in steps if step.worth == 0]
    hangs, dies = chosen.sample([step.key for step in first], 2)
    slow = chosen.choice([piece.key for step in first for piece in step.pieces])
    return Device(plan={step.key: step for step in steps}, seed=seed, hangs=hangs, dies=dies, slow=slow)


def command(steps: list[Step], report: Remembered, device: Device, kill_s: float = float("inf")) -> None:
    device.kill_s = kill_s
    device.begin(report.journal.left(steps))
    run_steps(steps, report, COMMAND_S, device.run_step, Machine(device.processes), now=device.now)


def is_all_there(steps: list[Step], seed: int) -> bool:
    """Whether three commands do all that the kernels' marks and the engine's first need, but for what always hangs."""
    device, report = device_of(steps, seed), Remembered()
    for _ in range(3):
        command(steps, report, device)
        assert device.clock <= COMMAND_S + GRACE_S
    left = {step.key for step in steps if step.worth == 0} - report.journal.done
    return left == {device.hangs}


@pytest.mark.parametrize("seeds", [FEW, MANY])
def test_three_commands_of_nine_minutes_do_all_that_the_marks_need(steps: list[Step], seeds: range) -> None:
    done = sum(is_all_there(steps, seed) for seed in seeds)
    assert done >= 0.95 * len(seeds)


class Keeping(Remembered):
    """What is kept of the steps of one command."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(journal)
        self.kept: list[str] = []
        self.cut_off: set[str] = set()  # they go on where they were in the next command

    def keep(self, step: Step, ended: Ended, reason: str | None) -> None:
        super().keep(step, ended, reason)
        self.kept.append(step.key)
        self.cut_off |= {step.key} if (reason or "").startswith(OUT_OF_TIME) else set()


@pytest.mark.parametrize("seeds", [FEW, MANY])
def test_a_kill_at_any_second_loses_one_step_at_most(steps: list[Step], seeds: range) -> None:
    for seed in seeds:
        device, journal = device_of(steps, seed), Journal()
        for number in range(2):
            report, before = Keeping(journal), len(device.begun)
            with suppress(Killed):
                command(steps, report, device, random.Random(repr((seed, number))).uniform(0.0, COMMAND_S))
            begun = device.begun[before:]
            assert begun[: len(report.kept)] == report.kept
            assert len(begun) - len(report.kept) <= 1
        ended = set(report.kept) - report.cut_off
        assert journal.done >= ended - {device.hangs, device.dies} - set(journal.failures)


def test_what_is_done_is_not_done_again_and_marks_go_on_where_they_were(steps: list[Step]) -> None:
    device, report = device_of(steps, 0), Remembered()
    for _ in range(4):
        command(steps, report, device)
    whole = {key for key in device.begun if device.begun.count(key) == 1}
    again = set(device.begun) - whole
    assert again <= {"precompile", device.hangs, device.dies, *(step.key for step in steps if step.least is not None)}


def test_the_forecast_decides_as_the_report_does_where_all_takes_what_it_is_reckoned_to(steps: list[Step]) -> None:
    found, after = foretell(steps, [9.0, 9.0], 15, Journal())
    report, device = Remembered(), Clockwork()
    titles = []
    for _ in range(2):
        device.begin(report.journal.left(steps))

        def run_step(given: list[Step], on_ended: object) -> None:
            titles.extend(step.title for step in given)
            device.run_step(given, on_ended)  # type: ignore[arg-type]

        run_steps(steps, report, COMMAND_S, run_step, Machine(15), now=device.now)  # type: ignore[arg-type]
    assert [one.step.title for one in found] == titles
    assert after.done == report.journal.done
    assert all(one.ends_s <= COMMAND_S for one in found)
    assert [one.step.kind for one in found[:2]] == ["device", "precompile"]
