"""What one process of a sweep has to do: plain data, which goes from process to process as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal["check", "kernels", "engine", "peers", "http", "step", "quantization", "report"]
"""report: a step of the GPU report, which says itself what it is."""

TaskPoint = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Task:
    """One process's work. `key` depends on the experiment alone, so that a run which goes on knows what is done.

    plan: its index in the sweep. replicate: which of its repetitions, in an image of its own; 0 where there is one.
    timeout: seconds of its process, None is for ever. The rest says what to do: op and variant (its label) at points
    (name and axes), with what these serve, by their names, and what is foretold at points of full sizes; an arm, by its
    index in the plan, or a peer with the settings found best before, at one of the workloads that the plan's arms
    serve, by its index; a server elsewhere, by its workload's index among those; a quantized checkpoint by its index, 0
    being the dense one.
    """

    key: str
    phase: Phase
    plan: int = 0
    replicate: int = 0
    timeout: float | None = None
    op: str = ""
    variant: str = ""
    points: Sequence[TaskPoint] = ()
    serves: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    full_points: Sequence[TaskPoint] = ()
    arm: int = 0
    workload: int = 0
    peer: str = ""
    peer_settings: Mapping[str, Any] | None = None
    checkpoint: int = 0

    @property
    def is_timed(self) -> bool:
        """Whether its rows compare speeds, so that nothing else may run beside it."""
        return self.phase != "check"
