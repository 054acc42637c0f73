"""One process of a report: carries out steps, one after the other, and writes down each fact as it is known.

A kernel that reads where it must not takes its whole process with it; the supervisor then starts another one, which
goes on after the step that failed.
"""

import gc
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from experiments.gpu_report import engine, engine_marks, hardware, precompile
from experiments.gpu_report.correctness import check, rerun, signatures, stress
from experiments.gpu_report.journal import Journal, facts
from experiments.gpu_report.steps import CASES, RERUNS, SIGNATURES, Kind, Step, make_steps, report_points, tuning_point
from experiments.gpu_report.supervisor import seconds_left
from experiments.peers import is_peer, slack_of, with_peers
from tkernels import OPS, Registry, Tuning
from tkernels.device import device_facts
from tkernels.isolation import Prepare, Tell, Work
from tkernels.measurement import Measurement, Method, measure
from tkernels.tuning_session import tune
from tkernels.variant import Variant
from tmodel import RANDOM_PRESETS

METHOD = Method("graph", "cold", 30)

SANITIZED_CASES = 4


@dataclass(frozen=True)
class Job:
    """What a step is carried out with. deadline: seconds since the epoch, after which nothing is begun. within: gives
    the process so many seconds from now on.
    """

    journal: Journal
    ops: Registry
    device: torch.device
    deadline: float
    within: Callable[[float], None] = lambda seconds: None

    def left(self) -> float:
        return self.deadline - time.time()

    def lost(self) -> str | None:
        """Why this process can do nothing more with its device: what a kernel broke stays broken until it ends."""
        if self.device.type != "cuda":
            return None
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            return " ".join(str(error).split())[:200]
        return None

    def variant(self, step: Step) -> Variant:
        return self.ops[step.op].variants[step.variant]

    def tuning(self) -> Tuning:
        """The lockfile that this report writes."""
        return Tuning("nearest", self.journal.folder)


class OutOfTimeError(Exception):
    """The deadline passed within a step; what it found is kept and the next run goes on."""


class DeviceLostError(RuntimeError):
    """A kernel broke the connection of this process to its device."""


Actions = Mapping[Kind, Callable[[Step, Job], None]]


def carry_out(steps: Sequence[Step], job: Job, actions: Actions | None = None) -> None:
    """Runs the steps in order until the deadline. One that raises is written down and the next one begins.

    Raises DeviceLostError after a step whose kernel left the device unusable: another process has to go on.
    """
    known = ACTIONS if actions is None else actions
    for step in steps:
        if job.left() <= 0:
            return
        job.within(seconds_left(step, job.deadline))
        job.journal.append(step.name, "begin")
        started = time.monotonic()
        try:
            known[step.kind](step, job)
            status, reason = "done", None
        except OutOfTimeError:
            status, reason = "stopped", "out of time"
        except Exception as error:
            status, reason = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        if broken := job.lost():  # whether the step raised, or took the error for a variant's failure
            status, reason = "failed", f"the device is lost to this process: {broken}"
        job.journal.append(step.name, "end", status=status, reason=reason, seconds=round(time.monotonic() - started, 2))
        if broken:
            raise DeviceLostError(broken)


def _device(step: Step, job: Job) -> None:
    job.journal.append(step.name, "fact", **hardware.describe(job.device))
    job.journal.append(step.name, "fact", **hardware.rates(job.device))


def _precompile(step: Step, job: Job) -> None:
    job.journal.append(step.name, "fact", **precompile.in_parallel(job.device, min(job.left(), 3 * step.seconds)))


