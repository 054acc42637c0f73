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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.document import ExperimentError
from experiments.profiling.range_table import category_of
from experiments.profiling.tools import STEADY
from tkernels.errors import TKernelsError
from tkernels.ranges import DOMAIN
from tkernels.spans import Breakdown, Clock, RangeTotal

_NS = {"ns": 1, "nsec": 1, "us": 1_000, "usec": 1_000, "ms": 1_000_000, "msec": 1_000_000, "s": 10**9, "sec": 10**9}
_TIMES: Mapping[str, Clock] = {"Total Range Time": "host", "Total Time": "host", "Total Proj Time": "device"}
_TIME = re.compile(rf"({'|'.join(_TIMES)}) \(({'|'.join(_NS)})\)")
_CALLS = ("Range Instances", "Instances")
_COMMAND = "nsys stats --report nvtx_gpu_proj_sum --format csv"


class _Columns(NamedTuple):
    """Places in a report's lines, and nanoseconds in a time's unit. times: the host's first, some have no device's."""

    range: int
    calls: int
    times: Mapping[Clock, tuple[int, int]]


def read_stats(file: Path) -> Breakdown:
    """What each of our ranges took; ExperimentError where the file holds no such report."""
    if not file.is_file():
        raise ExperimentError([f"--nsys-export {file}: no such file"])
    lines = csv.reader(file.read_text(encoding="utf-8-sig", errors="replace").splitlines())
    try:
        columns = next(filter(None, map(_find_columns, lines)), None)
        totals = [] if columns is None else list(_read_totals(columns, lines))
    except (csv.Error, _BrokenLineError) as error:
        problem = f"--nsys-export {file}: line {lines.line_num}: {error}, so this is not what `{_COMMAND}` prints"
        raise ExperimentError([problem]) from None
    if columns is None:
        raise ExperimentError([f"--nsys-export {file}: has no table of NVTX ranges, as `{_COMMAND}` prints"])
    if not totals:
        raise ExperimentError([f"--nsys-export {file}: has no ranges in the domain {DOMAIN!r}"])
    steps = [total for total in totals if total.category == "step"]
    return Breakdown(sum(t.calls for t in steps), sum(t.total_ns for t in steps), tuple(totals))


def _find_columns(line: Sequence[str]) -> _Columns | None:
    """The columns, where this line is a report's header."""
    matches = [(place, _TIME.fullmatch(name.strip())) for place, name in enumerate(line)]
    times = {_TIMES[match[1]]: (place, _NS[match[2]]) for place, match in matches if match is not None}
    calls = [line.index(name) for name in _CALLS if name in line]
    if "host" not in times or not calls or "Range" not in line:
        return None
    return _Columns(line.index("Range"), calls[0], dict(sorted(times.items(), reverse=True)))


def _read_ranges(columns: _Columns, lines: Iterator[list[str]]) -> Iterator[tuple[str, list[str]]]:
    """The names of our ranges, with their lines, to the table's end."""
    last = max(columns.range, columns.calls, *(place for place, _ in columns.times.values()))
    for line in lines:
        if len(line) <= last:
            if any(cell.startswith(f"{DOMAIN}:") for cell in line):
                raise _BrokenLineError(f"has {len(line)} cells of at least {last + 1}")
            return
        domain, _, name = line[columns.range].partition(":")
        if domain == DOMAIN and name != STEADY:
            yield name, line


def _read_totals(columns: _Columns, lines: Iterator[list[str]]) -> Iterator[RangeTotal]:
    for name, line in _read_ranges(columns, lines):
        calls, category = int(_read_figure(line[columns.calls])), category_of(name)
        for clock, (place, unit) in columns.times.items():
            ns = round(_read_figure(line[place]) * unit)
            if clock == "host" or (ns and category != "step"):
                yield RangeTotal(name, category, clock, calls, ns, None)


class _BrokenLineError(TKernelsError, ValueError):
    """A line of one of our ranges that lacks a number."""


def _read_figure(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _BrokenLineError(f"{text!r} is no figure")
    return value
