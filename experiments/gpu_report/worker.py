"""A process of steps: does one after the other, and sends each row as it is known."""

import gc
import json
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from experiments.gpu_report import engine, engine_marks, hardware, mark_runs, precompile
from experiments.gpu_report.correctness import Tried, check, rerun, signatures, vary_batches, verify
from experiments.gpu_report.folder import run_name
from experiments.gpu_report.home import RUNS
from experiments.gpu_report.journal import OUT_OF_TIME
from experiments.gpu_report.pieces import Piece, peer_pieces
from experiments.gpu_report.steps import CASES, RERUNS, SIGNATURES, Kind, Step
from experiments.gpu_report.supervisor import GRACE_S
from experiments.gpu_report.worth import REPEATED_POINTS, report_points, tuning_points
from experiments.peers import is_peer, slack_of, with_peers
from experiments.peers.variants import forget_made
from experiments.runs.rows import COLUMNS, Row, Stage, Status
from experiments.stages.context import Send, describe_error, measure_load, measure_process
from tkernels import OPS, Registry, Tuning
from tkernels.contract import Axes, Case
from tkernels.device import device_facts
from tkernels.isolation import Prepare, Tell, Work
from tkernels.measurement import Measurement, Method, measure
from tkernels.tuning_session import tune
from tkernels.variant import UnsupportedError, Variant

METHOD = Method("graph", "cold", 30)

SANITIZED_CASES = 4
BATCHED_CASES = 4


@dataclass(frozen=True)
class Job:
    """What a step is done with. tuning: of the report's own lockfile. load: of the machine, when it began. cases: the
    last that was drawn in this process, for the next step of the same op and point.
    """

    step: Step
    run_id: str
    ops: Registry
    device: torch.device
    tuning: Tuning
    send: Send
    load: float = field(default_factory=measure_load)
    cases: dict[tuple[str, str], Case] = field(default_factory=dict)

    @property
    def variant(self) -> Variant:
        return self.ops[self.step.op].variants[self.step.variant]

    def row(self, stage: Stage, status: Status = "ok", reason: str | None = None, /, **figures: Any) -> Row:
        figures |= measure_process(self.device, self.load)
        return self.step.row(self.run_id, stage, status, reason, **figures)

    def tried(self, test: str, point: str, tried: Tried, **more: Any) -> Row:
        """The row of something that was tried on the device."""
        status: Status = "wrong" if tried.problem else "ok"
        runs = {"runs": tried.runs, "runs_right": tried.right}
        return self.row("hardware", status, tried.problem or None, test=test, point=point, **runs, **more)

    def require_device(self) -> None:
        """Raises where a kernel broke this process's connection to its device: what follows would fail for it."""
        if self.device.type == "cuda" and self.step.kind != "precompile":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as error:
                raise RuntimeError(f"the device is lost to this process: {error}") from error


Action = Callable[[Job], Iterator[Row]]


def carry_out(job: Job, actions: Mapping[Kind, Action] | None = None) -> None:
    """Does the step. What it raises ends it; what it knew by then is kept."""
    job.send({"doing": job.step.kind})
    try:
        for row in (ACTIONS if actions is None else actions)[job.step.kind](job):
            job.require_device()
            job.send({"row": json.loads(row.as_json())})
    except Exception as error:
        job.send({"death": describe_error(error)[:500]})
    job.send({"used": job.tuning.used})


def _rates(job: Job) -> Iterator[Row]:
    rates, timings = hardware.measure_rates(job.device)
    job.send({"samples": timings})
    yield job.row("rates", **rates)


def _precompile(job: Job) -> Iterator[Row]:
    make = precompile.maker(job.ops, job.device)
    precompile.make_all(job.step.pieces, make, precompile.processes(), precompile.STRAGGLER_S)
    yield job.row("report")


