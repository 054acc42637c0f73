"""`tk check`: variants against the float64 oracle on drawn cases, or one case or captured call replayed."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from experiments.commands import mutate, sanitize
from experiments.commands.choices import Subject, choose_subjects, choose_variants, open_registry
from experiments.commands.output import end_with, name_some, print_json
from experiments.commands.requests import CheckRequest
from experiments.commands.trials import (
    BAD,
    BEGUN,
    INTERRUPTION,
    LEFT_OUT,
    MOST_FAILURES,
    NOT_RUN,
    Drawn,
    Record,
    Result,
    Trial,
    carry_out,
    count_apart,
    smallest_first,
    words_of_interruption,
)
from experiments.divergence.captured_call import CapturedCall, check_captured, load_call
from experiments.document import ExperimentError
from experiments.reporting.table_style import make_table, status_text
from experiments.runs.checked import record_checked
from experiments.signals import INTERRUPTED, Signals
from tkernels.device import first_device
from tkernels.variant import Variant
from tkernels.verification.check import CheckResult, check_case, outside_folder, replay_captured, replay_command
from tkernels.verification.draws import EXAMPLES, count_wide_cases, drawn_cases, wide_cases

_SECONDS, _WIDE_SECONDS = 60.0, 300.0
"""That an outside variant may take for a drawn case, which takes two at most, and for one as wide as a model's."""


def run(request: CheckRequest) -> int:
    """Checks, prints, and returns 1 where anything was wrong or failed, or nothing was checked."""
    if request.mutate:
        return mutate.verify(request) if request.verify_equivalent else mutate.run(request)
    if request.sanitize is not None and request.call is None:
        return sanitize.run(request, partial(_choose, request), request.sanitize)
    return _run(request, partial(_gather, request))


def _choose(request: CheckRequest) -> list[Subject]:
    """What the request asks for, by name."""
    variants = choose_variants(open_registry(request.variants_from), request.chosen_op, request.variant)
    return choose_subjects(variants, request.axes, request.config)


def _gather(request: CheckRequest) -> list[Trial]:
    if request.call is not None:
        return _replay_trials(request, request.call)
    return [make_trial(request, subject) for subject in _choose(request)]


def _run(request: CheckRequest, gather: Callable[[], Sequence[Trial]]) -> int:
    """Checks, prints, and returns the command's status."""
    with Signals() as signals:
        records = carry_out("check", gather, _SECONDS, signals)
        for record in records:
            _note_right(request, record)
        summaries = [summarize(record) for record in records]
        if request.as_json:
            print_json(summaries)
        elif summaries:
            _print(Console(), summaries)
        status = 0 if signals.came else _conclude(summaries)
        return end_with(INTERRUPTED, words_of_interruption(records)) if signals.came else status


def _conclude(summaries: Sequence[Mapping[str, Any]]) -> int:
    """The command's status, with its reason where it is 1."""
    if failed := [f"{_title(one)} ({one['status']})" for one in summaries if one["status"] in BAD]:
        return end_with(1, f"{len(failed)} of {len(summaries)} variants failed: {name_some(failed, 40)}")
    if not any(one["status"] == "ok" for one in summaries):
        reasons = [f"{_title(one)} is {one['status']}: {one['reason']}" for one in summaries]
        return end_with(1, f"nothing was checked: {name_some(reasons)}")
    return 0


def _title(summary: Mapping[str, Any]) -> str:
    return f"{summary['op']}.{summary['variant']}"


def _replay_trials(request: CheckRequest, file: Path) -> list[Trial]:
    """Each variant of a captured call's op, or the one that is named, on that call."""
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
    return [Trial(Subject(one, {}, None), "drawn", 1, partial(_replay_call, one, call, file)) for one in variants]


def _replay_call(variant: Variant, call: CapturedCall, file: Path) -> Iterator[Result]:
    replay = replay_captured(file, variant.name, outside_folder(variant))
    yield Result("drawn", BEGUN, message=_name(variant), replay=replay, seconds=_WIDE_SECONDS)
    yield _result("drawn", check_captured(variant, call, file))


def _note_right(request: CheckRequest, record: Record) -> None:
    """Notes beside an outside variant's file that it is right on all draws: on no fewer than usual, none left out."""
    subject = record.trial.subject
    is_any_draw = request.call is None and not subject.axes and subject.config is None and not record.left_out
    is_enough = request.examples is None or request.examples >= EXAMPLES
    if is_any_draw and is_enough and _status(record) == "ok" and outside_folder(subject.variant) is not None:
        record_checked(subject.variant)


