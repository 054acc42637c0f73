"""An arm of an experiment brought to its steady state, and one round of a workload from there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from experiments.document import ExperimentError
from experiments.planning.arms import Arm, ServedWorkload
from experiments.planning.plan import Plan
from experiments.planning.requests import requests_of
from experiments.serving.requests import Request
from experiments.stages.timed_llm import TimedLLM, Timeline
from tkernels import Recording, Tuning
from tkernels.ranges import Ranges
from tkernels.spans import Span


@dataclass(frozen=True)
class Steady:
    """An arm's engine and a workload's requests."""

    llm: TimedLLM
    arm: Arm
    workload: ServedWorkload
    requests: Sequence[Request]
    rounds: Iterator[int] = field(default_factory=count, repr=False)

    def serve(self) -> Timeline:
        """A round, which finds nothing in the prefix cache that another left there."""
        salt = f"profile, round {next(self.rounds)}"
        return self.llm.serve(self.requests, batching=self.arm.batching, salt=salt)


def open_steady(
    plan: Plan,
    ranges: Ranges,
    index: int = 0,
    workload: ServedWorkload | None = None,
    tuning: Tuning | None = None,
    **options: Any,
) -> Steady:
    """The arm's engine with these `options` over the arm's own, not warm yet, and its first workload or the given one.

    Raises ExperimentError where the experiment serves nothing, or this arm cannot.
    """
    if plan.model is None or not plan.arms[index].workloads:
        raise ExperimentError([f"{plan.experiment.name}: a profile needs a model and a workload, to have steps"])
    if index in plan.unsupported:
        raise ExperimentError([f"{plan.arms[index].title}: {plan.unsupported[index]}"])
    arm = plan.arms[index]
    served = arm.workloads[0] if workload is None else workload
    llm = TimedLLM(
        plan.model.directory(),
        tuning=Tuning(plan.experiment.tuning) if tuning is None else tuning,
        ranges=ranges,
        **{**plan.engine_options(arm), **options},
    )
    return Steady(llm, arm, served, requests_of(served.requests, plan.model.config.vocab_size))


def recorded(
    plan: Plan,
    index: int = 0,
    workload: ServedWorkload | None = None,
    tuning: Tuning | None = None,
    rounds: int = 1,
) -> tuple[list[Span], Steady]:
    """The spans of so many rounds, after one that compiles and, on a GPU, one that records what comes a second time.

    On a GPU the steps run one after the other, without overlap: a replay's times have to be read before the next one.
    """
    recording = Recording(plan.device)
    steady = open_steady(plan, recording, index, workload, tuning, overlap=False)
    for _ in range(1 if plan.device.type == "cpu" else 2):
        steady.serve()
    recording.clear()
    for _ in range(rounds):
        steady.serve()
    return recording.spans(), steady
