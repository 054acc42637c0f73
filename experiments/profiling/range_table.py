"""What the ranges of some steps took, as a table."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.reporting.table_style import Column, Line, PlainTable, cells
from tkernels import OPS
from tkernels.ranges import Category
from tkernels.spans import Breakdown, Clock, RangeTotal
from tsched.execution.phases import PHASES

Clocks = dict[Clock, RangeTotal]
"""A range's totals by each clock that it has any of."""

_LAYER = re.compile(r"layer (\d+)")
_SECTIONS: Mapping[str, str] = {
    "step": "Step",
    "phase": "Phases",
    "layer": "Layers",
    "part": "Parts of the model",
    "op": "Ops",
    "section": "Sections of ops",
    "gap": "Gaps",
}


_NAMES_OF_SECTIONS = {f"{op} {section}" for op in OPS for section in OPS[op].contract.sections}


def category_of(name: str) -> Category:
    """The category of a range of ours by its name alone, where a profiler kept nothing else."""
    if name == "step":
        return "step"
    if name in PHASES:
        return "phase"
    if _LAYER.fullmatch(name):
        return "layer"
    if name in _NAMES_OF_SECTIONS:
        return "section"
    return "op" if name.partition(".")[0] in OPS else "part"


def range_table(found: Breakdown, title: str, note: str = "") -> PlainTable:
    """Per step: calls and times of every range, phases in their order, layers by number, the rest by time."""
    clocks: list[Clock] = sorted({"host", *(total.clock for total in found.totals)}, reverse=True)
    share = "of the step" + (", the device time where there is one" if "device" in clocks else "")
    names = ["calls", *(f"{clock} us" for clock in clocks), "own us", "share"]
    ranges = _ranges_by_category(found)
    lines: list[Line] = []
    for category, heading in _SECTIONS.items():
        if category in ranges:
            lines += [heading, *(_line(totals, found, clocks) for totals in ranges[category])]
    steps = f"{found.steps} steps of {_us(found.step_ns / found.steps)} us" if found.steps else "no steps"
    caption = (
        "calls, host us, device us: a step's, in the mean, with what is nested in the range; own us: without, and what "
        f"lies in steps alone; share: {share}. {note}"
    )
    columns = (Column("range", whole=True), *(Column(name, right=True) for name in names))
    return PlainTable(f"{title}: {steps}", columns, tuple(lines), caption.rstrip())


def _ranges_by_category(found: Breakdown) -> dict[str, list[Clocks]]:
    """Each category's ranges in the order in which they are shown."""
    by_name: dict[str, Clocks] = defaultdict(dict)
    for total in found.totals:
        by_name[total.name][total.clock] = total
    by_category: dict[str, list[Clocks]] = defaultdict(list)
    for totals in sorted(by_name.values(), key=_order):
        by_category[_leading(totals).category].append(totals)
    return by_category


def _order(totals: Clocks) -> tuple[Any, ...]:
    total = _leading(totals)
    if total.category == "phase" and total.name in PHASES:
        return 0, PHASES.index(total.name)
    if layer := _LAYER.fullmatch(total.name):
        return 0, int(layer[1])
    return 1, -total.total_ns


def _leading(totals: Clocks) -> RangeTotal:
    """The device's time where there is one, else the host's."""
    return totals.get("device") or totals["host"]


def _line(totals: Clocks, found: Breakdown, clocks: Sequence[Clock]) -> Line:
    steps, leading = max(found.steps, 1), _leading(totals)
    calls = max(total.calls for total in totals.values()) / steps
    values = [
        f"{calls:,.0f}" if calls == round(calls) else f"{calls:,.1f}",
        *(_us(totals[clock].total_ns / steps if clock in totals else None) for clock in clocks),
        _us(None if leading.self_ns is None else leading.self_ns / steps),
        f"{leading.total_ns / found.step_ns:.1%}" if found.step_ns else "-",
    ]
    return cells(leading.name, *values)


def _us(ns: float | None) -> str:
    if ns is None:
        return "-"
    return f"{ns / 1000:,.1f}" if ns < 1e6 else f"{ns / 1000:,.0f}"
