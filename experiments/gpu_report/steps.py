"""What a report is made of: steps, each of which finds rows, and what is known of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from experiments.gpu_report.pieces import Piece
from experiments.runs.rows import Row, Stage, Status
from experiments.stages.task import Task

Kind = Literal[
    "device", "precompile", "verify", "tune", "time", "engine", "mark", "check", "rerun", "stress", "batch", "sanitizer"
]

SIGNATURES = 8
"""Compile signatures that a variant is checked at, at most."""

CASES = 200
RERUNS = 1000

DOES: Mapping[Kind, str] = {
    "device": "copy and read bandwidth, bf16 matmul rate, versions",
    "precompile": "what the steps that end in time need, compiled in parallel processes",
    "verify": "the marked shape against float64, with the default config",
    "check": f"{CASES} drawn cases at up to {SIGNATURES} compile signatures against float64",
    "tune": "every config that the lockfile lacks",
    "time": "checked, then timed: CUDA graph, cold L2",
    "mark": "an engine mark's experiment, as `tk run` does it: see its row in the report",
    "engine": "prefill and decode beside transformers, the same random weights",
    "rerun": f"{RERUNS} runs, bit by bit the same",
    "stress": "the last arriver under load: same bits, counters left at zero",
    "batch": "members of batches of many sizes, each by its bits alone, its config another class's",
    "sanitizer": "compute-sanitizer over a few cases",
}


@dataclass(frozen=True)
class Step(Task):
    """One thing to do. Its key has the hash of the variant's code: changed code is done anew.

    Attributes:
        seconds: By estimate.
        refusal: Why it cannot run on this device, where that is known without trying.
        least: Of a step that goes on where it was cut off, the seconds of the start and of the longest part: with less
            it need not begin. None where it cannot be cut.
        point: Of an op, a bucket of shapes, or the name of a mark.
        worth: 0 of what the kernels' marks and the first of the engine's need, 1 of the other marks, 2 of the rest.
        process: Steps in a row that name the same process share one; "" is one of its own.
        is_peer: Whether it runs another project's kernel.
        models: Presets whose random weights it needs, which are drawn in the background from a command's start.
        pieces: What it needs that `precompile` makes; of that step itself, what it makes.
        deadline: When the report's time is up, in seconds since the epoch; set, as `timeout` is, when it is handed out.
    """

    kind: Kind = "device"
    seconds: float = 0.0
    refusal: str | None = None
    least: float | None = None
    point: str = ""
    worth: int = 0
    process: str = ""
    is_peer: bool = False
    models: Sequence[str] = ()
    pieces: Sequence[Piece] = ()
    deadline: float | None = None

    @property
    def title(self) -> str:
        """The key without the hash."""
        subject = f"{self.op}.{self.variant}" if self.variant else self.op
        return " ".join(part for part in (self.kind, subject, self.point) if part)

    def row(
        self, run_id: str, stage: Stage, status: Status = "ok", reason: str | None = None, /, **figures: Any
    ) -> Row:
        """A row of what it found: `figures` are the columns of the stage and status, and axes where it has some."""
        axes = figures.get("axes") or {}
        if self.variant:
            figures |= {"op": self.op, "variant": self.variant}
        return Row(
            run_id=run_id, task=self.key, stage=stage, status=status, reason=reason, device="cuda",
            arm={self.op: self.variant} if self.variant else {},
            dtype=str(axes.get("activation", axes.get("codes", "bfloat16"))), **figures,
        )  # fmt: skip


def new_step(
    kind: Kind, seconds: float, op: str = "", variant: str = "", source: str = "", point: str = "", **more: Any
) -> Step:
    """The step of that kind. source: the hash of the variant's code. more: other attributes of the step."""
    subject = f"{op}.{variant}@{source}" if variant else op
    key = " ".join(part for part in (kind, subject, point) if part)
    return Step(key, "report", op=op, variant=variant, kind=kind, seconds=seconds, point=point, **more)