def _verify(job: Job) -> Iterator[Row]:
    contract, point = job.variant.contract, job.step.point
    if (contract.name, point) not in job.cases:
        job.cases.clear()
        job.cases[contract.name, point] = contract.case(report_points(contract)[point], 0, job.device)
    case = job.cases[contract.name, point]
    try:
        tried = verify(job.variant, case, job.device)
    except UnsupportedError as error:
        yield job.row("hardware", "unsupported", str(error), test="marked shape", point=point)
    else:
        yield job.tried("marked shape", point, tried, axes=dict(case.axes))


def _check(job: Job) -> Iterator[Row]:
    found = signatures(job.variant, job.device, SIGNATURES)
    for signature in found:
        tried = check(job.variant, signature, -(-CASES // len(found)), job.device)
        yield job.tried("drawn cases", signature.text, tried, axes=dict(signature.axes))


def _tune(job: Job) -> Iterator[Row]:
    point = tuning_points(job.variant, device_facts(job.device))[job.step.point]
    with torch.cuda.device(job.device):
        (result,) = tune([point], job.device, folder=job.tuning.folder)
    about = {"point": job.step.point, "axes": dict(point.axes)}
    if result.entry is not None:
        yield job.row("tuning", config=result.entry.config.as_dict(), **about)
    else:
        refused = job.variant.refusal(point.axes, device_facts(job.device))
        yield job.row("tuning", "unsupported" if refused else "failed", result.reason, **about)


def _time(job: Job) -> Iterator[Row]:
    variant, point = job.variant, job.step.point
    axes = report_points(variant.contract)[point]
    if fault := precompile.fault_of(peer_pieces(variant, axes)):
        raise RuntimeError(fault)
    if is_peer(variant) and (reason := variant.refusal(axes, device_facts(job.device))):
        yield job.row("check", "unsupported", reason, point=point, axes=dict(axes))
        return
    settings: dict[str, Any] = {"tuning": job.tuning, "slack": slack_of(variant)}
    found = measure(variant, point, axes, job.device, method=METHOD, **settings)
    if found.status == "failed":  # what cannot be captured is launched: the timer's name says so
        again = measure(variant, point, axes, job.device, method=replace(METHOD, launch="eager"), **settings)
        found = again if again.status == "ok" else found
    job.send({"samples": found.as_dict()})
    yield from timing_rows(job, found)


def timing_rows(job: Job, found: Measurement) -> Iterator[Row]:
    """The rows of a sweep's check and of its timing: whether a variant was right at the point, and its time there."""
    about: dict[str, Any] = {"point": found.point, "axes": dict(found.axes)}
    judged = {"seed": 0, "max_error_ratio": None, "rms_error_ratio": None}
    if found.status == "unsupported":
        yield job.row("check", "unsupported", found.reason, **about)
    elif found.status == "wrong":
        yield job.row("check", "wrong", found.reason, **about, **judged, replay=None)
    elif found.timing is None:
        yield job.row("kernels", "failed", found.reason, **about)
    else:
        figures = found.as_dict()
        yield job.row("check", **about, **judged)
        yield job.row("kernels", **{name: figures.get(name) for name in COLUMNS["kernels"]["ok"]}, axes=about["axes"])


def _mark(job: Job) -> Iterator[Row]:
    """With the configs that this report tuned, which are in its own folder."""
    name = job.step.point
    run, out = engine_marks.RUNS[name], job.tuning.folder / RUNS / run_name(name)
    sweep = engine_marks.sweep_of(run, str(job.device))
    assert job.step.deadline is not None
    try:
        rows = mark_runs.measure(run, sweep, out, job.tuning, mark_runs.within(run, job.step.deadline))
    except mark_runs.CutOff:
        job.send({"death": f"{OUT_OF_TIME}it goes on where it is, {out.name}"})
        return
    for row in rows:
        yield row.model_copy(update={"run_id": job.run_id, "task": job.step.key})


def _engine(job: Job) -> Iterator[Row]:
    model, dtype = job.step.op, torch.bfloat16
    works = engine.fit_works(model)
    theirs, ours = engine.load_models(model, job.device, dtype, job.ops, job.tuning, works)
    for work in works:
        for found in engine.compare(work, theirs, ours, job.device, dtype):
            about = {"settings": {"model": model, **found.settings}, "workload": work.name, "peer": found.peer}
            if found.timing is None:
                yield job.row("forward", "failed", found.reason, **about)
            else:
                yield job.row("forward", **about, median_us=found.timing.median_us, iqr_us=found.timing.iqr_us)


def _rerun(job: Job) -> Iterator[Row]:
    for point, axes in _repeated_points(job):
        yield job.tried("rerun", point, rerun(job.variant, axes, job.device, RERUNS), axes=dict(axes))


def _stress(job: Job) -> Iterator[Row]:
    for point, axes in _repeated_points(job):
        yield job.tried("stress", point, rerun(job.variant, axes, job.device, RERUNS, busy=True), axes=dict(axes))


def _repeated_points(job: Job) -> Iterator[tuple[str, Axes]]:
    return islice(report_points(job.variant.contract).items(), REPEATED_POINTS[job.step.kind])


def _batch(job: Job) -> Iterator[Row]:
    yield job.tried("batch", f"{BATCHED_CASES} drawn cases", vary_batches(job.variant, BATCHED_CASES, job.device))


def _sanitizer(job: Job) -> Iterator[Row]:
    point, tool = f"{SANITIZED_CASES} drawn cases", shutil.which("compute-sanitizer")
    if tool is None:
        yield job.row("hardware", "unsupported", "compute-sanitizer is not installed", test="sanitizer", point=point)
        return
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "experiments.cli", "check"]
    command += ["--op", job.step.op, "--variant", job.step.variant, "--examples", str(SANITIZED_CASES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    problem = f"exit {done.returncode}: {last}" if done.returncode else ""
    yield job.tried("sanitizer", point, Tried(SANITIZED_CASES, None, problem))


ACTIONS: Mapping[Kind, Action] = {
    "device": _rates,
    "precompile": _precompile,
    "verify": _verify,
    "check": _check,
    "tune": _tune,
    "time": _time,
    "mark": _mark,
    "engine": _engine,
    "rerun": _rerun,
    "stress": _stress,
    "batch": _batch,
    "sanitizer": _sanitizer,
}


def carry_out_all(steps: Sequence[Step], job_of: Callable[[Step], Job], tell: Tell) -> None:
    """Does steps one after the other, each within its time; one after the first begins only where it ends before the
    deadline, by its estimate: the rest is for another process.
    """
    for step in steps:
        assert step.timeout is not None
        assert step.deadline is not None
        left = step.deadline - time.time()
        if step is not steps[0] and step.seconds > left:
            return
        tell({"step": step.key})
        tell.within(min(step.timeout, left + GRACE_S))
        if torch.cuda.is_initialized():  # what a step before left on the device, or had at most, is not this one's
            forget_made()
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        carry_out(job_of(step))


def prepare_steps(about: Mapping[str, Any]) -> Prepare:
    """In a server that compiles. Each process of steps asks for the device itself."""
    warnings.filterwarnings("ignore", message=".*config tuned with.*")
    ops, device = with_peers(OPS), torch.device(about["device"])

    def prepare(given: Sequence[Mapping[str, Any]]) -> Work:
        steps = [step_of(one) for one in given]

        def work(tell: Tell) -> None:
            if steps[0].kind != "precompile":  # that forks, and a process that uses CUDA must not
                torch.cuda.set_device(device)
            cases: dict[tuple[str, str], Case] = {}

            def job_of(step: Step) -> Job:
                # Each with a tuning of its own, which reads what the step before has tuned.
                tuning = Tuning("nearest", Path(about["out"]))
                return Job(step, about["run_id"], ops, device, tuning, tell, cases=cases)

            carry_out_all(steps, job_of, tell)

        return work

    return prepare


def step_of(given: Mapping[str, Any]) -> Step:
    """A step from JSON."""
    return Step(**{**given, "pieces": [Piece(**one) for one in given["pieces"]]})
