"""Which step is next, and until when: what a report does with its time, whoever does the steps, by whatever clock."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from experiments.gpu_report.estimates import CONTEXT_S, Pace
from experiments.gpu_report.journal import OUT_OF_TIME, Journal
from experiments.gpu_report.pieces import Piece, wall_seconds
from experiments.gpu_report.steps import Step, new_step
from experiments.gpu_report.weights import draw_s
from experiments.sweep.tasks import Ended

# A step may take this many times its estimate, and so many seconds at least, before its process is ended: a kernel that
# was not compiled before may take a minute to.
_PATIENCE, _LEAST_S = 4.0, 80.0

GRACE_S = 20.0
"""What a step that was begun just before the deadline may go on past it."""

OnEnded = Callable[[Ended], None]
RunStep = Callable[[Sequence[Step], OnEnded], None]
"""Has one process do the steps, one after the other, each within its time-out and none but the first where it would not
end before its deadline; tells each that ended. With the process ends the rest. What comes back says what a step was
doing once it had begun."""


class Report(Protocol):
    """What is known of the steps, and where what they find is kept."""

    journal: Journal

    def keep(self, step: Step, ended: Ended, reason: str | None) -> None:
        """Keeps and notes what a step came to, so that no kill can lose it. reason: why it did not come to its end."""
        ...


@dataclass
class Machine:
    """What the steps run on.

    Attributes:
        processes: For as many pieces at once.
        made: The keys of the pieces that it has; of those that it was asked for, too: once is enough.
    """

    processes: int
    made: set[str] = field(default_factory=set)

    def lacks(self, steps: Sequence[Step]) -> list[Piece]:
        """What the steps need that is not there, each once."""
        lacking = {piece.key: piece for step in steps for piece in step.pieces if piece.key not in self.made}
        return list(lacking.values())


def seconds_for(step: Step, ratio: float = 1.0) -> float:
    """How long a step may take before its process is ended: it may first have to wait for weights.

    ratio: of what its kind takes to what is reckoned.
    """
    patience = max(_PATIENCE, 2 * ratio)
    return max(_LEAST_S, patience * step.seconds) + patience * sum(map(draw_s, step.models))


def run_steps(
    steps: Sequence[Step],
    report: Report,
    deadline: float,
    run_step: RunStep,
    machine: Machine,
    *,
    now: Callable[[], float] = time.time,
) -> None:
    """Tries every step that is left once, the most valuable that ends in time first, until `deadline`, in seconds since
    the epoch. What did not come to its end is tried again when the report goes on.

    Where a long step no longer fits, shorter ones of less worth take the time that is left: nothing else could, and the
    long one is first in the next command.
    """
    todo = {step.key: step for step in report.journal.left(steps)}
    while group := next_group(list(todo.values()), deadline - now(), report.journal.pace, machine):
        machine.made |= {piece.key for piece in group[0].pieces}
        outcome = _run_group(group, report, deadline, run_step, now)
        if not outcome.begun:
            return  # its process died before it began the step: so would the next
        put_off = filter(outcome.puts_off, todo.values()) if outcome.ended_by is not None else ()
        for key in outcome.begun | {step.key for step in put_off}:
            todo.pop(key, None)


def next_group(todo: Sequence[Step], left: float, pace: Pace, machine: Machine) -> list[Step]:
    """The first step that ends within `left` seconds, with those after it that do too and share its process; or, where
    it lacks pieces, the step that makes these and those of the others that end in time.
    """
    for place, step in enumerate(todo):
        if _needs(step, pace, first=True) > left:
            continue
        lacking = machine.lacks([step])
        making = pace.ratio("precompile") * _making_s(lacking, machine)
        if _needs(step, pace, first=True) + making <= left:
            if lacking:
                pieces = machine.lacks(_in_time(todo[place:], left - making, pace))
                making = pace.ratio("precompile") * _making_s(pieces, machine)  # in which others then no longer fit
                pieces = machine.lacks([step, *_in_time(todo[place:], left - making, pace)])
                return [new_step("precompile", _making_s(pieces, machine), pieces=pieces)]
            return _sharing(todo[place:], left, pace, machine)
    return []


def _sharing(todo: Sequence[Step], left: float, pace: Pace, machine: Machine) -> list[Step]:
    """The first step, and those right after it that share its process, need nothing that is lacking and end in time."""
    group: list[Step] = []
    for step in todo:
        if group and (not step.process or step.process != group[0].process or machine.lacks([step])):
            break
        left -= _needs(step, pace, first=not group)
        if left < 0:
            break
        group.append(step)
    return group


def _in_time(todo: Sequence[Step], left: float, pace: Pace) -> list[Step]:
    """All that would end within `left` seconds, the most valuable first, had they all that they need."""
    found: list[Step] = []
    process = ""
    for step in todo:
        if left <= 0:
            break
        first = not step.process or step.process != process
        if _needs(step, pace, first) <= left:
            left -= min(left, pace.ratio(step.kind) * (step.seconds + CONTEXT_S * first))
            process = step.process
            found.append(step)
    return found


def _making_s(pieces: Sequence[Piece], machine: Machine) -> float:
    """What making pieces is reckoned to take, with a context for each process."""
    return 2 * CONTEXT_S + wall_seconds(pieces, machine.processes) if pieces else 0.0


def _needs(step: Step, pace: Pace, first: bool) -> float:
    """Seconds that a step must have to begin, the first of its process with that process's start."""
    seconds = step.seconds if step.least is None else step.least
    return pace.ratio(step.kind) * (seconds + CONTEXT_S * first)


@dataclass
class _Outcome:
    """What came of a group. begun: the keys of what was begun. ended_by: the step that ended their process."""

    begun: set[str] = field(default_factory=set)
    ended_by: Step | None = None

    def puts_off(self, step: Step) -> bool:
        """Whether a step waits for another command: a peer's that has just ended a process would do so again."""
        ender = self.ended_by
        return ender is not None and ender.is_peer and (ender.op, ender.variant) == (step.op, step.variant)


def _run_group(
    group: Sequence[Step], report: Report, deadline: float, run_step: RunStep, now: Callable[[], float]
) -> _Outcome:
    outcome, by_key, ratio = _Outcome(), {step.key: step for step in group}, report.journal.pace.ratio
    by_key[group[0].key] = replace(group[0], seconds=group[0].seconds + CONTEXT_S)

    def hear(ended: Ended) -> None:
        if ended.doing:
            step = by_key[ended.task.key]
            late = now() >= deadline and ended.seconds < seconds_for(step, ratio(step.kind))
            reason = _why_undone(ended, late)
            outcome.begun.add(step.key)
            outcome.ended_by = step if reason is not None else None
            report.keep(step, ended, reason)

    run_step([_handed_out(step, ratio(step.kind), deadline, now()) for step in group], hear)
    return outcome


def _handed_out(step: Step, ratio: float, deadline: float, at: float) -> Step:
    """As its process gets it: with what it takes at this pace, and until when."""
    timeout = min(seconds_for(step, ratio), deadline - at + GRACE_S)
    pieces = step.pieces if step.kind == "precompile" else ()
    return replace(step, seconds=step.seconds * ratio, timeout=timeout, deadline=deadline, pieces=pieces)


def _why_undone(ended: Ended, late: bool) -> str | None:
    """Why a step did not come to its end; None where it did."""
    if ended.death is None and ended.rows:
        return None
    reason = ended.death or "its process ended without a row"
    return f"{OUT_OF_TIME}{reason}" if late and not reason.startswith(OUT_OF_TIME) else reason
