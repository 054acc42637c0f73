"""Carrying a task out, in whatever process it was given to."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.document import ExperimentError, parse_document
from experiments.planning.plan import Plan, make_sweep
from experiments.runs.imports import imported_files
from experiments.runs.provenance import sha256_of
from experiments.stages import check, engine, http, kernels, peers, quantization, steps
from experiments.stages.context import Context, Send
from experiments.stages.task import Phase, Task
from experiments.sweep.tasks import Setup
from tkernels import Tuning
from tkernels.isolation import Prepare, Work

_STAGES: Mapping[Phase, Callable[[Context], None]] = {
    "check": check.run,
    "kernels": kernels.run,
    "engine": engine.run,
    "peers": peers.run,
    "http": http.run,
    "step": steps.run,
    "quantization": quantization.run,
}


@dataclass(frozen=True)
class Planned:
    """The run's plans, as this process has them. changed: the variants' files that it read are not those that the run
    began with. plans: none where they could not be read.
    """

    plans: Sequence[Plan]
    changed: frozenset[str]


def prepare_tasks(about: Mapping[str, Any]) -> Prepare:
    """In a server: plans what every task of a run needs. For a GPU each child plans for itself."""
    # An interpreted kernel's exp overflows to infinity, as a GPU's does, and says so through numpy.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    setup = Setup(**about)
    planned = None if setup.on_cuda else plans_of(setup)

    def prepare(task: Mapping[str, Any]) -> Work:
        return lambda tell: carry_out(Task(**task), planned or plans_of(setup), setup, tell)

    return prepare


def plans_of(setup: Setup) -> Planned:
    """The run's plans, from its resolved experiment.

    Raises ExperimentError where it no longer resolves, though no variant's file has changed.
    """
    try:
        broken = {Path(file): reason for file, reason in setup.broken.items()}
        plans = make_sweep(parse_document(setup.resolved, "resolved.yaml", Path("/"), ()), broken=broken).plans
    except ExperimentError:
        if changed := _changed_files(setup):
            return Planned((), changed)
        raise
    # Now, and not before: a file that is as it was when the run began was that while it was imported, too.
    return Planned(plans, _changed_files(setup))


def _changed_files(setup: Setup) -> frozenset[str]:
    found = ((file, Path(file)) for file in setup.sources)
    return frozenset(f for f, path in found if not path.is_file() or sha256_of(path) != setup.sources[f])


def carry_out(task: Task, planned: Planned, setup: Setup, send: Send) -> None:
    """Does the task, and sends its messages, as in Ended.hear. What is raised is a fault of the stage itself: what goes
    wrong in a variant, an engine or a peer is a row. A task that would run another code than that which the run began
    with is refused.
    """
    tuning = Tuning(setup.tuning_mode, Path(setup.tuning_folder))
    changed, context = planned.changed, None
    if planned.plans:  # else all that is known is that something has changed
        context = Context(task, planned.plans[task.plan], setup.run_id, tuning, Path(setup.cache), send)
        changed = changed and changed & _called_files(context)
    if context is None or changed:
        send({"death": f"not run: {', '.join(sorted(changed))} has changed since the run began"})
    else:
        _STAGES[task.phase](context)
    send({"used": tuning.used})


def _called_files(context: Context) -> set[str]:
    """The files of the variants that a task calls, and what those import."""
    plan, task = context.plan, context.task
    if task.phase in ("peers", "http"):
        return set()
    if task.phase in ("check", "kernels"):
        files = {context.variant[0].file}
    else:
        files = {plan.ops[op].variants[pick.variant].file for op, pick in plan.running(context.arm).items()}
    return {str(one) for file in files for one in (file, *imported_files(file).values())}
