"""What a report does, in order: the figures that the project is judged by before everything else."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from experiments.gpu_report.engine_marks import RUNS
from experiments.gpu_report.marks import MARKS
from experiments.peers import is_peer
from experiments.runs.rows import Row, Stage, Status
from experiments.stages.task import Task
from tkernels.contract import Contract, Value
from tkernels.device import DeviceFacts
from tkernels.measurement import benchmark_points, complete_axes
from tkernels.registry import Registry
from tkernels.tuning import bucket, candidates
from tkernels.tuning_session import TuningPoint, in_tuning_order, one_per_bucket
from tkernels.variant import Variant
from tmodel import RANDOM_PRESETS
from tmodel.random_weights import num_parameters

Kind = Literal["device", "precompile", "check", "tune", "time", "mark", "engine", "rerun", "stress", "sanitizer"]

SIGNATURES = 8
"""Compile signatures that a variant is checked at, at most."""

CASES = 200
RERUNS = 1000

# Seconds, by reasoning: a signature or a config compiles in 1-2 s, a process starts in 15, a timed point takes two,
# mostly for making and judging inputs. They decide the dry run's sums and when a step is taken to hang, no more.
_COMPILE_S, _PROCESS_S, _TIME_S, _CHECK_S, _CONFIG_S = 2.0, 15.0, 2.0, 5.0, 0.2

DOES: Mapping[Kind, str] = {
    "device": "copy and read bandwidth, bf16 matmul rate, versions",
    "precompile": "every signature and candidate config into Triton's cache, in parallel processes",
    "check": f"{CASES} drawn cases at up to {SIGNATURES} compile signatures against float64",
    "tune": "every config that the lockfile lacks",
    "time": "checked, then timed: CUDA graph, cold L2",
    "mark": "an engine mark's experiment, as `tk run` does it: see its row in the report",
    "engine": "prefill and decode beside transformers, the same random weights",
    "rerun": f"{RERUNS} runs, bit by bit the same",
    "stress": "the last arriver under load: same bits, counters left at zero",
    "sanitizer": "compute-sanitizer over a few cases",
}


@dataclass(frozen=True)
class Step(Task):
    """One thing to do, in a process of its own. Its key has the hash of the variant's code: changed code is done anew.

    seconds: by estimate; `timeout` is set when it begins. point: of an op, a bucket of shapes, or the name of a mark.
    """

    kind: Kind = "device"
    seconds: float = 0.0
    point: str = ""

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


def new_step(kind: Kind, seconds: float, op: str = "", variant: str = "", source: str = "", point: str = "") -> Step:
    """The step of that kind. source: the hash of the variant's code."""
    subject = f"{op}.{variant}@{source}" if variant else op
    key = " ".join(part for part in (kind, subject, point) if part)
    return Step(key, "report", op=op, variant=variant, kind=kind, seconds=seconds, point=point)


def report_points(contract: Contract) -> dict[str, dict[str, Value]]:
    """The contract's realistic points, and those that a mark adds."""
    points = benchmark_points(contract, torch.device("cuda"))
    for mark in MARKS:
        if mark.op == contract.name and mark.point not in points and mark.axes:
            base = next(iter(contract.benchmarks.values()), {})
            points[mark.point] = complete_axes(contract, {**base, **mark.axes})
    return points


def make_steps(ops: Registry, facts: DeviceFacts, processes: int) -> list[Step]:
    """Every step for a registry with peers, the most valuable first."""
    own = [variant for variant in triton_variants(ops) if not is_peer(variant)]
    marked, others = _places(ops)
    steps = [
        new_step("device", 15.0),
        new_step("precompile", _precompile_seconds(own, facts, processes)),
        *_steps("check", own, _CHECK_S),
        *_measured(ops, facts, marked),
        *(new_step("mark", run.seconds, point=name) for name, run in RUNS.items()),
        *(new_step("engine", _engine_seconds(model), op=model) for model in RANDOM_PRESETS),
        *_steps("rerun", [variant for variant in own if variant.deterministic], 3.0),
        *_steps("stress", [variant for variant in own if has_counters(variant, facts)], 5.0),
        *_steps("sanitizer", own, 25.0),
        *_measured(ops, facts, others),
    ]
    return list({step.key: step for step in steps}.values())


