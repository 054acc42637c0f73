"""`tk check --sanitize`: variants under the sanitizers, and what each found."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.text import Text

from experiments.commands.choices import Subject
from experiments.commands.output import end_with, name_some, print_json
from experiments.commands.requests import CheckRequest
from experiments.commands.trials import (
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
    smallest_first,
    words_of_interruption,
)
from experiments.document import ExperimentError
from experiments.reporting.table_style import group_by, make_table, status_text
from experiments.signals import INTERRUPTED, Signals
from tkernels import UnknownNameError
from tkernels.device import device_facts, first_device
from tkernels.preparation import prepared_case
from tkernels.silence import silenced
from tkernels.verification.check import outside_folder, replay_command
from tkernels.verification.sanitizers.base import (
    Sanitizer,
    find_plain_fault,
    inspect_case,
    planned_cases,
    sanitizer_cases,
    unfit_reason,
)
from tkernels.verification.sanitizers.suite import SANITIZERS

NO_CASE = "no case"
SECONDS = 300.0
"""That an outside variant may take for a case: a sanitizer calls it many times."""


def run(request: CheckRequest, choose: Callable[[], Sequence[Subject]], names: str) -> int:
    """Puts each variant under each sanitizer, prints the table, and returns 1 where there was a finding."""
    sanitizers = _named_sanitizers(names)

    def gather() -> list[Trial]:
        subjects = choose()
        with silenced():  # an outside variant's `supports` is asked
            return [_make_trial(request, subject, sanitizers) for subject in subjects]

    with Signals() as signals:
        records = carry_out("sanitize", gather, SECONDS, signals)
        rows = [summarize(record, sanitizer) for record in records for sanitizer in sanitizers]
        if request.as_json:
            print_json(rows)
        elif rows:
            _print(Console(), rows)
        status = 0 if signals.came else _conclude(rows)
        return end_with(INTERRUPTED, words_of_interruption(records)) if signals.came else status


def _conclude(rows: Sequence[Mapping[str, Any]]) -> int:
    """The command's status, with its reason where it is 1."""
    found = group_by((row for row in rows if row["findings"]), lambda row: f"{row['op']}.{row['variant']}")
    if found:
        named = ", ".join(f"{title} ({', '.join(row['sanitizer'] for row in mine)})" for title, mine in found.items())
        return end_with(1, f"{len(found)} {'variant has' if len(found) == 1 else 'variants have'} findings: {named}")
    if not any(row["cases"] for row in rows):
        reasons = dict.fromkeys(f"{row['op']}.{row['variant']}: {row['reason']}" for row in rows)
        return end_with(1, f"nothing was put under a sanitizer: {name_some([*reasons])}")
    if empty := [f"{row['op']}.{row['variant']}: {row['sanitizer']}" for row in rows if row["verdict"] == NO_CASE]:
        return end_with(1, f"no case was drawn that the variant supports and the sanitizer takes: {name_some(empty)}")
    return 0


def _named_sanitizers(text: str) -> list[Sanitizer]:
    """ "all", or names separated by commas; ExperimentError lists what there is."""
    try:
        return [SANITIZERS[name.strip()] for name in text.split(",")] if text != "all" else list(SANITIZERS.values())
    except UnknownNameError as error:
        raise ExperimentError([f"--sanitize: {error}"]) from None


def _make_trial(request: CheckRequest, subject: Subject, sanitizers: Sequence[Sanitizer]) -> Trial:
    fit = [sanitizer for sanitizer in sanitizers if not unfit_reason(sanitizer, subject.variant)]
    planned = sum(
        1
        if subject.is_one_case
        else planned_cases(sanitizer, subject.variant, request.examples, subject.axes, subject.config)
        for sanitizer in fit
    )
    first = fit[0].name if fit else ""
    return Trial(subject, first, planned, partial(_inspect_cases, request, subject, fit))


