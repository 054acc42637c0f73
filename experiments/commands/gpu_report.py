"""`tk gpu-report`: everything that needs a GPU, within its minutes; run again, it goes on."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from experiments.commands.choices import cuda_device
from experiments.commands.requests import GpuReportRequest
from experiments.gpu_report import precompile
from experiments.gpu_report.folder import ReportFolder, installed, open_report, read_report, read_unopened, why_refused
from experiments.gpu_report.forecast import Done, foretell
from experiments.gpu_report.home import FOLDER, TABLE
from experiments.gpu_report.journal import Journal
from experiments.gpu_report.processes import step_runner
from experiments.gpu_report.steps import DOES, Kind, Step
from experiments.gpu_report.supervisor import Machine, run_steps
from experiments.gpu_report.table import report
from experiments.gpu_report.weights import drawing
from experiments.gpu_report.worth import make_steps, models_to_draw
from experiments.peers import with_peers
from experiments.reporting.table_style import make_table
from tkernels import OPS
from tkernels.clocks import read_clocks
from tkernels.device import TARGETS, DeviceFacts, device_facts
from tkernels.files import write_text

# Without a GPU the plan is an H200's.
_DRY_RUN = TARGETS["sm_90"]

_SHOWN_LEFT = 10


def run(request: GpuReportRequest) -> int:
    """0 where nothing is left to do, 1 where a step failed or time ran out, with the table so far in either case."""
    out, lengths = request.out, request.lengths
    if request.dry_run:
        facts = device_facts(cuda_device(request.device, "tk gpu-report")) if torch.cuda.is_available() else _DRY_RUN
        print_plan(make_steps(with_peers(OPS), facts), out, lengths, facts)
        return 0
    deadline = time.time() + 60 * lengths[0]
    device = cuda_device(request.device, "tk gpu-report")
    steps = make_steps(with_peers(OPS), device_facts(device))
    console = Console(stderr=True)
    folder = open_report(out, device, steps)
    try:
        for repair in folder.repairs:
            console.print(Text(repair), soft_wrap=True)
        tried = folder.refuse(steps)
        console.print(Text(f"{len(folder.journal.left(steps))} of {len(steps)} steps are left"))
        models = models_to_draw(folder.journal.left(tried))
        with drawing(models), step_runner(out, folder.folder.run_id, str(device)) as run_step:
            run_steps(tried, folder, deadline, run_step, Machine(precompile.processes(), precompile.made()))
        left = folder.journal.left(steps)
        if not left:
            folder.finish(asdict(read_clocks(device)))
        _write_table(folder)
    finally:
        folder.close()
    done = f"{len(steps) - len(left)} of {len(steps)} steps are done"
    console.print(Text(f"{done}; {out / TABLE}; to bring home: {out / FOLDER}"), soft_wrap=True)
    for step in left[:_SHOWN_LEFT]:
        console.print(Text(f"  left: {step.key}"))
    return 1 if left else 0


def _write_table(folder: ReportFolder) -> None:
    recorded = read_report(folder.path)
    assert recorded is not None
    write_text(folder.path / TABLE, report(recorded.rows, recorded.environment))
    folder.pack()


def print_plan(steps: Sequence[Step], out: Path, lengths: Sequence[float], facts: DeviceFacts) -> None:
    """What commands of so many minutes would do, each on a machine that has nothing yet, and what would be left. It
    writes nothing.
    """
    begun = read_unopened(out)
    journal = Journal.of(begun.meta, begun.rows) if begun is not None else Journal()
    before = len([step for step in steps if step.key in journal.done])
    journal.done |= {step.key for step in steps if step.refusal is not None}
    found, after = foretell(steps, lengths, precompile.MOST_PROCESSES - 1, journal)
    console = Console()
    title = f"{len(steps)} steps; estimates, most valuable first"
    rows = [_plan_row(one) for one in found]
    console.print(
        make_table(title, ["step", "command", "s", "at s", "what it does"], rows, right=["command", "s", "at s"])
    )
    _say_rest(console, steps, found, after)
    if before:
        console.print(Text(f"{before} steps are done in {out} and would be skipped."))
    for number, length in enumerate(lengths, 1):
        ended = [one for one in found if one.command == number and not one.cut and one.step.kind != "precompile"]
        console.print(Text(f"{len(ended)} would end within {length:g} minutes of command {number}."))
    _say_marks(console, steps, found, after)
    if begun is not None and (reason := why_refused(begun.environment, facts.name, installed())) is not None:
        console.print(
            Text(f"With {facts.name} and what is installed here, the command would refuse {out}: it {reason}.")
        )


def _plan_row(one: Done) -> list[Text]:
    does = DOES[one.step.kind] + "; cut off here, it goes on" * one.cut
    numbers = (str(one.command), f"{one.step.seconds:.0f}", f"{one.ends_s:.0f}")
    return [Text(cell) for cell in (one.step.title, *numbers, does)]


def _say_rest(console: Console, steps: Sequence[Step], found: Sequence[Done], after: Journal) -> None:
    """Counts the steps without a row, by their kinds: those that would not begin, and those that cannot run here."""
    shown = {one.step.key for one in found}
    refused = Counter(step.kind for step in steps if step.refusal is not None)
    rest = Counter(step.kind for step in steps if step.key not in shown and step.key not in after.done)
    said = [f"{what}: {_counted(kinds)}" for what, kinds in (("not begun", rest), (_REFUSED, refused)) if kinds]
    if said:
        console.print(Text(f"{'; '.join(said)}."))


_REFUSED = "cannot run here, and the report says so"


def _counted(kinds: Counter[Kind]) -> str:
    return f"{kinds.total()} ({', '.join(f'{count} {kind}' for kind, count in kinds.items())})"


def _say_marks(console: Console, steps: Sequence[Step], found: Sequence[Done], after: Journal) -> None:
    """Says when everything is there that the kernels' marks and the first of the engine's need."""
    first = [step for step in steps if step.worth == 0]
    left = [step for step in first if step.key not in after.done]
    keys = {step.key for step in first}
    last = max((one.command for one in found if one.step.key in keys and not one.cut), default=0)
    what = "the kernels' marks and the first of the engine's"
    said = f"{len(left)} of their {len(first)} steps are left" if left else f"all is there after command {last}"
    console.print(Text(f"{what}: {said}; the same command goes on with the rest."))