def make_trial(request: CheckRequest, subject: Subject) -> Trial:
    planned = 1
    if not subject.is_one_case:
        count = partial(count_wide_cases, subject.variant, subject.axes, subject.config, first_device())
        planned = (request.examples or EXAMPLES) + count_apart(subject.variant, count, _SECONDS)
    return Trial(subject, "drawn", planned, partial(_check_cases, request, subject))


def _check_cases(request: CheckRequest, subject: Subject) -> Iterator[Result]:
    """Drawn cases, the smallest first, then those as large as a model's; one alone where every axis is held."""
    variant, axes, config, device = subject.variant, subject.axes, subject.config, first_device()
    if subject.is_one_case:
        drawn, problem = [(variant.contract.case(axes, request.seed, device), config)], ""
    else:
        examples = request.examples or EXAMPLES
        drawn, problem = smallest_first(drawn_cases(variant, examples, request.seed, axes, device))
    failures = 0
    for result in _check_each(request, subject, "drawn", drawn):
        yield result
        failures += result.is_bad
    if problem:
        yield Result("drawn", LEFT_OUT, problem)
    if not subject.is_one_case and failures and not request.keep_going:
        yield Result("wide", LEFT_OUT, "drawn ones failed; --keep-going runs them all")
    elif not subject.is_one_case:
        yield from _check_each(request, subject, "wide", wide_cases(variant, request.seed, axes, config, device))


def _check_each(request: CheckRequest, subject: Subject, part: str, drawn: Iterable[Drawn]) -> Iterator[Result]:
    variant, failures, is_wide = subject.variant, 0, part == "wide"
    for case, drawn_config in drawn:
        config = subject.config if subject.config is not None else drawn_config
        named = (case.contract.name, variant.name, case.axes, case.seed, config, outside_folder(variant))
        seconds = _WIDE_SECONDS if is_wide else _SECONDS
        yield Result(part, BEGUN, message=_name(variant), replay=replay_command(*named), seconds=seconds)
        # The wide cases' offsets are the drawn ones', which are checked.
        result = _result(part, check_case(variant, case, config, offsets=not is_wide))
        yield result
        failures += result.is_bad
        if failures == MOST_FAILURES and not request.keep_going:
            yield Result(part, LEFT_OUT, f"{MOST_FAILURES} failed; --keep-going runs them all")
            return


def _name(variant: Variant) -> str:
    return f"{variant.contract.name}.{variant.name}: failed"


def _result(part: str, one: CheckResult) -> Result:
    return Result(part, one.status, one.reason, str(one), one.replay, one.max_ratio, one.rms_ratio)


def summarize(record: Record) -> dict[str, Any]:
    """One entry of `tk check --json`; the smallest case that is not ok comes first in its failures.

    `examples` and `ok` count the drawn cases, `wide` and `wide_ok` those that are as large as a model's; `left_out`
    says why there were no more of them.
    """
    variant, results = record.trial.subject.variant, record.results
    bad, status = [one for one in results if one.is_bad], _status(record)
    drawn, wide = record.part("drawn"), record.part("wide")
    return {
        "op": variant.contract.name,
        "variant": variant.name,
        "status": status,
        "reason": _reason(record, status),
        "examples": len(drawn),
        "ok": len(_right(drawn)),
        "wide": len(wide),
        "wide_ok": len(_right(wide)),
        "left_out": record.left_out,
        "max_error_ratio": _largest(one.max_ratio for one in _right(results)),
        "rms_error_ratio": _largest(one.rms_ratio for one in _right(results)),
        "failures": [{"status": r.status, "message": r.message, "replay": r.replay} for r in bad],
    }


def _reason(record: Record, status: str) -> str | None:
    """Why a variant has its status, or no more cases; None where all is well."""
    if status == NOT_RUN:
        return "it was not reached"
    if status == INTERRUPTION:
        return f"it was cut off after {len(record.results)} of its cases"
    bad = (one.reason for one in record.results if one.is_bad)
    reasons = (*bad, *record.left_out.values(), *(one.reason for one in record.results))
    return next(filter(None, reasons), None if status == "ok" else "no reason was given")


def _status(record: Record) -> str:
    """The worst of its cases', or how far it came."""
    statuses = {result.status for result in record.results}
    if bad := [status for status in BAD if status in statuses]:
        return bad[0]
    if not record.is_whole:
        return INTERRUPTION if record.is_reached else NOT_RUN
    return "ok" if "ok" in statuses else "unsupported"


def _right(results: Iterable[Result]) -> list[Result]:
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
        elif summary["status"] not in ("ok", NOT_RUN):
            console.print(Text(f"\n{_title(summary)}: {summary['reason']}"), soft_wrap=True)
        for part, why in summary["left_out"].items() if summary["failures"] or summary["status"] == "ok" else ():
            console.print(Text(f"  other {part} cases left out: {why}"), soft_wrap=True)
