"""A comparison as tables for people, in 80 columns."""

from collections.abc import Callable, Sequence
from typing import get_args

from rich.console import Console
from rich.text import Text

from experiments.reporting.table_style import Cell, Column, PlainTable, build_table, number_column, setting_name
from experiments.runs.comparison import LEVEL, MIN_REPLICATES, POWER, Outcome
from experiments.runs.verdicts import Comparison, Verdict

OUTCOMES = get_args(Outcome)
_SHOWN = 12
"""Lines of each kind of difference; --json has them all."""


def print_comparison(console: Console, found: Comparison) -> None:
    """The verdict in a sentence, every figure's, and what else differs."""
    console.print(Text.assemble("\n", (count_outcomes(found), "bold")), soft_wrap=True)
    for line in found.cut_off:
        console.print(Text(f"{line}.", "yellow"), soft_wrap=True)
    console.print(verdict_table(found).as_rich())
    for reason in dict.fromkeys(verdict.reason for verdict in found.verdicts if verdict.reason is not None):
        console.print(Text(f"Cannot tell: {reason}.", "yellow"))
    across = [f"{what}: {how}" for what, how in found.across.items()]
    print_lines(console, "Not the same, and allowed with --across", across)
    print_lines(console, "What else differs", found.circumstances)
    print_lines(console, "Rows that changed", found.changed)
    print_lines(console, f"Only in {found.first}", found.only_first)
    print_lines(console, f"Only in {found.second}", found.only_second)
    print_lines(console, "Recovered", found.repairs)


def count_outcomes(found: Comparison) -> str:
    """ "b beside a: of 8 figures, 3 worse, 5 within noise"."""
    counts = [f"{n} {outcome}" for outcome in OUTCOMES if (n := found.count(outcome))]
    total = len(found.verdicts)
    subject = f"{found.second} beside {found.first}" if found.second else f"The arms of {found.first}"
    return f"{subject}: of {total} figure{'s' if total != 1 else ''}, {', '.join(counts)}"


def verdict_table(found: Comparison, title: str = "") -> PlainTable:
    """A line for each figure, under its place."""
    show: dict[Column, Callable[[Verdict], str | Cell]] = {
        Column("arm"): lambda one: one.arm,
        number_column("first"): lambda one: _value(one, one.first),
        number_column("second"): lambda one: _value(one, one.second),
        number_column("change"): lambda one: f"{one.effect.ratio - 1:+.1%}",
        number_column("interval"): _interval,
        number_column("sees"): _smallest,
        Column("verdict", whole=True): lambda one: Cell(one.effect.outcome, one.effect.outcome),
    }
    return build_table(title, show, found.verdicts, _caption(found), _heading)


def _heading(verdict: Verdict) -> str:
    """What a verdict is about, with its unit, and beside which arm."""
    beside = f", beside {verdict.beside}" if verdict.beside else ""
    place = ", ".join(map(setting_name, verdict.place.split(", ")))
    return f"{place}: {verdict.figure}, {'ms' if verdict.unit == 's' else verdict.unit}{beside}"


def _value(verdict: Verdict, value: float) -> str:
    return f"{value * (1e3 if verdict.unit == 's' else 1):,.4g}"


def _interval(verdict: Verdict) -> str:
    low, high = verdict.effect.low, verdict.effect.high
    return "-" if low is None or high is None else f"{format_change(low - 1)} {format_change(high - 1)}"


def _smallest(verdict: Verdict) -> str:
    least = verdict.effect.smallest
    return "-" if least is None else format_change(least).removeprefix("+")


def format_change(share: float) -> str:
    """Signed, and short where it is beyond all use."""
    return f"{share:+.1%}" if abs(share) < 9.995 else ">999%"


def _caption(found: Comparison) -> str:
    about = "second" if found.second else "arm"
    parts = [
        "first, second: geometric means over processes"
        + ("." if found.second else "; first is of the arm that the others are beside."),
        f"change: of the {about} over the first; interval: at the level of its verdict ({LEVEL:.1%} for a false alarm "
        f"in any figure, after Holm); sees: the smallest change that would have been found, in {POWER:.0%} of tries.",
    ]
    if any(verdict.beside_yardstick for verdict in found.verdicts):
        parts.append("Changes are beside a yardstick's, taken in the same processes: second / first may be another.")
    if found.drift:
        parts.append(
            f"The machine drifted: slow waves hold {1 + found.drift:.1f} times their share, which is allowed for."
        )
    if (fewest := min(min(verdict.processes) for verdict in found.verdicts)) >= MIN_REPLICATES:
        parts.append(f"At least {fewest} processes each.")
    return " ".join(parts)


def print_lines(console: Console, title: str, lines: Sequence[str]) -> None:
    """A heading with lines under it, where there are any."""
    if not lines:
        return
    console.print(Text(f"\n{title}", "bold"))
    for line in lines[:_SHOWN]:
        console.print(Text(f"  {line}"), soft_wrap=True)
    if len(lines) > _SHOWN:
        console.print(Text(f"  and {len(lines) - _SHOWN} more: --json has them all", "dim"))
