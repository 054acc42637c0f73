"""A device and its clock, both imagined: steps and pieces take what a seed says, one step hangs, one dies, one piece
compiles for a minute, and the command may be killed at any moment.
"""

import heapq
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from experiments.gpu_report.estimates import CONTEXT_S
from experiments.gpu_report.forecast import Clockwork
from experiments.gpu_report.pieces import Piece
from experiments.gpu_report.precompile import STRAGGLER_S
from experiments.gpu_report.steps import Step
from experiments.gpu_report.supervisor import GRACE_S, OnEnded
from experiments.sweep.tasks import Ended

SLOW_PIECE_S = 60.0


class Killed(BaseException):
    """The machine is gone."""


@dataclass
class Device(Clockwork):
    """One fresh machine after the other.

    Attributes:
        plan: Every step as it is planned, by key.
        seed: Of what everything takes, from half to three times its estimate.
        hangs: A step that never ends.
        dies: A step that ends its process, when it is tried first.
        slow: The key of the piece that compiles for a minute.
        kill_s: When the machine is gone.
        begun: Every step that was begun, in order.
    """

    plan: dict[str, Step] = field(default_factory=dict)
    seed: int = 0
    hangs: str = ""
    dies: str = ""
    slow: str = ""
    processes: int = 15
    kill_s: float = float("inf")
    begun: list[str] = field(default_factory=list)
    given_up: set[str] = field(default_factory=set)

    def begin(self, left: Sequence[Step]) -> None:
        super().begin(left)
        self._pass(0.0)

    def start_s(self) -> float:
        return super().start_s() * self._factor("start")

    def draw_s(self, model: str) -> float:
        return super().draw_s(model) * self._factor("weights", model)

    def run_step(self, steps: Sequence[Step], on_ended: OnEnded) -> None:
        begins = self.clock

        def hear(ended: Ended) -> None:
            if self.clock > self.kill_s:
                raise Killed
            on_ended(ended)

        try:
            super().run_step(steps, hear)
        finally:
            assert self.clock >= begins

    def _pass(self, seconds: float) -> None:
        self.clock += seconds
        if self.clock > self.kill_s:
            raise Killed

    def _factor(self, *about: object) -> float:
        return 0.5 + 2.5 * zlib.crc32(repr((self.seed, *about)).encode()) / 2**32

    def take(self, step: Step) -> float:
        if step.kind == "precompile":
            return self._make(step.pieces)
        planned = self.plan[step.key]
        inline = sum(self._piece_s(piece) for piece in planned.pieces if piece.key in self.given_up)
        return planned.seconds * self._factor(step.key) + inline

    def _spend(self, step: Step, ended: Ended, context: float) -> float:
        self.begun.append(step.key)
        if step.key == self.hangs:
            assert step.timeout is not None
            assert step.deadline is not None
            seconds = min(step.timeout, step.deadline - self.clock + 20.0)
            ended.death = f"timeout: it took longer than {seconds:g} s"
            self.clock += seconds
            return seconds
        if step.key == self.dies and self.begun.count(step.key) == 1:
            assert step.deadline is not None
            ended.death = "killed by SIGSEGV"
            seconds = min(step.seconds, step.deadline - self.clock + GRACE_S)  # one that works in parts may be cut off
            self.clock += seconds
            return seconds
        return super()._spend(step, ended, context * self._factor(step.key, "context"))

    def _piece_s(self, piece: Piece) -> float:
        return SLOW_PIECE_S if piece.key == self.slow else piece.seconds * self._factor(piece.key)

    def _make(self, pieces: Sequence[Piece]) -> float:
        """The longest by estimate first, each by whichever process is free; the last are given up after a while."""
        free = [CONTEXT_S * self._factor("process", number) for number in range(self.processes)]
        ends: dict[str, float] = {}
        last_claim = 0.0
        for piece in sorted(pieces, key=lambda piece: -piece.seconds):
            last_claim = heapq.heappop(free)
            ends[piece.key] = last_claim + self._piece_s(piece)
            heapq.heappush(free, ends[piece.key])
        self.given_up = {key for key, end in ends.items() if end > last_claim + STRAGGLER_S}
        return min(max(ends.values()), last_claim + STRAGGLER_S)