def _inspect_cases(request: CheckRequest, subject: Subject, fit: Sequence[Sanitizer]) -> Iterator[Result]:
    """Each sanitizer's cases, the smallest first; none more after one in which the variant fails without a sanitizer.

    Every sanitizer that calls it would say the same.
    """
    fault = False
    for sanitizer in fit:
        if fault:
            yield Result(sanitizer.name, LEFT_OUT, "the plain call failed")
            continue
        found = 0
        for case, config in _draw(request, subject, sanitizer):
            op, outside = case.contract.name, outside_folder(subject.variant)
            replay = replay_command(op, subject.variant.name, case.axes, case.seed, config, outside, sanitizer.name)
            name = f"{subject.title}: {sanitizer.name}"
            yield Result(sanitizer.name, BEGUN, message=name, replay=replay, seconds=SECONDS)
            finding = inspect_case(sanitizer, subject.variant, case, config)
            if finding is None:
                yield Result(sanitizer.name, "ok")
                continue
            found += 1
            plain = find_plain_fault(subject.variant, case, config) if finding.is_raised else None
            why = finding.message if plain is None else f"the plain call fails: {plain}"
            yield Result(sanitizer.name, "finding", why, f"{name}: {why}\n  replay: {replay}", replay)
            fault = plain is not None and not request.keep_going
            if fault or (found == MOST_FAILURES and not request.keep_going):
                break


def _draw(request: CheckRequest, subject: Subject, sanitizer: Sanitizer) -> Sequence[Drawn]:
    variant, config, device = subject.variant, subject.config, first_device()
    if subject.is_one_case:
        if config is None and variant.launch is not None:
            config = variant.default_config(device_facts(device).arch)
        case = prepared_case(variant, variant.contract.case(subject.axes, request.seed, device))
        return [(case, config)] if sanitizer.takes(case) else []
    cases = sanitizer_cases(sanitizer, variant, request.examples, request.seed, subject.axes, device, config)
    return smallest_first(cases)[0]


def summarize(record: Record, sanitizer: Sanitizer) -> dict[str, Any]:
    """One entry of --json. verdict: ok, finding (the smallest case comes first), not run or interrupted where the plain
    call fails or a signal came, or not applicable with its reason.
    """
    variant, results = record.trial.subject.variant, record.part(sanitizer.name)
    findings = [result for result in results if result.is_bad]
    verdict, reason = _judge(record, sanitizer, results)
    return {
        "op": variant.contract.name,
        "variant": variant.name,
        "sanitizer": sanitizer.name,
        "cases": len(results),
        "verdict": verdict,
        "reason": reason,
        "findings": [{"message": one.reason, "replay": one.replay} for one in findings],
    }


def _judge(record: Record, sanitizer: Sanitizer, results: Sequence[Result]) -> tuple[str, str | None]:
    """(verdict, reason) of one variant under one sanitizer."""
    if reasons := [result.reason for result in results if result.is_bad]:
        return "finding", reasons[0]
    if reason := unfit_reason(sanitizer, record.trial.subject.variant):
        return "not applicable", reason
    if reason := record.left_out.get(sanitizer.name):
        return NOT_RUN, reason
    is_in_hand = record.in_hand is not None and record.in_hand.part == sanitizer.name
    if not record.is_whole and (is_in_hand or not results):
        return INTERRUPTION if results else NOT_RUN, "interrupted"
    if record.died and not results:
        return NOT_RUN, f"its process ended under {record.died}"
    return ("ok", None) if results else (NO_CASE, "no case was drawn that it supports and the sanitizer takes")


_COLUMNS = ("op", "variant", "sanitizer", "cases", "verdict")


def _cells(row: Mapping[str, Any]) -> Sequence[str | Text]:
    verdict = status_text(row["verdict"])
    if row["reason"] and row["verdict"] != "finding":
        verdict = Text.assemble(verdict, (f": {row['reason']}", "dim"))
    return row["op"], row["variant"], row["sanitizer"], str(row["cases"]), verdict


def _print(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    verdicts = Counter(row["verdict"] for row in rows)
    first = " (the first of each below)" if verdicts["finding"] else ""
    caption = (
        f"{verdicts['ok']} ok, {verdicts['finding'] or 'none'} with findings{first}, "
        f"{verdicts['not applicable']} not applicable"
        + "".join(f", {verdicts[one]} {one}" for one in (NO_CASE, NOT_RUN, INTERRUPTION) if verdicts[one])
        + "."
    )
    console.print(make_table("Sanitizers", _COLUMNS, map(_cells, rows), right=["cases"], once=2, caption=caption))
    for row in rows:
        for finding in row["findings"][:1]:
            name = f"{row['op']}.{row['variant']}: {row['sanitizer']}"
            console.print(Text(f"\n{name}: {finding['message']}\n  replay: {finding['replay']}"), soft_wrap=True)
