"""The tasks of a run's phases: from its plan, and from what the rows before say can be done at all."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.planning.arms import ServedWorkload
from experiments.planning.plan import Plan, Sweep
from experiments.planning.points import Point
from experiments.quantization.models import list_quantized_models
from experiments.runs.rows import Row, Status
from experiments.stages.context import plan_settings
from experiments.stages.task import Task

RowsOf = Callable[[str], Sequence[Row]]
"""The rows of a task that is done, by its key."""


def check_tasks(sweep: Sweep, points: Sequence[Mapping[str, Sequence[Point]]]) -> list[Task]:
    """One for each variant of each op that some arm of a plan calls: all its points, of each plan."""
    return _told_apart(
        Task(
            f"check/{_of_plan(plan)}{op}.{pick.label}", "check", number, timeout=sweep.experiment.timeout,
            op=op, variant=pick.label, points=tuple((point.name, dict(point.axes)) for point in points[number][op]),
            serves={point.name: point.serves for point in points[number][op] if point.serves},
        )
        for number, plan in enumerate(sweep.plans)
        for op, picks in plan.picks.items()
        for pick in picks
    )  # fmt: skip


def kernel_tasks(checks: Sequence[Task], rows_of: RowsOf) -> list[Task]:
    """Of the first replicate: each variant at the points where its check was ok."""
    tasks = []
    for task in checks:
        right = {row.point for row in rows_of(task.key) if row.stage == "check" and row.status == "ok"}
        points = tuple(point for point in task.points if point[0] in right)
        if points:
            key = f"kernels/{task.key.removeprefix('check/')}#0"
            tasks.append(replace(task, key=key, phase="kernels", points=points))
    return tasks


def engine_tasks(sweep: Sweep) -> list[Task]:
    """Of the first replicate: each arm at each workload that it serves, a workload's arms side by side."""
    return _told_apart(
        Task(
            f"engine/{_slug(plan.arms[index].title)}{_named(served)}#0", "engine", number,
            timeout=sweep.experiment.timeout, arm=index, workload=place,
        )
        for number, plan in enumerate(sweep.plans)
        if plan.model is not None
        for place, served in enumerate(plan.workloads)
        for index in range(len(plan.arms))
        if served in plan.arms[index].workloads
    )  # fmt: skip


def peer_tasks(sweep: Sweep, engines: Sequence[Task], rows_of: RowsOf) -> list[Task]:
    """Of the first replicate: each peer at each workload that some arm was timed at."""
    return [task for task in all_peer_tasks(sweep) if first_timed(engines, task, rows_of) is not None]


def all_peer_tasks(sweep: Sweep) -> list[Task]:
    """Each peer at each workload."""
    return _told_apart(
        Task(
            f"peers/{_of_plan(plan)}{peer}{_named(served)}#0", "peers", number,
            timeout=sweep.experiment.timeout, workload=place, peer=peer,
        )
        for number, plan in enumerate(sweep.plans)
        if plan.model is not None
        for place, served in enumerate(plan.workloads)
        for peer in plan.experiment.peers
    )  # fmt: skip


def later_replicates(tasks: Sequence[Task], replicates: int, rows_of: RowsOf) -> list[Task]:
    """What was timed in the first replicate, again in each of the others, one replicate after the other.

    Every second one goes the other way round: whatever drifts hurts all alike, and nobody always follows the same one.
    What has no speed (it failed, or is interpreted) would have none again.
    """
    again = []
    for task in tasks:
        rows = rows_of(task.key)
        if task.phase == "kernels":
            timed = {row.point for row in rows if row.stage == "kernels" and row.median_us is not None}
            again += [replace(task, points=tuple(p for p in task.points if p[0] in timed))] if timed else []
        elif _timed(rows):
            settings = next((row.peer_settings for row in rows if row.stage == "peers"), None)
            again.append(replace(task, peer_settings=settings))
    return [
        replace(task, key=replicate_key(task, number), replicate=number)
        for number in range(1, replicates)
        for task in (reversed(again) if number % 2 else again)
    ]


def replicate_key(task: Task, number: int) -> str:
    """The key of the task's replicate of that number."""
    return f"{task.key.rpartition('#')[0]}#{number}"


