"""The tasks of a run's phases: from its plan, and from what the rows before say can be done at all."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.planning.arms import ServedWorkload
from experiments.planning.plan import Plan, Sweep
from experiments.planning.points import Point, called_points, full_points
from experiments.quantization.models import list_quantized_models
from experiments.runs.rows import Row
from experiments.stages.context import plan_settings
from experiments.stages.task import Task, TaskPoint

RowsOf = Callable[[str], Sequence[Row]]
"""The rows of a task that is done, by its key."""


def check_tasks(sweep: Sweep, points: Sequence[Mapping[str, Sequence[Point]]]) -> list[Task]:
    """One for each variant of each op that some arm of a plan calls: its points there, of each plan."""
    return _with_unique_keys(
        Task(
            f"check/{_plan_prefix(plan)}{op}.{pick.label}", "check", number, timeout=sweep.experiment.timeout,
            op=op, variant=pick.label, points=_as_plain(called), full_points=_as_plain(full_points(plan, op)),
            serves={point.name: point.serves for point in called if point.serves},
        )
        for number, plan in enumerate(sweep.plans)
        for op, picks in plan.picks.items()
        for pick in picks
        for called in (called_points(plan, op, pick, points[number][op]),)
    )  # fmt: skip


def _as_plain(points: Iterable[Point]) -> tuple[TaskPoint, ...]:
    return tuple((point.name, dict(point.axes)) for point in points)


def kernel_tasks(checks: Sequence[Task], rows_of: RowsOf) -> list[Task]:
    """Of the first replicate: each variant at the points where its check was ok."""
    right = {task.key: {row.point for row in rows_of(task.key) if row.status == "ok"} for task in checks}
    return _kernel_tasks((task, [point for point in task.points if point[0] in right[task.key]]) for task in checks)


def _kernel_tasks(checks: Iterable[tuple[Task, Sequence[Any]]]) -> list[Task]:
    return [
        replace(task, key=f"kernels/{task.key.removeprefix('check/')}#0", phase="kernels", points=points)
        for task, points in checks
        if points
    ]


def engine_tasks(sweep: Sweep) -> list[Task]:
    """Of the first replicate: each arm at each workload that it serves, a workload's arms side by side."""
    return _with_unique_keys(
        Task(
            f"engine/{_slug(arm.title)}{_workload_suffix(served)}#0", "engine", number,
            timeout=sweep.experiment.timeout, arm=index, workload=place,
        )
        for number, plan, place, served in _served(sweep)
        for index, arm in enumerate(plan.arms)
        if served in arm.workloads
    )  # fmt: skip


def peer_tasks(sweep: Sweep, engines: Sequence[Task], rows_of: RowsOf) -> list[Task]:
    """Of the first replicate: each peer at each workload that some arm was timed at."""
    return [task for task in all_peer_tasks(sweep) if first_timed(engines, task, rows_of) is not None]


def all_peer_tasks(sweep: Sweep) -> list[Task]:
    """Each peer at each workload."""
    return _with_unique_keys(
        Task(
            f"peers/{_plan_prefix(plan)}{peer}{_workload_suffix(served)}#0", "peers", number,
            timeout=sweep.experiment.timeout, workload=place, peer=peer,
        )
        for number, plan, place, served in _served(sweep)
        for peer in plan.experiment.peers
    )  # fmt: skip


def http_tasks(sweep: Sweep) -> list[Task]:
    """Of the first replicate: each workload that a server elsewhere serves, of no plan's model or dtype."""
    return _with_unique_keys(
        Task(f"http{_workload_suffix(served)}#0", "http", timeout=sweep.experiment.timeout, workload=place)
        for place, served in enumerate(sweep.plans[0].http_workloads)
    )


def _served(sweep: Sweep) -> Iterator[tuple[int, Plan, int, ServedWorkload]]:
    """Each plan with each of its workloads, and their indices."""
    for number, plan in enumerate(sweep.plans):
        if plan.model is not None:
            yield from ((number, plan, place, served) for place, served in enumerate(plan.workloads))


def later_replicates(tasks: Sequence[Task], replicates: int, rows_of: RowsOf) -> list[Task]:
    """What was timed in the first replicate, again in each of the others, one replicate after the other.

    Every second one goes the other way round: whatever drifts hurts all alike, and nobody always follows the same one.
    What has no speed (it failed, or is interpreted) would have none again.
    """
    again = [timed for task in tasks if (timed := _timed_part(task, rows_of(task.key))) is not None]
    return [
        replace(task, key=replicate_key(task, number), replicate=number)
        for number in range(1, replicates)
        for task in (reversed(again) if number % 2 else again)
    ]


