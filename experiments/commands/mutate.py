"""`tk check --mutate`: faults planted in the kernels, and what notices them."""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from experiments.commands.registry import matching, open_registry
from experiments.document import ExperimentError
from experiments.reporting.table_style import add_row, new_table
from tkernels import Registry
from tkernels.verification.mutation.campaign import (
    VERIFIED_CASES,
    Comparison,
    Outcome,
    Score,
    Trial,
    compared,
    joined,
    outcomes,
    pieces,
    sampled,
    score,
    trials,
)
from tkernels.verification.mutation.faults import KINDS
from tkernels.verification.mutation.pool import MutationError, Pool

LEAST_SHARE = 0.95
LEAST_MUTANTS = 100
MOST_EQUIVALENT = 0.05
_COLUMNS = ("value", "crash", "equivalent", "survived")


@dataclass(frozen=True)
class Request:
    """What `tk check --mutate` was asked. quota: mutants of each op and kind of fault, at most."""

    op: str | None
    variant: str | None
    quota: int
    seed: int
    variants_from: Sequence[Path]


def run(request: Request, as_json: bool) -> int:
    """Tries the sampled mutants; 1 where too few were killed or tried, or a declared equivalent was killed."""
    everything, ops = _trials(request)
    chosen = sampled(everything, request.quota, request.seed)
    ended: list[Outcome] = []
    try:
        with _pool(ops) as pool, _progress() as progress:
            bar = progress.add_task("", total=len(chosen), doing="")
            for outcome in outcomes(pool, chosen, request.seed):
                ended.append(outcome)
                progress.update(bar, advance=1, doing=outcome.trial.mutant.name)
    except MutationError as error:
        raise ExperimentError([f"--mutate: {error}"]) from None
    total = score(ended)
    complaints = problems(ended, total, whole=request.op is None and request.variant is None)
    if as_json:
        json.dump(_document(request, ended, total, complaints), sys.stdout, indent=1)
        print()
    else:
        _print(ended, total, complaints)
    return 1 if complaints else 0


def verify(request: Request, as_json: bool) -> int:
    """Compares the bits of every declared equivalent with its original's; 1 where any differ."""
    everything, ops = _trials(request)
    declared = [trial for trial in everything if trial.equivalent is not None]
    parts: list[Comparison] = []
    try:
        with _pool(ops) as pool, _progress() as progress:
            bar = progress.add_task("", total=pieces(declared, VERIFIED_CASES), doing=f"{VERIFIED_CASES} cases each")
            for part in compared(pool, declared, VERIFIED_CASES, request.seed):
                parts.append(part)
                progress.update(bar, advance=1, doing=part.trial.mutant.name)
    except MutationError as error:
        raise ExperimentError([f"--verify-equivalent: {error}"]) from None
    whole = joined(declared, parts)
    if as_json:
        json.dump([_comparison_row(comparison) for comparison in whole], sys.stdout, indent=1)
        print()
    else:
        table = new_table("Declared equivalents", ["op", "fault", "cases", "bits"], ["cases"])
        for one in whole:
            bits = Text("different", "bold red") if one.reason else Text("the same", "green")
            add_row(table, one.trial.op, one.trial.mutant.name, str(one.cases), bits)
        Console().print(table)
        for one in whole:
            if one.reason:
                Console().print(Text(f"\n{one.trial.op}: {one.trial.mutant.name}\n  {one.reason}"))
    return 1 if any(comparison.reason for comparison in whole) else 0


def _trials(request: Request) -> tuple[list[Trial], Registry]:
    """What there is to try, and the registry that it is of."""
    ops = open_registry(request.variants_from)
    found = list(trials(matching(ops, request.op, request.variant)))
    if not found:
        raise ExperimentError(["--mutate: none of these variants has a kernel"])
    return found, ops


def _pool(ops: Registry) -> Pool:
    return Pool(max(1, min(8, os.cpu_count() or 1)), ops)