def step_tasks(engines: Sequence[Task], rows_of: RowsOf) -> list[Task]:
    """Of each arm and workload that was timed, once: recording takes time itself, so that it is no timed round."""
    return [_step_task(task) for task in engines if _timed(rows_of(task.key))]


def _step_task(engine: Task) -> Task:
    return replace(engine, key=f"step/{engine.key.removesuffix('#0').partition('/')[2]}", phase="step")


def quantization_tasks(sweep: Sweep) -> list[Task]:
    """Of each plan: the dense model, and each quantized one."""
    quantization = sweep.experiment.quantization
    if quantization is None:
        return []
    names = ["dense", *(one.label for one in list_quantized_models(quantization))]
    return _told_apart(
        Task(
            f"quantization/{_of_plan(plan)}{_slug(name)}", "quantization", number,
            timeout=sweep.experiment.timeout, checkpoint=index,
        )
        for number, plan in enumerate(sweep.plans)
        for index, name in enumerate(names)
    )  # fmt: skip


def expected_tasks(sweep: Sweep, points: Sequence[Mapping[str, Sequence[Point]]]) -> list[Task]:
    """Every task that there will be where all goes well and is timed."""
    checks = check_tasks(sweep, points)
    timed = [replace(t, key=f"kernels/{t.key.removeprefix('check/')}#0", phase="kernels") for t in checks if t.points]
    timed += [*engine_tasks(sweep), *all_peer_tasks(sweep)]
    replicates = range(sweep.experiment.replicates)
    each = [replace(task, key=replicate_key(task, number)) for number in replicates for task in timed]
    return [*checks, *each, *map(_step_task, engine_tasks(sweep)), *quantization_tasks(sweep)]


Verdicts = Mapping[tuple[int, str, str], tuple[Status, str]]
"""(plan, op, variant label) -> the first check that was wrong or failed, with the reason."""


def verdicts(checks: Sequence[Task], rows_of: RowsOf) -> Verdicts:
    """What the checks say against variants."""
    found: dict[tuple[int, str, str], tuple[Status, str]] = {}
    for task in checks:
        for row in rows_of(task.key):
            if row.status in ("wrong", "failed"):
                found.setdefault((task.plan, task.op, task.variant), (row.status, row.reason or ""))
    return found


def refusal(plan: Plan, task: Task, verdicts: Verdicts) -> tuple[Status, str] | None:
    """Why an engine's task is not begun: its arm is unsupported, or a kernel of it was wrong, and is not let loose on a
    real cache.
    """
    if task.arm in plan.unsupported:
        return "unsupported", plan.unsupported[task.arm]
    for op, pick in plan.running(plan.arms[task.arm]).items():
        if (task.plan, op, pick.label) in verdicts:
            status, reason = verdicts[task.plan, op, pick.label]
            return status, f"not run, its {op}.{pick.label} is {status}: {reason}"
    return None


def first_timed(engines: Sequence[Task], peer: Task, rows_of: RowsOf) -> Task | None:
    """The arm that a peer is compared with, in its first replicate."""
    place = (peer.plan, peer.workload)
    return next((t for t in engines if (t.plan, t.workload) == place and _timed(rows_of(t.key))), None)


def timed_row(rows: Sequence[Row]) -> Any:
    """The row of an arm or a peer that was timed, or None."""
    served = [row for row in rows if row.stage in ("engine", "peers")]
    return next((row for row in served if row.status == "ok" and row.tokens_per_s is not None), None)


def _timed(rows: Sequence[Row]) -> bool:
    return timed_row(rows) is not None


def _told_apart(tasks: Iterable[Task]) -> list[Task]:
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


def _of_plan(plan: Plan) -> str:
    """What tells a plan from the others of its sweep: "dtype=bfloat16/"."""
    return "".join(f"{name}={_slug(str(value))}/" for name, value in plan_settings(plan).items())


def _named(served: ServedWorkload) -> str:
    return f"/{_slug(served.title)}" if served.title else ""


def _slug(text: str) -> str:
    return text.replace(" ", "_")
