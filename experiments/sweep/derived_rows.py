"""The rows that no task wrote: of tasks that died or were not begun, and those that follow from others' rows."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from experiments.planning.plan import Sweep
from experiments.runs.folder import RunFolder
from experiments.runs.rows import COLUMNS, Row, Stage, Status
from experiments.runs.table import spread
from experiments.stages.context import task_fields
from experiments.stages.parity import Answer, compare_answers, read_answer
from experiments.stages.task import Task
from experiments.sweep.listing import first_timed, follow_key, replicate_key, timed_row
from experiments.sweep.tasks import Ended


def failed_rows(sweep: Sweep, run_id: str, ended: Ended) -> list[Row]:
    """Rows of status failed, with how the process ended and what it was at; rows that it had sent stand beside them.

    One, but of a process that had not begun: then one for each point, for at none it would have gone better.
    """
    task, plan = ended.task, sweep.plans[ended.task.plan]
    at = f" (at: {ended.doing})" if ended.doing else ""
    columns: dict[str, Any] = {"status": "failed", "reason": f"{ended.death or 'its process ended without a row'}{at}"}
    if task.phase not in ("check", "kernels"):
        return [Row(stage=task.phase, **task_fields(plan, task, run_id), **columns)]
    if task.phase == "check":
        columns |= {"seed": plan.experiment.seed, "replay": None}
    points: Sequence[tuple[Any, Any]] = ended.points_without_row or [(None, None)]  # it ended after its last point
    return [
        Row(stage=task.phase, **task_fields(plan, task, run_id, axes), point=point, axes=axes, **columns)
        for point, axes in (points[:1] if ended.doing else points)
    ]


def refused_rows(sweep: Sweep, folder: RunFolder, engines: Sequence[Task], checks: Sequence[Task]) -> Iterator[Row]:
    """Of the engines that are not begun: the arm is unsupported, or a kernel of it was wrong, and is not let loose on a
    real cache.
    """
    verdicts: dict[tuple[int, str, str], tuple[Status, str]] = {}
    for task in checks:
        for row in folder.of_task(task.key):
            if row.status in ("wrong", "failed"):
                reason = f"not run, its {task.op}.{task.variant} is {row.status}: {row.reason}"
                verdicts.setdefault((task.plan, task.op, task.variant), (row.status, reason))
    for task in engines:
        plan = sweep.plans[task.plan]
        calls = plan.running(plan.arms[task.arm]).items()
        found = [verdicts[key] for op, pick in calls if (key := (task.plan, op, pick.label)) in verdicts]
        if task.arm in plan.unsupported:
            found = [("unsupported", plan.unsupported[task.arm])]
        for status, reason in found[:1]:
            yield Row(stage="engine", **task_fields(plan, task, folder.run_id), status=status, reason=reason)


def parity_rows(sweep: Sweep, folder: RunFolder, engines: Sequence[Task]) -> Iterator[Row]:
    """Of each model and workload, every arm after the first that answered, beside it: of another dtype too."""
    firsts: dict[tuple[str | None, str, str], tuple[Row, Answer]] = {}
    for task in engines:
        row = folder.of_task(task.key)[0]
        if row.status != "ok":
            continue
        plan = sweep.plans[task.plan]
        served, answer = plan.workloads[task.workload], read_answer(folder.samples(task.key))
        place = (plan.arms[task.arm].model, served.name, repr(served.settings))
        if place in firsts:
            first, said = firsts[place]
            columns = compare_answers(said, answer)
            yield Row(stage="parity", **_fields(sweep, folder, "parity", task), first_arm=first.arm, **columns)
        else:
            firsts[place] = (row, answer)


def speedup_rows(sweep: Sweep, folder: RunFolder, engines: Sequence[Task], peers: Sequence[Task]) -> Iterator[Row]:
    """Of each peer that was timed, the first arm that was: its speed over the peer's, replicate by replicate."""
    for peer in peers:
        mine, theirs = first_timed(engines, peer, folder.of_task), timed_row(folder.of_task(peer.key))
        if mine is None or theirs is None:
            continue
        speedups = _paired_speedups(sweep, folder, mine, peer)
        answer, tokens = read_answer(folder.samples(mine.key)), folder.samples(peer.key)["tokens"]
        equal = sum(one is not None and one.tokens == its for one, its in zip(answer, tokens, strict=True))
        about = _fields(sweep, folder, "speedup", mine) | {"task": follow_key("speedup", peer), "peer": peer.peer}
        yield Row(
            stage="speedup",
            **about,
            status="ok",
            peer_settings=theirs.peer_settings,
            requests=len(answer),
            speedup=statistics.median(speedups),
            speedup_iqr=spread(speedups),
            speedups=speedups,
            speedup_of="median of replicates" if len(speedups) > 1 else "one replicate",
            tokens_equal=equal == len(answer),
            requests_equal=equal,
        )


def _paired_speedups(sweep: Sweep, folder: RunFolder, mine: Task, peer: Task) -> list[float]:
    """The arm's speed over the peer's in every replicate in which both were timed."""
    numbers = range(sweep.experiment.replicates)
    pairs = [[timed_row(folder.of_task(replicate_key(task, n))) for task in (mine, peer)] for n in numbers]
    return [ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs if ours and theirs]


def unrecorded_rows(sweep: Sweep, folder: RunFolder, engines: Sequence[Task]) -> Iterator[Row]:
    """Of arms that serve and were not timed, why their steps were not recorded either."""
    nothing: dict[str, Any] = dict.fromkeys(set(COLUMNS["step"]["ok"]) - {"workload"})
    for task in engines:
        row = folder.of_task(task.key)[0]
        if row.status == "ok" and row.tokens_per_s is None:
            about = {"range": "step", "category": "step", "clock": "host", "speed_reason": row.speed_reason}
            yield Row(stage="step", **_fields(sweep, folder, "step", task), status="ok", **nothing | about)


def _fields(sweep: Sweep, folder: RunFolder, stage: Stage, task: Task) -> dict[str, Any]:
    """What a row that follows from a task's says that it is of."""
    return task_fields(sweep.plans[task.plan], replace(task, key=follow_key(stage, task)), folder.run_id)