def _timed_part(task: Task, rows: Sequence[Row]) -> Task | None:
    """The task at the points where it was timed, a peer with the settings that it had then; None where nothing was."""
    if task.phase == "kernels":
        timed = {row.point for row in rows if row.median_us is not None}
        points = tuple(point for point in task.points if point[0] in timed)
        return replace(task, points=points, full_points=()) if points else None
    row = timed_row(rows)
    return None if row is None else replace(task, peer_settings=row.peer_settings)


def replicate_key(task: Task, number: int) -> str:
    """The key of the task's replicate of that number."""
    return f"{task.key.rpartition('#')[0]}#{number}"


def step_tasks(engines: Sequence[Task], rows_of: RowsOf) -> list[Task]:
    """Of each arm and workload that was timed, once: recording takes time itself, so that it is no timed round."""
    return [_step_task(task) for task in engines if timed_row(rows_of(task.key)) is not None]


def _step_task(engine: Task) -> Task:
    return replace(engine, key=follow_key("step", engine), phase="step")


def follow_key(stage: str, task: Task) -> str:
    """The key of what follows from a task's first replicate."""
    return f"{stage}/{task.key.removesuffix('#0').partition('/')[2]}"


def quantization_tasks(sweep: Sweep) -> list[Task]:
    """Of each plan: the dense model, and each quantized one."""
    quantization = sweep.experiment.quantization
    if quantization is None:
        return []
    names = ["dense", *(one.label for one in list_quantized_models(quantization))]
    return _with_unique_keys(
        Task(
            f"quantization/{_plan_prefix(plan)}{_slug(name)}", "quantization", number,
            timeout=sweep.experiment.timeout, checkpoint=index,
        )
        for number, plan in enumerate(sweep.plans)
        for index, name in enumerate(names)
    )  # fmt: skip


def expected_tasks(sweep: Sweep, points: Sequence[Mapping[str, Sequence[Point]]]) -> list[Task]:
    """Every task that there will be where all goes well and is timed."""
    checks, engines = check_tasks(sweep, points), engine_tasks(sweep)
    timed = [
        *_kernel_tasks((task, task.points) for task in checks),
        *engines,
        *all_peer_tasks(sweep),
        *http_tasks(sweep),
    ]
    replicates = range(sweep.experiment.replicates)
    each = [replace(task, key=replicate_key(task, number)) for number in replicates for task in timed]
    return [*checks, *each, *map(_step_task, engines), *quantization_tasks(sweep)]


def first_timed(engines: Sequence[Task], peer: Task, rows_of: RowsOf) -> Task | None:
    """The arm that a peer is compared with, in its first replicate."""
    beside = (task for task in engines if (task.plan, task.workload) == (peer.plan, peer.workload))
    return next((task for task in beside if timed_row(rows_of(task.key)) is not None), None)


def timed_row(rows: Sequence[Row]) -> Any:
    """The row of an arm or a peer that was timed, or None."""
    return next((row for row in rows if row.status == "ok" and row.tokens_per_s is not None), None)


def _with_unique_keys(tasks: Iterable[Task]) -> list[Task]:
    """The tasks of a phase. What would have the key of one before (names that differ in " " and "_", equal sets of
    scheduler options) is numbered: a row is known by its task's key, and there is no reading rows of two tasks as one.
    """
    found: dict[str, Task] = {}
    for task in tasks:
        first = "#0" if task.key.endswith("#0") else ""
        key, number = task.key, 1
        while key in found:
            number += 1
            key = f"{task.key.removesuffix(first)}~{number}{first}"
        found[key] = replace(task, key=key)
    return list(found.values())


def _plan_prefix(plan: Plan) -> str:
    """What tells a plan from the others of its sweep: "dtype=bfloat16/"."""
    return "".join(f"{name}={_slug(str(value))}/" for name, value in plan_settings(plan).items())


def _workload_suffix(served: ServedWorkload) -> str:
    return f"/{_slug(served.title)}" if served.title else ""


def _slug(text: str) -> str:
    return text.replace(" ", "_")
