"""`tk gpu-report`: everything that needs a GPU, within its minutes; run again, it goes on."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from experiments.commands.choices import cuda_device
from experiments.commands.requests import GpuReportRequest
from experiments.gpu_report import precompile
from experiments.gpu_report.folder import open_report, read_report
from experiments.gpu_report.steps import DOES, Step, make_steps, schedule, steps_left
from experiments.gpu_report.supervisor import run_steps, step_runner
from experiments.gpu_report.table import report
from experiments.peers import with_peers
from experiments.reporting.table_style import make_table
from tkernels import OPS
from tkernels.clocks import read_clocks
from tkernels.device import TARGETS, device_facts
from tkernels.files import write_text

TABLE = "report.md"

# Without a GPU the plan is an H200's.
_DRY_RUN = TARGETS["sm_90"]


def run(request: GpuReportRequest) -> int:
    """0 where nothing is left to do, 1 where a step failed or time ran out, with the table so far in either case."""
    out, minutes = request.out, request.minutes
    if request.dry_run:
        print_plan(make_steps(with_peers(OPS), _DRY_RUN, precompile.MOST_PROCESSES), out, minutes)
        return 0
    deadline = time.time() + 60 * minutes
    device = cuda_device(request.device, "tk gpu-report")
    steps = make_steps(with_peers(OPS), device_facts(device), precompile.processes())
    console = Console(stderr=True)
    folder = open_report(out, device, steps)
    try:
        todo = steps_left(steps, folder.rows)
        console.print(Text(f"{len(todo)} of {len(steps)} steps are left; {minutes:g} minutes for them"))
        with step_runner(folder, str(device)) as run_step:
            run_steps(todo, folder, deadline, run_step)
        left = steps_left(steps, folder.rows)
        if not left:
            # No lockfiles' entries: this report's own lockfile lies beside its rows.
            folder.finish("nearest", {}, asdict(read_clocks(device)))
    finally:
        folder.close()
    recorded = read_report(out)
    assert recorded is not None
    write_text(out / TABLE, report(recorded.rows, recorded.environment))
    console.print(Text(f"{len(steps) - len(left)} of {len(steps)} steps are done; {out / TABLE}"))
    for step in left[:10]:
        console.print(Text(f"  left: {step.key}"))
    return 1 if left else 0


def print_plan(steps: Sequence[Step], out: Path, minutes: float) -> None:
    """Every step with what it would do, its estimate, and whether it would be reached."""
    begun = read_report(out)
    left = schedule(steps_left(steps, begun.rows if begun is not None else ()), 60 * minutes)
    console = Console()
    title = f"{len(steps)} steps; estimates, most valuable first"
    rows = []
    for step, ends, within in left:
        does = DOES[step.kind] if step.seconds else "cannot run here: says so in the report"
        cells = [step.title, f"{step.seconds:.0f}", f"{ends:.0f}", does]
        rows.append([Text(cell, "" if within else "dim") for cell in cells])
    console.print(make_table(title, ["step", "s", "at s", "what it does"], rows, right=["s", "at s"]))
    if len(left) < len(steps):
        console.print(Text(f"{len(steps) - len(left)} steps are done in {out} and would be skipped."))
    reached = sum(within for _, _, within in left)
    console.print(
        Text(f"{reached} of {len(left)} would end within {minutes:g} minutes; the same command goes on with the rest.")
    )
