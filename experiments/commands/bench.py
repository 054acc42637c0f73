"""`tk bench`: variants and peers at realistic points, checked, then timed, beside each other."""

import json
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from experiments.commands.check import parse_axes
from experiments.commands.registry import matching, open_registry
from experiments.commands.requests import BenchRequest
from experiments.document import ExperimentError
from experiments.peers import slack_of, with_peers
from experiments.reporting.table_style import add_row, format_microseconds, new_table
from tkernels import ContractError
from tkernels.contract import Contract, Value
from tkernels.device import device_facts
from tkernels.measurement import INTERPRETED, Measurement, Method, benchmark_points, complete_axes, measure
from tkernels.timing import Cache, Launch
from tkernels.tuning import IN_WORDS
from tsched.torch_free import suggest_name


def run(request: BenchRequest) -> int:
    """Prints the figures; 1 where a variant was wrong or failed."""
    ops = with_peers(open_registry(request.variants_from))
    variants = matching(ops, request.op, request.variant)
    if request.axes and len({v.contract.name for v in variants}) != 1:
        raise ExperimentError(["--axes belong to one op: name it with --op"])
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    method = _method(request)
    work = [(variant, *point) for variant in variants for point in _points(variant.contract, request, device).items()]
    console = Console(stderr=True)
    columns = (TextColumn("bench"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    doing = TextColumn("{task.fields[doing]}", style="dim", markup=False)
    rows: list[Measurement] = []
    with Progress(*columns, doing, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(work), doing="")
        for variant, name, axes in work:
            progress.update(task, doing=f"{variant.contract.name}.{variant.name} {name}")
            rows.append(measure(variant, name, axes, device, method=method, slack=slack_of(variant)))
            progress.advance(task)
    if request.as_json:
        facts = device_facts(device)
        json.dump([{"device": facts.name, **row.as_dict()} for row in rows], sys.stdout, indent=1)
        print()
    else:
        _print(rows, device, method)
    return 1 if any(row.status in ("wrong", "failed", "void") for row in rows) else 0


def _method(request: BenchRequest) -> Method:
    launches: dict[str, Launch] = {"eager": "eager", "graph": "graph"}
    caches: dict[str, Cache] = {"cold": "cold", "warm": "warm"}
    for option, value, known in (("--launch", request.launch, launches), ("--l2", request.l2, caches)):
        if value not in known:
            raise ExperimentError([f"{option} {value}: there is {', '.join(known)}{suggest_name(value, known)}"])
    return Method(launches[request.launch], caches[request.l2], request.samples)


def _points(contract: Contract, request: BenchRequest, device: torch.device) -> dict[str, dict[str, Value]]:
    if request.axes is None:
        return benchmark_points(contract, device)
    held = parse_axes(contract, request.axes)
    # What is left open is a realistic point's, the first that fits: its dtypes and head sizes, not a test's.
    for base in contract.benchmarks.values():
        try:
            return {request.axes: complete_axes(contract, {**base, **held})}
        except ContractError:
            continue
    try:
        return {request.axes: complete_axes(contract, held)}
    except ContractError as error:
        raise ExperimentError([f"--axes: {error}"]) from None


def _print(rows: Sequence[Measurement], device: torch.device, method: Method) -> None:
    """One table per op: a row for each point, a column for each variant that has a figure."""
    console = Console()
    facts = device_facts(device)
    where = facts.name if device.type == "cuda" else "CPU"
    for op in dict.fromkeys(row.op for row in rows):
        mine = [row for row in rows if row.op == op]
        names = list(dict.fromkeys(row.variant for row in mine if row.timing is not None))
        table = new_table(f"{op} on {where}: median (IQR) us", ["point", "MB", *names], ["MB", *names])
        for point in dict.fromkeys(row.point for row in mine):
            here = {row.variant: row for row in mine if row.point == point}
            size = next((row.bytes_moved for row in here.values() if row.bytes_moved is not None), 0)
            cells = [_cell(here[name]) if name in here else "-" for name in names]
            add_row(table, point, f"{size / 1e6:.3g}", *cells)
        console.print(table)
    timer = next((row.timing.timer for row in rows if row.timing), None)
    if timer:
        console.print(Text(f"Timer: {timer}; {method.samples} samples of each. Percentages: of the roofline."))
    for reason, names in _without_figures(rows).items():
        console.print(Text(f"{', '.join(names)}: {reason}"))
    sources = {f"{r.op}.{r.variant}": IN_WORDS[r.config_source] for r in rows if r.timing and r.config_source}
    for words in sorted(set(sources.values())):
        console.print(Text(f"Configs ({words}): {', '.join(n for n, source in sources.items() if source == words)}"))
    for reason in dict.fromkeys(row.limit.reason for row in rows if row.limit and row.limit.reason):
        console.print(Text(f"No roofline: {reason}"))


def _cell(row: Measurement) -> str | Text:
    if row.timing is None:
        return "-"
    share = f" {row.limit.fraction:.0%}" if row.limit and row.limit.fraction is not None else ""
    return f"{format_microseconds(row.timing.median_us)} ({row.timing.iqr_us:.2g}){share}"


def _without_figures(rows: Sequence[Measurement]) -> dict[str, list[str]]:
    """Why some have no figure -> "op.variant" of those, with the point where only some points have none."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.timing is None:
            reason = "not measured: " + INTERPRETED if row.reason == INTERPRETED else f"{row.status}: {row.reason}"
            label = f"{row.op}.{row.variant}"
            everywhere = all(r.reason == row.reason for r in rows if (r.op, r.variant) == (row.op, row.variant))
            names = found.setdefault(reason, [])
            names += [name for name in [label if everywhere else f"{label} at {row.point}"] if name not in names]
    return found
