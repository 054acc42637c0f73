"""One run: the stages in order, into one folder."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.document import ExperimentError
from experiments.environment import environment_of
from experiments.models import check_headers
from experiments.plan import Plan, Sweep
from experiments.points import Point, points_of
from experiments.run_folder import RunFolder
from experiments.stages import check, engine, kernels, parity, quantization
from experiments.stages.context import Context
from tkernels import ContractError, Tuning


def run_experiment(
    sweep: Sweep, out: Path | None, overrides: Sequence[str], console: Console, tuning: Tuning | None = None
) -> RunFolder:
    """Runs all stages of every plan and returns the folder with its rows. Progress goes to `console`, which should be
    stderr's. tuning: how tuned configs are found; None is as the experiment says, in the lockfiles of the tree.

    Raises ExperimentError where the folder cannot be made or a point of `shapes` breaks its contract; whatever goes
    wrong in one arm becomes a row.
    """
    points = [_points_of(plan) for plan in sweep.plans]
    for plan in sweep.plans:
        if plan.model is not None and (plan.experiment.workload or plan.experiment.quantization):
            # A preset that has to be trained first shows progress of its own.
            check_headers(plan.model.directory())
    folder = RunFolder(sweep, out)
    environment = environment_of(sweep, folder.run_id, list(overrides))
    folder.write_environment(environment)
    columns = (
        TextColumn("{task.description:<8}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[doing]}", style="dim", markup=False),
    )
    tuning = tuning if tuning is not None else Tuning(sweep.experiment.tuning)
    with Progress(*columns, console=console) as progress:
        for plan, mine in zip(sweep.plans, points, strict=True):
            context = Context(plan, folder, mine, tuning, progress)
            check.run(context)
            kernels.run(context)
            parity.run(context, engine.run(context))
            quantization.run(context)
    folder.write_environment({**environment, "tuning": {"mode": tuning.mode, "used": tuning.used}})
    return folder


def _points_of(plan: Plan) -> dict[str, list[Point]]:
    try:
        return points_of(plan)
    except ContractError as error:
        raise ExperimentError([f"shapes: {error}" if plan.experiment.shapes else str(error)]) from None


def failures(folder: RunFolder) -> list[str]:
    """What makes a run's exit status non-zero: every row that is wrong or failed; or that no engine ran at all."""
    bad = [f"{row.stage} {row.status}: {row.reason}" for row in folder.rows if row.status in ("wrong", "failed")]
    engines = [row for row in folder.rows if row.stage == "engine"]
    if engines and not bad and all(row.status == "unsupported" for row in engines):
        bad.append("no arm is supported here")
    return bad
