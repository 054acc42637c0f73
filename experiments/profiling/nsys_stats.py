"""Reads what `nsys stats --report nvtx_gpu_proj_sum --format csv` printed.

Columns as in the Nsight Systems Post-Collection Analysis Guide, "NVTX GPU Projection Summary": Range ("domain:name"),
Total Proj Time, Total Range Time and Range Instances, with the unit of time in the header. A range's projection is
from its first operation on the device to its last, with what lies between them; ranges of a capture are not attributed
to the replays of their graph: the SQLite export says more.
"""

import csv
import re
from pathlib import Path

from experiments.document import ExperimentError
from experiments.profiling.range_table import category_of
from experiments.profiling.steady import STEADY
from tkernels.ranges import DOMAIN
from tkernels.spans import Breakdown, RangeTotal

_NS = {"ns": 1, "nsec": 1, "us": 1_000, "usec": 1_000, "ms": 1_000_000, "msec": 1_000_000, "s": 10**9, "sec": 10**9}
_TIME = re.compile(r"Total (Proj|Range) Time \((\w+)\)")


def read_stats(file: Path) -> Breakdown:
    """What each of our ranges took; ExperimentError where the file holds no such report."""
    if not file.is_file():
        raise ExperimentError([f"--nsys-export {file}: no such file"])
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith("Range,")), None)
    if first is None:
        command = "nsys stats --report nvtx_gpu_proj_sum --format csv"
        raise ExperimentError(
            [f"--nsys-export {file}: has no line of columns that begins with Range: not of `{command}`"]
        )
    reader = csv.DictReader(lines[first:])
    columns, rows = list(reader.fieldnames or ()), list(reader)
    times = [match for name in columns if (match := _TIME.fullmatch(name)) and match[2] in _NS]
    units = {match[1]: (match[0], _NS[match[2]]) for match in times}
    if len(units) != 2 or "Range Instances" not in columns:
        raise ExperimentError([f"--nsys-export {file}: its columns are {', '.join(columns)}"])
    totals: list[RangeTotal] = []
    for row in rows:
        domain, _, name = str(row["Range"]).partition(":")
        if domain != DOMAIN or name == STEADY:
            continue
        calls, category = int(float(row["Range Instances"])), category_of(name)
        host, device = (round(float(row[column]) * ns) for column, ns in (units["Range"], units["Proj"]))
        totals.append(RangeTotal(name, category, "host", calls, host, None))
        if device and category != "step":
            totals.append(RangeTotal(name, category, "device", calls, device, None))
    if not totals:
        raise ExperimentError([f"--nsys-export {file}: has no ranges in the domain {DOMAIN!r}"])
    steps = [total for total in totals if total.category == "step"]
    return Breakdown(sum(t.calls for t in steps), sum(t.total_ns for t in steps), tuple(totals))
