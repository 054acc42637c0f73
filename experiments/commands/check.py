"""`tk check`: variants against the float64 oracle on drawn cases, or one case or captured call replayed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from experiments.commands import mutate, sanitize
from experiments.commands.choices import Subject, case_size, choose_subjects, choose_variants, open_registry
from experiments.commands.output import print_json, progress_bar
from experiments.commands.requests import CheckRequest
from experiments.divergence.captured_call import check_captured, load_call
from experiments.document import ExperimentError
from experiments.reporting.table_style import make_table, status_text
from experiments.runs.checked import record_checked
from tkernels import ContractError
from tkernels.device import first_device
from tkernels.variant import Variant
from tkernels.verification.check import (
    CheckResult,
    check_case,
    count_wide_cases,
    drawn_results,
    outside_folder,
    wide_results,
)

_EXAMPLES = 20


def run(request: CheckRequest) -> int:
    """Checks, prints, and returns 1 where anything was wrong or failed, or nothing was checked."""
    if request.mutate:
        return mutate.verify(request) if request.verify_equivalent else mutate.run(request)
    if request.call is not None:
        return _show(request, _check_call(request, request.call))
    variants = choose_variants(open_registry(request.variants_from), request.chosen_op, request.variant)
    subjects = choose_subjects(variants, request.axes, request.config)
    if request.sanitize is not None:
        return sanitize.run(request, subjects, request.sanitize)
    return _show(request, _check_all(request, subjects))


def _show(request: CheckRequest, summaries: Sequence[Mapping[str, Any]]) -> int:
    """Prints, and returns the command's status."""
    if request.as_json:
        print_json(summaries)
    else:
        _print(Console(), summaries)
    statuses = {summary["status"] for summary in summaries}
    return 0 if "ok" in statuses and not statuses & {"wrong", "failed"} else 1


def _check_call(request: CheckRequest, file: Path) -> list[dict[str, Any]]:
    """A summary of each variant of a captured call's op, or of the one that is named, on that call."""
    others = {
        "--op": request.chosen_op,
        "--examples": request.examples,
        "--axes": request.axes,
        "--config": request.config,
        "--sanitize": request.sanitize,
    }
    if given := [option for option, value in others.items() if value is not None]:
        raise ExperimentError([f"--call {file}: it is one call as it was; it does not go with {', '.join(given)}"])
    call = load_call(file, first_device())
    variants = choose_variants(open_registry(request.variants_from), call.op, request.variant)
    return [summarize(variant, [check_captured(variant, call, file)], [], None) for variant in variants]


def _check_all(request: CheckRequest, subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """A summary of each variant. That an outside one is right on all draws is noted beside its file."""
    counts = [_count_cases(request, subject) for subject in subjects]
    summaries = []
    with progress_bar("check", sum(counts)) as update:
        for subject, done in zip(subjects, accumulate(counts, initial=0), strict=False):
            update(completed=done, doing=subject.title)
            drawn: list[CheckResult] = []
            wide: list[CheckResult] = []
            problem = None
            try:
                for is_wide, result in _check_cases(request, subject):
                    (wide if is_wide else drawn).append(result)
                    update(advance=1)
            except ContractError as error:  # no case of this variant can be drawn here
                problem = str(error)
            summaries.append(summarize(subject.variant, drawn, wide, problem))
            is_whole = not subject.axes and subject.config is None
            if summaries[-1]["status"] == "ok" and is_whole and outside_folder(subject.variant) is not None:
                record_checked(subject.variant)
    return summaries


def _count_cases(request: CheckRequest, subject: Subject) -> int:
    if subject.is_one_case:
        return 1
    return (request.examples or _EXAMPLES) + count_wide_cases(
        subject.variant, subject.axes, subject.config, first_device()
    )


def _check_cases(request: CheckRequest, subject: Subject) -> Iterator[tuple[bool, CheckResult]]:
    """(whether its sizes are a model's, the result) of each case; of one alone where every axis is held."""
    variant, axes, config, device = subject.variant, subject.axes, subject.config, first_device()
    if subject.is_one_case:
        yield False, check_case(variant, variant.contract.case(axes, request.seed, device), config)
        return
    for result in drawn_results(variant, request.examples or _EXAMPLES, request.seed, axes, config, device):
        yield False, result
    for result in wide_results(variant, request.seed, axes, config, device):
        yield True, result


def summarize(
    variant: Variant, drawn: Sequence[CheckResult], wide: Sequence[CheckResult], problem: str | None
) -> dict[str, Any]:
    """One entry of `tk check --json`; the smallest case that is not ok comes first in its failures.

    `examples` and `ok` count the drawn cases, `wide` and `wide_ok` those that are as large as a model's.
    """
    results = [*drawn, *wide]
    statuses = {result.status for result in results}
    status = next(filter(statuses.__contains__, ("wrong", "failed", "ok")), "unsupported")
    bad = sorted((r for r in results if r.status in ("wrong", "failed")), key=lambda r: case_size(r.axes))
    reasons = (problem, *(result.reason for result in (*bad, *results)))
    return {
        "op": variant.contract.name,
        "variant": variant.name,
        "status": status,
        "reason": next(filter(None, reasons), None),
        "examples": len(drawn),
        "ok": len(_right(drawn)),
        "wide": len(wide),
        "wide_ok": len(_right(wide)),
        "max_error_ratio": _largest(one.max_ratio for one in _right(results)),
        "rms_error_ratio": _largest(one.rms_ratio for one in _right(results)),
        "failures": [{"status": r.status, "message": str(r), "replay": r.replay} for r in bad],
    }


def _right(results: Iterable[CheckResult]) -> list[CheckResult]:
    return [result for result in results if result.status == "ok"]


def _largest(ratios: Iterable[float | None]) -> float | None:
    return max((ratio for ratio in ratios if ratio is not None), default=None)


_COLUMNS = ("op", "variant", "status", "ok", "wide", "max", "rms")
_CAPTION = (
    "ok: drawn cases; wide: sizes as large as a model's, with every architecture's default config, and corners that no "
    "draw reaches. max, rms: the largest error of what is ok, over what the error rule allows: 1.00 at most."
)


def _cells(one: Mapping[str, Any]) -> Sequence[str | Text]:
    counts = (f"{one['ok']}/{one['examples']}", f"{one['wide_ok']}/{one['wide']}")
    ratios = ("-" if one[key] is None else f"{one[key]:.2f}" for key in ("max_error_ratio", "rms_error_ratio"))
    return one["op"], one["variant"], status_text(one["status"]), *counts, *ratios


def _print(console: Console, summaries: Sequence[Mapping[str, Any]]) -> None:
    title, rows = "Checks against the float64 oracle", map(_cells, summaries)
    console.print(make_table(title, _COLUMNS, rows, right=_COLUMNS[3:], once=1, caption=_CAPTION))
    for summary in summaries:
        if summary["failures"]:
            console.print(Text(f"\n{summary['failures'][0]['message']}"), soft_wrap=True)
        elif summary["status"] != "ok":
            console.print(Text(f"\n{summary['op']}.{summary['variant']}: {summary['reason']}"))
