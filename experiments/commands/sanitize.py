"""`tk check --sanitize`: variants under the sanitizers, and what each found."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, product
from typing import Any

from rich.console import Console
from rich.text import Text

from experiments.commands.choices import Subject, case_size
from experiments.commands.output import print_json, progress_bar
from experiments.commands.requests import CheckRequest
from experiments.document import ExperimentError
from experiments.reporting.table_style import make_table, status_text
from tkernels import UnknownNameError
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


def run(request: CheckRequest, subjects: Sequence[Subject], names: str) -> int:
    """Puts each variant under each sanitizer, prints the table, and returns 1 where there was a finding."""
    rows = _sanitize_all(request, subjects, _named_sanitizers(names))
    if request.as_json:
        print_json(rows)
    else:
        _print(Console(), rows)
    return 1 if any(row["findings"] for row in rows) or not any(row["cases"] for row in rows) else 0


def _named_sanitizers(text: str) -> list[Sanitizer]:
    """ "all", or names separated by commas; ExperimentError lists what there is."""
    try:
        return [SANITIZERS[name.strip()] for name in text.split(",")] if text != "all" else list(SANITIZERS.values())
    except UnknownNameError as error:
        raise ExperimentError([f"--sanitize: {error}"]) from None


def _sanitize_all(
    request: CheckRequest, subjects: Sequence[Subject], sanitizers: Sequence[Sanitizer]
) -> list[dict[str, Any]]:
    pairs = list(product(subjects, sanitizers))
    counts = [_count_cases(request, *pair) for pair in pairs]
    rows = []
    with progress_bar("sanitize", sum(counts)) as update:
        for (subject, sanitizer), count, done in zip(pairs, counts, accumulate(counts, initial=0), strict=False):
            update(completed=done, doing=f"{subject.title} {sanitizer.name}")
            found: list[Finding | None] = []
            for finding in _inspect_cases(request, subject, sanitizer) if count else ():
                found.append(finding)
                update(advance=1)
            rows.append(summarize(subject.variant, sanitizer, found))
    return rows


def _count_cases(request: CheckRequest, subject: Subject, sanitizer: Sanitizer) -> int:
    if unfit_reason(sanitizer, subject.variant):
        return 0
    return 1 if subject.is_one_case else planned_draws(sanitizer, subject.variant, request.examples, subject.config)


def _inspect_cases(request: CheckRequest, subject: Subject, sanitizer: Sanitizer) -> Iterator[Finding | None]:
    variant, config = subject.variant, subject.config
    if not subject.is_one_case:
        yield from sanitized(sanitizer, variant, request.examples, request.seed, subject.axes, config=config)
        return
    if config is None and variant.launch is not None:
        config = variant.default_config("interpreter")
    yield inspect_case(sanitizer, variant, variant.contract.case(subject.axes, request.seed), config)


def summarize(variant: Variant, sanitizer: Sanitizer, found: Sequence[Finding | None]) -> dict[str, Any]:
    """One entry of --json. verdict: ok, finding (the smallest case comes first), or not applicable with its reason."""
    findings = sorted((one for one in found if one is not None), key=lambda one: case_size(one.case.axes))
    reason = unfit_reason(sanitizer, variant) or (None if found else "no case that it supports was drawn")
    return {
        "op": variant.contract.name,
        "variant": variant.name,
        "sanitizer": sanitizer.name,
        "cases": len(found),
        "verdict": "finding" if findings else "not applicable" if reason else "ok",
        "reason": findings[0].message if findings else reason,
        "findings": [{"message": one.message, "replay": one.replay} for one in findings],
    }


_COLUMNS = ("op", "variant", "sanitizer", "cases", "verdict")


def _cells(row: Mapping[str, Any]) -> Sequence[str | Text]:
    verdict = status_text(row["verdict"])
    if row["verdict"] == "not applicable":
        verdict = Text.assemble(verdict, (f": {row['reason']}", "dim"))
    return row["op"], row["variant"], row["sanitizer"], str(row["cases"]), verdict


def _print(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    verdicts = Counter(row["verdict"] for row in rows)
    first = " (the first of each below)" if verdicts["finding"] else ""
    caption = (
        f"{verdicts['ok']} ok, {verdicts['finding'] or 'none'} with findings{first}, "
        f"{verdicts['not applicable']} not applicable."
    )
    console.print(make_table("Sanitizers", _COLUMNS, map(_cells, rows), right=["cases"], once=2, caption=caption))
    for row in rows:
        for finding in row["findings"][:1]:
            name = f"{row['op']}.{row['variant']}: {row['sanitizer']}"
            console.print(Text(f"\n{name}: {finding['message']}\n  replay: {finding['replay']}"), soft_wrap=True)