def _engine_seconds(model: str) -> float:
    """Two models' start, and for every billion weights 5 s in which they are drawn, written and read twice."""
    return 20.0 + 5.0 * num_parameters(RANDOM_PRESETS[model]) / 1e9


def _precompile_seconds(variants: Iterable[Variant], facts: DeviceFacts, processes: int) -> float:
    compiled = sum(SIGNATURES + len(candidates(variant, facts.arch)) for variant in variants)
    return _PROCESS_S + compiled * _COMPILE_S / processes


def _places(ops: Registry) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(op, point) of the marks, and of what has none."""
    marked = list(dict.fromkeys((mark.op, mark.point) for mark in MARKS if mark.op in ops))
    every = [(op.name, point) for op in ops.values() for point in report_points(op.contract)]
    return marked, [place for place in every if place not in marked]


def triton_variants(ops: Registry) -> list[Variant]:
    """All that have kernels of Triton, peers' too."""
    return [variant for op in ops.values() for variant in op.variants.values() if variant.kind == "triton"]


def _steps(kind: Kind, variants: Iterable[Variant], seconds: float) -> list[Step]:
    return [_step(kind, variant, seconds) for variant in variants]


def _measured(ops: Registry, facts: DeviceFacts, places: Sequence[tuple[str, str]]) -> list[Step]:
    """For each op and point: its variants tuned, once for each bucket of shapes, then timed beside the peers."""
    steps = []
    for op, point in places:
        axes = report_points(ops[op].contract)[point]
        variants = list(ops[op].variants.values())
        for variant in in_tuning_order(variants):
            seconds = _TIME_S + _CONFIG_S * len(candidates(variant, facts.arch))
            steps.append(_step("tune", variant, seconds, bucket(variant, axes)))
        for variant in variants:
            absent = is_peer(variant) and variant.refusal(axes, facts) is not None
            steps.append(_step("time", variant, 0.0 if absent else _TIME_S, point))
    return steps


def _step(kind: Kind, variant: Variant, seconds: float, point: str = "") -> Step:
    source = variant.source if variant.kernels else "-"
    return new_step(kind, seconds, variant.contract.name, variant.name, source, point)


def has_counters(variant: Variant, facts: DeviceFacts) -> bool:
    """Whether a variant keeps zeroed counters in its workspace at any realistic point, as a last arriver does."""
    config = variant.default_config(facts.arch)
    for axes in report_points(variant.contract).values():
        # Axes that a call binds and a point does not name are options that are off.
        bound = {**dict.fromkeys(variant.contract.arguments, 0), **axes}
        if any(buffer.zeroed for buffer in variant.workspace(bound, config, facts).values()):
            return True
    return False


def tuning_point(variant: Variant, named: str) -> TuningPoint:
    """The realistic point that stands for a shape bucket."""
    points = [TuningPoint(variant, name, axes) for name, axes in report_points(variant.contract).items()]
    return next(p for p in one_per_bucket(points) if bucket(variant, p.axes) == named)


def steps_left(steps: Sequence[Step], rows: Iterable[Row]) -> list[Step]:
    """The steps that did not come to their end yet, in order."""
    done = finished_keys(rows)
    return [step for step in steps if step.key not in done]


def finished_keys(rows: Iterable[Row]) -> set[str]:
    """The steps that came to their end, whatever they found: the others are tried again."""
    rows = list(rows)
    return {row.task for row in rows} - {row.task for row in rows if row.stage == "report" and row.status == "failed"}


def schedule(steps: Sequence[Step], seconds: float) -> list[tuple[Step, float, bool]]:
    """Each step with the time at which it should end, by estimate, and whether that is within `seconds`."""
    rows, ends = [], 0.0
    for step in steps:
        ends += step.seconds
        rows.append((step, ends, ends <= seconds))
    return rows
