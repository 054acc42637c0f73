"""Reads what `nsys stats --format csv` printed of the reports nvtx_gpu_proj_sum, nvtx_pushpop_sum or nvtx_sum.

Columns as in the Nsight Systems Post-Collection Analysis Guide (https://docs.nvidia.com/nsight-systems/AnalysisGuide):
Range ("domain:name"); Total Proj Time, Total Range Time and Range Instances of "NVTX GPU Projection Summary"; Total
Time and Instances of the others, which know the host alone; the unit of time is in the header. A range's projection is
from its first operation on the device to its last, with what lies between them; ranges of a capture are not attributed
to the replays of their graph: the SQLite export says more.
"""

import csv
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.document import ExperimentError
from experiments.profiling.range_table import category_of
from experiments.profiling.under_nsys import STEADY
from tkernels.ranges import DOMAIN
from tkernels.spans import Breakdown, RangeTotal

_NS = {"ns": 1, "nsec": 1, "us": 1_000, "usec": 1_000, "ms": 1_000_000, "msec": 1_000_000, "s": 10**9, "sec": 10**9}
_COLUMN = re.compile(r"(Total Proj Time|Total Range Time|Total Time) \((\w+)\)")


class _Columns(NamedTuple):
    """Where a report has what: places in a line, and nanoseconds in its unit. device is None of the host's reports."""

    range: int
    calls: int
    host: tuple[int, int]
    device: tuple[int, int] | None


def read_stats(file: Path) -> Breakdown:
    """What each of our ranges took; ExperimentError where the file holds no such report."""
    if not file.is_file():
        raise ExperimentError([f"--nsys-export {file}: no such file"])
    lines = csv.reader(file.read_text(encoding="utf-8-sig", errors="replace").splitlines())
    command = "nsys stats --report nvtx_gpu_proj_sum --format csv"
    try:
        columns = next((found for line in lines if (found := _columns(line)) is not None), None)
        if columns is None:
            raise ExperimentError([f"--nsys-export {file}: has no table of NVTX ranges, as `{command}` prints"])
        totals = list(_totals(columns, lines))
    except (csv.Error, _BrokenLineError) as error:
        problem = f"--nsys-export {file}: line {lines.line_num}: {error}, so this is not what `{command}` prints"
        raise ExperimentError([problem]) from None
    if not totals:
        raise ExperimentError([f"--nsys-export {file}: has no ranges in the domain {DOMAIN!r}"])
    steps = [total for total in totals if total.category == "step"]
    return Breakdown(sum(t.calls for t in steps), sum(t.total_ns for t in steps), tuple(totals))


def _columns(line: Sequence[str]) -> _Columns | None:
    """The columns, where this line is a report's header."""
    times = {
        match[1]: (place, _NS[match[2]])
        for place, name in enumerate(line)
        if (match := _COLUMN.fullmatch(name.strip())) and match[2] in _NS
    }
    host = times.get("Total Range Time", times.get("Total Time"))
    calls = next((line.index(name) for name in ("Range Instances", "Instances") if name in line), None)
    if host is None or calls is None or "Range" not in line:
        return None
    return _Columns(line.index("Range"), calls, host, times.get("Total Proj Time"))


def _totals(columns: _Columns, lines: Iterator[list[str]]) -> Iterator[RangeTotal]:
    times = (columns.host, *([columns.device] if columns.device is not None else []))
    last = max(columns.range, columns.calls, *(place for place, _ in times))
    for line in lines:
        if len(line) <= last:
            if any(cell.startswith(f"{DOMAIN}:") for cell in line):
                raise _BrokenLineError(f"has {len(line)} cells of at least {last + 1}")
            return  # the table is over
        domain, _, name = line[columns.range].partition(":")
        if domain != DOMAIN or name == STEADY:
            continue
        calls, category = int(_figure(line[columns.calls])), category_of(name)
        host, *device = (round(_figure(line[place]) * unit) for place, unit in times)
        yield RangeTotal(name, category, "host", calls, host, None)
        if category != "step" and any(device):
            yield RangeTotal(name, category, "device", calls, device[0], None)


class _BrokenLineError(ValueError):
    """A line of one of our ranges that lacks a number."""


def _figure(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _BrokenLineError(f"{text!r} is no figure")
    return value
