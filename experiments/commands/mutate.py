"""`tk check --mutate`: faults planted in kernels and launchers, and what notices them."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.commands.choices import choose_variants, open_registry
from experiments.commands.output import end_with, name_some, print_json, progress_bar
from experiments.commands.requests import CheckRequest
from experiments.document import ExperimentError
from experiments.reporting.table_style import make_table
from tkernels import Registry
from tkernels.verification.mutation import campaign
from tkernels.verification.mutation.campaign import KINDS, Comparison, Outcome, Score, Trial
from tkernels.verification.mutation.pool import KILLED, MutationError, Pool

LEAST_SHARE = 0.99
LEAST_MUTANTS = 100
MOST_EQUIVALENT = 0.05
_ENDS = (*KILLED, "equivalent", "survived")


def run(request: CheckRequest) -> int:
    """Tries the sampled mutants; 1 where too few were killed or tried, or a declared equivalent was killed."""
    everything, ops = _list_trials(request)
    chosen = campaign.sampled(everything, request.quota, request.seed)
    ended: list[Outcome] = []
    with _open_pool(ops, "--mutate") as pool, progress_bar("mutate", len(chosen)) as update:
        for outcome in campaign.outcomes(pool, chosen, request.seed):
            ended.append(outcome)
            update(advance=1, doing=outcome.trial.mutant.name)
    total = campaign.score(ended)
    complaints = problems(ended, total, whole=request.chosen_op is None and request.variant is None)
    if request.as_json:
        figures: dict[str, Any] = {"mutants": total.counted, "killed": total.killed, "equivalent": total.equivalent}
        figures["parts"] = {part: {**asdict(own), "score": own.share} for part, own in _score_parts(ended).items()}
        asked, rows = {"seed": request.seed, "quota": request.quota}, [_describe(outcome) for outcome in ended]
        print_json({**asked, **figures, "score": total.share, "problems": complaints, "rows": rows})
    else:
        _print(Console(), ended, total, complaints)
    return end_with(1, "; ".join(complaints)) if complaints else 0


def verify(request: CheckRequest) -> int:
    """Compares the bits of every declared equivalent with its original's; 1 where any differ."""
    everything, ops = _list_trials(request)
    declared = [trial for trial in everything if trial.equivalent is not None]
    parts: list[Comparison] = []
    total = campaign.pieces(declared, campaign.VERIFIED_CASES)
    with _open_pool(ops, "--verify-equivalent") as pool, progress_bar("mutate", total) as update:
        update(doing=f"{campaign.VERIFIED_CASES} cases each")
        for part in campaign.compared(pool, declared, campaign.VERIFIED_CASES, request.seed):
            parts.append(part)
            update(advance=1, doing=part.trial.mutant.name)
    whole = campaign.joined(declared, parts)
    if request.as_json:
        print_json([_describe_comparison(comparison) for comparison in whole])
    else:
        _print_comparisons(Console(), whole)
    other = [f"{one.trial.op}: {one.trial.mutant.name}" for one in whole if one.reason]
    return end_with(1, f"{len(other)} declared equivalents have other bits: {name_some(other)}") if other else 0


def _list_trials(request: CheckRequest) -> tuple[list[Trial], Registry]:
    """What there is to try, and the registry that it is of."""
    ops = open_registry(request.variants_from)
    found = list(campaign.trials(choose_variants(ops, request.chosen_op, request.variant)))
    if not found:
        raise ExperimentError(["--mutate: none of these variants has a kernel or a launcher"])
    return found, ops


@contextmanager
def _open_pool(ops: Registry, option: str) -> Iterator[Pool]:
    try:
        with Pool(max(1, min(8, os.cpu_count() or 1)), ops) as pool:
            yield pool
    except MutationError as error:
        raise ExperimentError([f"{option}: {error}"]) from None


def problems(ended: Sequence[Outcome], total: Score, whole: bool) -> list[str]:
    """Why a campaign fails, of the whole registry or of a part; nothing where it does not."""
    found = [f"declared equivalent, but killed: {o.trial.mutant.name} ({o.fate.reason})" for o in ended if o.wrong]
    for part, own in _score_parts(ended).items():
        if own.share < LEAST_SHARE:
            found.append(f"{part}s: {own.share:.1%} killed, {LEAST_SHARE:.0%} wanted")
    if whole and total.counted < LEAST_MUTANTS:
        found.append(f"{total.counted} mutants, at least {LEAST_MUTANTS} wanted")
    if total.equivalent_share > MOST_EQUIVALENT:
        found.append(f"{total.equivalent_share:.1%} declared equivalent, {MOST_EQUIVALENT:.0%} allowed")
    return found


