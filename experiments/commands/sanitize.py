"""`tk check --sanitize`: variants under the sanitizers, and what each found."""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from experiments.document import ExperimentError
from experiments.reporting.table_style import add_row, new_table, status_text
from tkernels import Config, UnknownNameError
from tkernels.contract import Value
from tkernels.variant import Variant
from tkernels.verification.sanitizers.base import (
    Finding,
    Sanitizer,
    inspect_case,
    planned_draws,
    sanitized,
    unfit_reason,
)
from tkernels.verification.sanitizers.suite import SANITIZERS


@dataclass(frozen=True)
class Draws:
    """What is drawn for each variant and sanitizer: how many cases (None: each sanitizer's own number), held axes.

    With every axis held, one case is replayed. configs: by variant's name, the one that replaces the drawn ones.
    """

    examples: int | None
    seed: int
    axes: Mapping[str, Value]
    configs: Mapping[str, Config]


@dataclass(frozen=True)
class Row:
    """One variant under one sanitizer. verdict: ok, finding, or not applicable with its reason."""

    op: str
    variant: str
    sanitizer: str
    cases: int
    verdict: str
    reason: str | None
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name != "findings"}
        return {**values, "findings": [{"message": f.message, "replay": f.replay} for f in self.findings]}


def named(text: str) -> list[Sanitizer]:
    """ "all", or names separated by commas; ExperimentError lists what there is."""
    try:
        return [SANITIZERS[name.strip()] for name in text.split(",")] if text != "all" else list(SANITIZERS.values())
    except UnknownNameError as error:
        raise ExperimentError([f"--sanitize: {error}"]) from None


def run(variants: Sequence[Variant], sanitizers: Sequence[Sanitizer], draws: Draws, as_json: bool) -> int:
    """Puts each variant under each sanitizer, prints the table, and returns 1 where there was a finding."""
    columns = (
        TextColumn("sanitize"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[doing]}", style="dim", markup=False),
    )
    rows = []
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        pairs = [(variant, sanitizer) for variant in variants for sanitizer in sanitizers]
        counts = [_planned(sanitizer, variant, draws) for variant, sanitizer in pairs]
        task = progress.add_task("", total=sum(counts), doing="")
        done = 0
        for (variant, sanitizer), count in zip(pairs, counts, strict=True):
            doing = f"{variant.contract.name}.{variant.name} {sanitizer.name}"
            progress.update(task, completed=done, doing=doing)
            found: list[Finding | None] = []
            for finding in _found(sanitizer, variant, draws):
                found.append(finding)
                progress.advance(task)
            rows.append(_row(variant, sanitizer, found))
            done += count
    if as_json:
        json.dump([row.as_json() for row in rows], sys.stdout, indent=1)
        print()
    else:
        _print(rows)
    return 1 if any(row.findings for row in rows) or not any(row.cases for row in rows) else 0


def _replayed(variant: Variant, draws: Draws) -> bool:
    return set(draws.axes) == set(variant.contract.axis_by_name)


def _planned(sanitizer: Sanitizer, variant: Variant, draws: Draws) -> int:
    if unfit_reason(sanitizer, variant):
        return 0
    return (
        1
        if _replayed(variant, draws)
        else planned_draws(sanitizer, variant, draws.examples, draws.configs.get(variant.name))
    )


def _found(sanitizer: Sanitizer, variant: Variant, draws: Draws) -> Iterator[Finding | None]:
    if unfit_reason(sanitizer, variant):
        return
    config = draws.configs.get(variant.name)
    if _replayed(variant, draws):
        case = variant.contract.case(draws.axes, draws.seed)
        if config is None and variant.launch is not None:
            config = variant.default_config("interpreter")
        yield inspect_case(sanitizer, variant, case, config)
    else:
        yield from sanitized(sanitizer, variant, draws.examples, draws.seed, draws.axes, config=config)


def _row(variant: Variant, sanitizer: Sanitizer, found: Sequence[Finding | None]) -> Row:
    findings = tuple(sorted((finding for finding in found if finding is not None), key=_size))
    reason = unfit_reason(sanitizer, variant)
    if reason is None and not found:
        reason = "no case that it supports was drawn"
    verdict = "finding" if findings else "not applicable" if reason else "ok"
    reason = findings[0].message if findings else reason
    return Row(variant.contract.name, variant.name, sanitizer.name, len(found), verdict, reason, findings)


def _size(finding: Finding) -> int:
    """Of the case: the smallest comes first."""
    sizes = [value for value in finding.case.axes.values() if isinstance(value, int) and not isinstance(value, bool)]
    return math.prod(max(1, size) for size in sizes)


def _print(rows: Sequence[Row]) -> None:
    console = Console()
    table = new_table("Sanitizers", ["op", "variant", "sanitizer", "cases", "verdict"], ("cases",))
    before: Row | None = None
    for row in rows:
        op = "" if before is not None and row.op == before.op else row.op
        variant = "" if before is not None and (row.op, row.variant) == (before.op, before.variant) else row.variant
        verdict = status_text(row.verdict)
        if row.verdict == "not applicable":
            verdict = Text.assemble(verdict, (f": {row.reason}", "dim"))
        add_row(table, op, variant, row.sanitizer, str(row.cases), verdict)
        before = row
    findings = [finding for row in rows for finding in row.findings[:1]]
    ok, not_applicable = (sum(row.verdict == verdict for row in rows) for verdict in ("ok", "not applicable"))
    count = f"{len(findings)} with findings (the first of each below)" if findings else "none with findings"
    table.caption = f"{ok} ok, {count}, {not_applicable} not applicable."
    table.caption_justify = "left"
    console.print(table)
    for finding in findings:
        console.print(Text(f"\n{finding}"), soft_wrap=True)