def _progress() -> Progress:
    columns = (
        TextColumn("mutate"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[doing]}", style="dim", markup=False),
    )
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def problems(ended: Iterable[Outcome], total: Score, whole: bool) -> list[str]:
    """Why a campaign fails, of the whole registry or of a part; nothing where it does not."""
    found = [f"declared equivalent, but killed: {o.trial.mutant.name} ({o.fate.reason})" for o in ended if o.wrong]
    if total.share < LEAST_SHARE:
        found.append(f"{total.share:.1%} killed, {LEAST_SHARE:.0%} wanted")
    if whole and total.counted < LEAST_MUTANTS:
        found.append(f"{total.counted} mutants, at least {LEAST_MUTANTS} wanted")
    if total.equivalent_share > MOST_EQUIVALENT:
        found.append(f"{total.equivalent_share:.1%} declared equivalent, {MOST_EQUIVALENT:.0%} allowed")
    return found


def _comparison_row(comparison: Comparison) -> dict[str, Any]:
    known = comparison.trial.equivalent
    assert known is not None
    same = not comparison.reason
    row = {"op": known.op, "function": known.function, "kind": known.kind, "before": known.before}
    return row | {"after": known.after, "cases": comparison.cases, "same": same, "why": known.reason}


def _row(outcome: Outcome) -> dict[str, Any]:
    trial, fate = outcome.trial, outcome.fate
    mutant = trial.mutant
    row = {"op": trial.op, "variant": fate.variant.name, "function": mutant.function, "kind": mutant.kind}
    row |= {"file": mutant.file.name, "line": str(mutant.line), "before": mutant.before, "after": mutant.after}
    row |= {"verdict": outcome.column, "reason": fate.reason}
    if trial.equivalent is not None:
        row["why_equivalent"] = trial.equivalent.reason
    return row if outcome.column != "survived" else {**row, "diff": mutant.diff}


def _document(request: Request, ended: Sequence[Outcome], total: Score, complaints: Sequence[str]) -> dict[str, Any]:
    return {
        "seed": request.seed,
        "quota": request.quota,
        "mutants": total.counted,
        "killed": total.killed,
        "equivalent": total.equivalent,
        "score": total.share,
        "problems": list(complaints),
        "rows": [_row(outcome) for outcome in ended],
    }


def _print(ended: Sequence[Outcome], total: Score, complaints: Sequence[str]) -> None:
    console = Console()
    right = ("mutants", *_COLUMNS)
    table = new_table("Mutants", ["op", "fault", *right], right)
    counts = Counter((outcome.trial.op, outcome.trial.mutant.kind, outcome.column) for outcome in ended)
    ops = list(dict.fromkeys(outcome.trial.op for outcome in ended))
    for op in ops:
        label = op
        for kind in KINDS:
            found = [counts[op, kind, column] for column in _COLUMNS]
            if not sum(found):
                continue
            cells = [
                Text(str(n), "bold red" if n and c == "survived" else "") for n, c in zip(found, _COLUMNS, strict=True)
            ]
            add_row(table, label, kind.replace("_", " "), str(sum(found)), *cells)
            label = ""
    columns = Counter(outcome.column for outcome in ended)
    table.caption = (
        "value, crash: killed by a wrong result; by an exception, a signal or a time-out. Not counted: "
        f"{columns['does_not_compile']} that do not compile, {columns['same_code']} that compile to the same code."
    )
    table.caption_justify = "left"
    console.print(table)
    style = "bold red" if complaints else "bold green"
    left = f"{total.counted} mutants, {total.equivalent} of them equivalent"
    console.print(Text(f"{left}: {total.killed} killed, {total.share:.1%}", style))
    for complaint in complaints:
        console.print(Text(complaint, "red"))
    for outcome in ended:
        if outcome.column == "survived":
            mutant = outcome.trial.mutant
            console.print(Text(f"\nsurvived: {outcome.trial.op}: {mutant.name}", "bold"), soft_wrap=True)
            console.print(Text(mutant.diff), soft_wrap=True)
