"""`tk gpu-report`: everything that needs a GPU, within its minutes; run again, it goes on."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from experiments.commands.choices import cuda_device
from experiments.commands.requests import GpuReportRequest
from experiments.document import ExperimentError
from experiments.gpu_report import precompile
from experiments.gpu_report.journal import Fact, Journal, done_steps, facts, read_lines
from experiments.gpu_report.steps import DOES, Step, make_steps, pending, schedule
from experiments.gpu_report.supervisor import supervise, worker_runner
from experiments.gpu_report.table import report
from experiments.peers import with_peers
from experiments.reporting.table_style import add_row, new_table
from tkernels import OPS
from tkernels.device import TARGETS, device_facts

TABLE = "report.md"

# Without a GPU the plan is an H200's.
_DRY_RUN = TARGETS["sm_90"]


def run(request: GpuReportRequest) -> int:
    """0 where nothing is left to do, 1 where a step failed or time ran out, with the table so far in either case."""
    out, minutes = request.out, request.minutes
    if request.dry_run:
        print_plan(make_steps(with_peers(OPS), _DRY_RUN, precompile.MOST_PROCESSES), Journal(out), minutes)
        return 0
    deadline = time.time() + 60 * minutes
    where = cuda_device(request.device, "tk gpu-report")
    journal = open_journal(out, device_facts(where).name)
    steps = make_steps(with_peers(OPS), device_facts(where), precompile.processes())
    console = Console(stderr=True)
    todo = pending(steps, done_steps(journal.lines()))
    console.print(Text(f"{len(todo)} of {len(steps)} steps are left; {minutes:g} minutes for them"))
    with worker_runner(out, str(where), deadline) as run_worker:
        outcome = supervise(steps, journal, deadline, run_worker)
    (out / TABLE).write_text(report(journal.lines()), encoding="utf-8")
    console.print(Text(f"{len(steps) - len(outcome.left)} of {len(steps)} steps are done; {out / TABLE}"))
    for name in outcome.left[:10]:
        console.print(Text(f"  left: {name}"))
    return 1 if outcome.left else 0


def open_journal(out: Path, device: str) -> Journal:
    """The folder's journal; an ExperimentError where it is another device's."""
    out.mkdir(parents=True, exist_ok=True)
    journal = Journal(out)
    known = {str(fact["name"]) for fact in facts(journal.lines()) if fact.get("kind") == "device"}
    if known - {device}:
        raise ExperimentError([f"--out {out}: holds facts of {', '.join(sorted(known))}, and this is {device}"])
    return journal


def print_plan(steps: Sequence[Step], journal: Journal, minutes: float) -> None:
    """Every step with what it would do, its estimate, and whether it would be reached."""
    done = done_steps(read_lines(journal.path))
    console = Console()
    title = f"{len(steps)} steps; estimates, most valuable first"
    table = new_table(title, ["step", "s", "at s", "what it does"], ["s", "at s"])
    for step, ends, within in schedule(pending(steps, done), 60 * minutes):
        style = "" if within else "dim"
        does = DOES[step.kind] if step.seconds else "cannot run here: says so in the report"
        cells = [step.title, f"{step.seconds:.0f}", f"{ends:.0f}", does]
        add_row(table, *(Text(cell, style) for cell in cells))
    console.print(table)
    left = schedule(pending(steps, done), 60 * minutes)
    reached = sum(within for _, _, within in left)
    if done:
        console.print(Text(f"{len(steps) - len(left)} steps are done in {journal.folder} and would be skipped."))
    console.print(
        Text(f"{reached} of {len(left)} would end within {minutes:g} minutes; the same command goes on with the rest.")
    )


def recorded(folder: Path) -> list[Fact]:
    """The facts of a finished or unfinished report."""
    return list(read_lines(Journal(folder).path))