def _score_parts(ended: Sequence[Outcome]) -> dict[str, Score]:
    """What the faults in kernels, and those in launchers, come to; each has to reach the mark by itself."""
    by_part = {part: [one for one in ended if one.trial.mutant.part == part] for part in KINDS}
    return {part: campaign.score(own) for part, own in by_part.items() if own}


def _describe(outcome: Outcome) -> dict[str, Any]:
    """An outcome's row of --json."""
    trial, fate, mutant = outcome.trial, outcome.fate, outcome.trial.mutant
    row = {"op": trial.op, "variant": fate.variant.name, "part": mutant.part}
    row |= {"function": mutant.function, "kind": mutant.kind}
    row |= {"file": mutant.file.name, "line": str(mutant.line), "before": mutant.before, "after": mutant.after}
    row |= {"verdict": outcome.column, "reason": fate.reason}
    if trial.equivalent is not None:
        row["why_equivalent"] = trial.equivalent.reason
    return row if outcome.column != "survived" else {**row, "diff": mutant.diff}


def _describe_comparison(comparison: Comparison) -> dict[str, Any]:
    known = comparison.trial.equivalent
    assert known is not None
    row = {"op": known.op, "function": known.function, "kind": known.kind, "before": known.before}
    same = not comparison.reason
    return row | {"after": known.after, "cases": comparison.cases, "same": same, "why": known.reason}


def _print(console: Console, ended: Sequence[Outcome], total: Score, complaints: Sequence[str]) -> None:
    console.print(_tabulate(ended))
    style = "bold red" if complaints else "bold green"
    for part, own in _score_parts(ended).items():
        console.print(Text(f"{part}s: {_in_words(own)}"))
    console.print(Text(_in_words(total), style))
    for complaint in complaints:
        console.print(Text(complaint, "red"))
    for trial in (outcome.trial for outcome in ended if outcome.column == "survived"):
        console.print(Text(f"\nsurvived: {trial.op}: {trial.mutant.name}", "bold"), soft_wrap=True)
        console.print(Text(trial.mutant.diff), soft_wrap=True)


def _in_words(total: Score) -> str:
    left = f"{total.counted} mutants, {total.equivalent} of them equivalent"
    return f"{left}: {total.killed} killed, {total.share:.1%}"


def _tabulate(ended: Sequence[Outcome]) -> Table:
    """How the mutants of each op and kind of fault ended."""
    counts = Counter((outcome.trial.op, outcome.trial.mutant.kind, outcome.column) for outcome in ended)
    ops = dict.fromkeys(outcome.trial.op for outcome in ended)
    places = [(op, kind) for op in ops for kinds in KINDS.values() for kind in kinds]
    tried = [place for place in places if any(counts[*place, end] for end in _ENDS)]
    ends = Counter(outcome.column for outcome in ended)
    shown = [end for end in _ENDS if ends[end] or end == "survived"]
    rows = [(op, kind.replace("_", " "), *_cells([counts[op, kind, end] for end in shown])) for op, kind in tried]
    caption = (
        "Killed by a wrong value; a crash (an exception, a signal, a time-out); a claim that it breaks; the recorded "
        "table of launches alone; the inspection of what it compiles to. Not counted: "
        f"{ends['does_not_compile']} that do not compile, {ends['same_code']} that compile to the same code."
    )
    figures = ("mutants", *shown)
    return make_table("Mutants", ("op", "fault", *figures), rows, right=figures, once=1, caption=caption)


def _cells(counts: Sequence[int]) -> list[str | Text]:
    """How many there are, and how many ended in each way; that some survived is not overlooked."""
    *killed, survived = counts
    return [str(sum(counts)), *map(str, killed), Text(str(survived), "bold red" if survived else "")]


def _print_comparisons(console: Console, found: Sequence[Comparison]) -> None:
    bits = {True: Text("different", "bold red"), False: Text("the same", "green")}
    rows = [(one.trial.op, one.trial.mutant.name, str(one.cases), bits[bool(one.reason)]) for one in found]
    console.print(make_table("Declared equivalents", ("op", "fault", "cases", "bits"), rows, right=["cases"]))
    for one in found:
        if one.reason:
            console.print(Text(f"\n{one.trial.op}: {one.trial.mutant.name}\n  {one.reason}"))