def _check(step: Step, job: Job) -> None:
    variant = job.variant(step)
    kept = {fact["signature"] for fact in facts(job.journal.lines(), step.name)}
    found = signatures(variant, job.device, SIGNATURES)
    for signature in found:
        if signature.text in kept:
            continue
        if job.left() <= 0:
            raise OutOfTimeError
        fact = check(variant, signature, -(-CASES // len(found)), job.device)
        job.journal.append(step.name, "fact", op=step.op, variant=step.variant, **fact)


def _tune(step: Step, job: Job) -> None:
    variant = job.variant(step)
    point = tuning_point(variant, step.point)
    with torch.cuda.device(job.device):
        (result,) = tune([point], job.device, folder=job.journal.folder)
    entry = result.entry
    fact: dict[str, Any] = {"timed": result.timed, "known": result.known, "reason": result.reason}
    fact |= {"config": entry.config.as_dict() if entry is not None else None}
    job.journal.append(step.name, "fact", kind="tuning", op=step.op, variant=step.variant, point=step.point, **fact)


def _time(step: Step, job: Job) -> None:
    variant = job.variant(step)
    axes = report_points(variant.contract)[step.point]
    side = "peer" if is_peer(variant) else "torch" if variant.kind == "torch" else "ours"
    if side == "peer" and (reason := variant.refusal(axes, device_facts(job.device))):
        row = Measurement(step.op, step.variant, variant.kind, step.point, axes, "unsupported", reason)
    else:
        settings: dict[str, Any] = {"tuning": job.tuning(), "slack": slack_of(variant)}
        row = measure(variant, step.point, axes, job.device, method=METHOD, **settings)
        if row.status == "failed":  # what cannot be captured is launched: the timer's name says so
            again = measure(variant, step.point, axes, job.device, method=replace(METHOD, launch="eager"), **settings)
            row = again if again.status == "ok" else row
    job.journal.append(step.name, "fact", side=side, **{**row.as_dict(), "kind": "timing"})


def _mark(step: Step, job: Job) -> None:
    """With the configs that this report tuned, which are in its own folder."""
    run = engine_marks.RUNS[step.point]
    sweep = engine_marks.sweep_of(run, str(job.device))
    gc.collect()
    torch.cuda.empty_cache()  # the engines are made in other processes
    out = job.journal.folder / "runs" / f"{step.point.replace(' ', '-').replace('=', '-')}-{time.time_ns()}"
    job.journal.append(step.name, "fact", **engine_marks.measure(run, sweep, out, job.tuning()))


def _engine(step: Step, job: Job) -> None:
    kept = {fact["work"] for fact in facts(job.journal.lines(), step.name)}
    works = [work for work in engine.WORKS if work.name not in kept]
    if not works:
        return
    dtype = torch.bfloat16
    theirs, ours = engine.models(RANDOM_PRESETS[step.op], job.device, dtype, job.ops, job.tuning(), works)
    for work in works:
        if job.left() <= 0:
            raise OutOfTimeError
        job.journal.append(step.name, "fact", **engine.compare(step.op, work, theirs, ours, job.device, dtype))


def _rerun(step: Step, job: Job) -> None:
    variant = job.variant(step)
    name, axes = next(iter(report_points(variant.contract).items()))
    fact = rerun(variant, axes, job.device, RERUNS)
    job.journal.append(step.name, "fact", op=step.op, variant=step.variant, point=name, **fact)


def _stress(step: Step, job: Job) -> None:
    variant = job.variant(step)
    for name, axes in list(report_points(variant.contract).items())[:2]:
        fact = stress(variant, axes, job.device, RERUNS)
        job.journal.append(step.name, "fact", op=step.op, variant=step.variant, point=name, **fact)


def _sanitizer(step: Step, job: Job) -> None:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        fact = {"verdict": "not run: compute-sanitizer is not installed", "runs": 0}
    else:
        command = [
            tool,
            "--tool",
            "memcheck",
            "--error-exitcode",
            "9",
            sys.executable,
            "-m",
            "experiments.cli",
            "check",
        ]
        command += ["--op", step.op, "--variant", step.variant, "--examples", str(SANITIZED_CASES)]
        limit = max(1.0, min(job.left(), 4 * step.seconds))
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            raise OutOfTimeError from None
        last = (done.stdout.strip().splitlines() or [""])[-1]
        fact = {"verdict": "ok" if done.returncode == 0 else f"exit {done.returncode}: {last}", "runs": SANITIZED_CASES}
    job.journal.append(step.name, "fact", kind="sanitizer", op=step.op, variant=step.variant, **fact)


ACTIONS: Actions = {
    "device": _device,
    "precompile": _precompile,
    "check": _check,
    "tune": _tune,
    "time": _time,
    "mark": _mark,
    "engine": _engine,
    "rerun": _rerun,
    "stress": _stress,
    "sanitizer": _sanitizer,
}


def prepare_steps(about: Mapping[str, Any]) -> Prepare:
    """In a server that compiles: a task is the names of steps. Each worker asks for the device itself."""

    def prepare(names: Sequence[str]) -> Work:
        def work(tell: Tell) -> None:
            warnings.filterwarnings("ignore", message=".*config tuned with.*")
            device = torch.device(about["device"])
            torch.cuda.set_device(device)
            ops = with_peers(OPS)
            by_name = {step.name: step for step in make_steps(ops, device_facts(device), precompile.processes())}
            job = Job(Journal(Path(about["out"])), ops, device, about["deadline"], tell.within)
            carry_out([by_name[name] for name in names], job)

        return work

    return prepare
