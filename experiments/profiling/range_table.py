"""What the ranges of some steps took, as a table."""

import re
from collections.abc import Mapping
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
    "gap": "Gaps",
}


def category_of(name: str) -> Category:
    """The category of a range of ours by its name alone, where a profiler kept nothing else."""
    if name == "step":
        return "step"
    if name in PHASES:
        return "phase"
    if _LAYER.fullmatch(name):
        return "layer"
    return "op" if name.partition(".")[0] in OPS else "part"


def range_table(found: Breakdown, title: str, note: str = "") -> PlainTable:
    """Per step: calls and times of every range, phases in their order, layers by number, the rest by time."""
    on_device = any(total.clock == "device" for total in found.totals)
    names = ["calls", "host us", *(["device us"] if on_device else []), "own us", "share"]
    columns = (Column("range", whole=True), *(Column(name, right=True) for name in names))
    by_name: dict[str, Clocks] = {}
    for total in found.totals:
        by_name.setdefault(total.name, {})[total.clock] = total
    lines: list[Line] = []
    for category, heading in _SECTIONS.items():
        mine = [clocks for clocks in by_name.values() if next(iter(clocks.values())).category == category]
        if mine:
            lines.append(heading)
            lines += [_line(clocks, found, on_device) for clocks in sorted(mine, key=_order)]
    steps = max(found.steps, 1)
    whole = f"{title}: {found.steps} steps of {_us(found.step_ns / steps)} us" if found.steps else f"{title}: no steps"
    caption = (
        "calls, host us, device us: a step's, in the mean, with what is nested in the range; own us: without, and what "
        "lies in steps alone; "
        f"share: of the step{', the device time where there is one' if on_device else ''}.{note and ' ' + note}"
    )
    return PlainTable(whole, columns, tuple(lines), caption)


def _order(clocks: Clocks) -> tuple[Any, ...]:
    total = _leading(clocks)
    if total.category == "phase" and total.name in PHASES:
        return 0, PHASES.index(total.name)
    if layer := _LAYER.fullmatch(total.name):
        return 0, int(layer[1])
    return 1, -total.total_ns


def _leading(clocks: Clocks) -> RangeTotal:
    """The device's time where there is one, else the host's."""
    return clocks.get("device") or clocks["host"]


def _line(clocks: Clocks, found: Breakdown, on_device: bool) -> Line:
    steps = max(found.steps, 1)
    leading, host, device = _leading(clocks), clocks.get("host"), clocks.get("device")
    calls = max(total.calls for total in clocks.values()) / steps
    own = None if leading.self_ns is None else leading.self_ns / steps
    values = [
        f"{calls:,.0f}" if calls == round(calls) else f"{calls:,.1f}",
        _us(None if host is None else host.total_ns / steps),
        *([_us(None if device is None else device.total_ns / steps)] if on_device else []),
        _us(own),
        f"{leading.total_ns / found.step_ns:.1%}" if found.step_ns else "-",
    ]
    return cells(leading.name, *values)


def _us(ns: float | None) -> str:
    if ns is None:
        return "-"
    return f"{ns / 1000:,.1f}" if ns < 1e6 else f"{ns / 1000:,.0f}"
