"""What commands of so many minutes would do, each on a machine that has nothing yet: the supervisor's own decisions,
with steps that take what they are reckoned to.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from experiments.gpu_report.estimates import AGAIN_S, CONTEXT_S, START_S
from experiments.gpu_report.journal import OUT_OF_TIME, Journal
from experiments.gpu_report.steps import Step, new_step
from experiments.gpu_report.supervisor import GRACE_S, Machine, OnEnded, run_steps
from experiments.gpu_report.weights import draw_s
from experiments.gpu_report.worth import models_to_draw
from experiments.sweep.tasks import Ended

_ROW = new_step("device", 0.0).row("r0", "report")
"""What a step finds, which does not matter here."""


@dataclass(frozen=True)
class Done:
    """A step in a command, the first being 1, in which it ends after so many seconds; cut: it is broken off then."""

    step: Step
    command: int
    ends_s: float
    cut: bool = False


@dataclass
class Remembered:
    """A report that keeps what is known of its steps, and nothing of what they find."""

    journal: Journal = field(default_factory=Journal)

    def keep(self, step: Step, ended: Ended, reason: str | None) -> None:
        self.journal.note(step, ended.seconds, reason)


@dataclass
class Clockwork:
    """A device whose steps take what they are reckoned to, by a clock of its own, which begins with each command.

    worked: of steps that were cut off, the seconds of theirs that are done, by their keys. drawn_s: when each model's
    weights are there.
    """

    clock: float = 0.0
    worked: dict[str, float] = field(default_factory=dict)
    drawn_s: dict[str, float] = field(default_factory=dict)

    def begin(self, left: Sequence[Step]) -> None:
        """A command begins on a fresh machine, with these steps left: its servers start, and weights are drawn."""
        self.clock, self.drawn_s = self.start_s(), {}
        at = self.clock
        for name in models_to_draw(left):
            at += self.draw_s(name)
            self.drawn_s[name] = at

    def start_s(self) -> float:
        """What a command's start takes."""
        return START_S

    def draw_s(self, model: str) -> float:
        """What drawing weights takes."""
        return draw_s(model)

    def now(self) -> float:
        return self.clock

    def take(self, step: Step) -> float:
        """What the step takes, with nothing of it done."""
        return step.seconds

    def run_step(self, steps: Sequence[Step], on_ended: OnEnded) -> None:
        for place, step in enumerate(steps):
            assert step.deadline is not None
            if place and step.seconds > step.deadline - self.clock:
                return
            ended = Ended(step, doing=step.kind)
            ended.seconds = self._spend(step, ended, CONTEXT_S * (not place))
            on_ended(ended)
            if ended.death is not None and not ended.death.startswith(OUT_OF_TIME):
                return

    def _spend(self, step: Step, ended: Ended, context: float) -> float:
        """Moves the clock to the end of the step, says what it came to, and returns what it took."""
        assert step.deadline is not None
        assert step.timeout is not None
        left = step.deadline - self.clock
        limit = min(step.timeout, left + GRACE_S)
        drawn = max((self.drawn_s.get(name, 0.0) for name in step.models), default=0.0)
        waits = max(drawn - self.clock, 0.0)
        lasts = waits + self.take(step) + context - self.worked.get(step.key, 0.0)
        if step.least is not None and lasts > left:
            lasts = self._spend_in_parts(step, step.least - AGAIN_S, left)
            ended.death = f"{OUT_OF_TIME}it goes on"
        elif lasts > limit:
            ended.death, lasts = f"timeout: it took longer than {limit:g} s", limit
        else:
            ended.rows.append(_ROW)
        self.clock += lasts
        return lasts

    def _spend_in_parts(self, step: Step, part: float, left: float) -> float:
        """Does as many parts as fit, after a start; one that proves longer than what is left is lost."""
        part *= self.take(step) / step.seconds
        done = max((left - AGAIN_S) // part * part, 0.0)
        self.worked[step.key] = self.worked.get(step.key, 0.0) + done
        return AGAIN_S + done if done else left + GRACE_S


def foretell(
    steps: Sequence[Step], minutes: Sequence[float], processes: int, journal: Journal
) -> tuple[list[Done], Journal]:
    """What commands of so many minutes do, one after the other, and what is known after them.

    Args:
        journal: What is known before.
    """
    report, device, found = Remembered(journal), Clockwork(), list[Done]()
    for number, length in enumerate(minutes, 1):
        device.begin(report.journal.left(steps))

        def run_step(given: Sequence[Step], on_ended: OnEnded, number: int = number) -> None:
            def hear(ended: Ended) -> None:
                found.append(Done(cast("Step", ended.task), number, device.clock, ended.death is not None))
                on_ended(ended)

            device.run_step(given, hear)

        run_steps(steps, report, 60 * length, run_step, Machine(processes), now=device.now)
    return found, report.journal
