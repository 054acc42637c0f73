"""A run as one long table: place, arm, figure, value, unit, replicate; and its times, which are what is compared.

Tables and pictures for people show what is no number too (a status, sizes, samples), so that they read rows.

A place is what was asked, and where arms can be compared: an op at a point, or a workload, with the dtype, the model
and the sizes that are swept. An arm is what is compared there: variants, options, a peer, a quantization method.
"""

import csv
import io
import json
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any, Literal

from experiments.document import ExperimentError
from experiments.runs.rows import Row, unit_of

Better = Literal["lower", "higher"]

TIMES: Mapping[str, Mapping[str, Better]] = {
    "kernels": {"median_us": "lower"},
    "engine": {"tokens_per_s": "higher", "ttft_s.p50": "lower", "tpot_s.p50": "lower", "gap_s.p99": "lower"},
    "peers": {"tokens_per_s": "higher"},
    "http": {"tokens_per_s": "higher", "ttft_s.p50": "lower", "tpot_s.p50": "lower", "gap_s.p99": "lower"},
    "quantization": {"tokens_per_s": "higher"},
    "forward": {"median_us": "lower"},
}
"""Stage -> the figures of time, which are judged, and which of their values are better. A process has few first tokens,
whose percentiles beyond the median say little; it has a gap for every token, and what a long prompt or a swap does to
the others is in the longest of them alone. What is counted is no matter of noise.
"""

_ALIKE = ("dtype", "model")
"""Settings that arms are not compared across."""

_OF_AN_OP = ("check", "kernels", "foretold", "tuning", "hardware")
"""Stages whose rows are of one op and variant. A step's row names those of its range, and is of an arm."""

_NO_FIGURES = ("replicate", "task_rows", "seed", "bits", "group_size", "config")
"""Numbers that say what a row is of, or how it was run."""


@dataclass(frozen=True)
class Entry:
    """One line of the table. value: a finite number, or an infinite one."""

    stage: str
    place: str
    arm: str
    figure: str
    value: float
    unit: str
    replicate: int


@dataclass(frozen=True)
class Label:
    """What a row is of. arm: all that it is made of; title: what tells it from the others of its run, for people."""

    place: str
    arm: str
    title: str


def long_table(rows: Sequence[Row]) -> list[Entry]:
    """Every figure of every process, in the rows' order; raw samples are left to results.jsonl."""
    found = []
    for row in rows:
        label = label_of(row)
        place = label.place if row.range is None else f"{label.place}, {row.range}, {row.clock} clock"
        for name, value in row.figures():
            unit = unit_of(name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if unit is not None and unit != "index" and is_number and name.partition(".")[0] not in _NO_FIGURES:
                found.append(Entry(row.stage, place, label.arm, name, value, unit, row.replicate))
    return found


def as_csv(table: Iterable[Entry]) -> str:
    """The table with a header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(one.name for one in fields(Entry))
    writer.writerows(map(astuple, table))
    return text.getvalue()


@dataclass
class Figure:
    """A figure of time of one arm, from every process.

    values: replicate -> the figure's logarithm; yardsticks: the yardstick's, its negative of a rate, which falls where
    times rise; of the replicates with one.
    """

    name: str
    unit: str
    better: Better
    place: str
    arm: str
    title: str
    values: dict[int, float] = field(default_factory=dict)
    yardsticks: dict[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.place}: {self.title}, {self.name}"

    @property
    def has_yardstick(self) -> bool:
        """Whether every process took one."""
        return bool(self.values) and self.yardsticks.keys() == self.values.keys()

    @property
    def mean(self) -> float:
        """The geometric mean over processes, in `unit`."""
        return math.exp(math.fsum(self.values.values()) / len(self.values))


def times_of(
    rows: Sequence[Row], *, across: Collection[str] = (), leave_out: bool = False, among: Sequence[Row] | None = None
) -> dict[str, Figure]:
    """The figures of time by a key that is the same in every run of the same YAML, in the rows' order.

    Args:
        rows: Of each process.
        across: "dtype" and "model", where named, tell arms apart and not places; with `leave_out`, nothing at all, for
            runs that have one each.
        among: The rows that titles tell arms apart in; `rows` itself by default.

    Raises:
        ExperimentError: Two rows of one process are of the same thing.
    """
    swept = swept_ops(rows if among is None else among)
    found: dict[str, Figure] = {}
    for row in rows:
        if row.status != "ok":
            continue
        label = label_of(row, across, leave_out, swept)
        values = dict(row.figures())
        for name, better in TIMES.get(row.stage, {}).items():
            value = values.get(name)
            if value is None or not 0 < value < math.inf:
                continue
            new = Figure(name, str(unit_of(name)), better, label.place, label.arm, label.title)
            figure = found.setdefault(_key(label, name), new)
            if row.replicate in figure.values:
                what = f"{name} of {label.arm}, {label.place}"
                raise ExperimentError([f"process {row.replicate} has two rows of {what}: they cannot be told apart"])
            figure.values[row.replicate] = math.log(value)
            if row.yardstick_us is not None and row.yardstick_us > 0:
                sign = -1 if better == "higher" else 1
                figure.yardsticks[row.replicate] = sign * math.log(row.yardstick_us)
    return found


def figure_key(row: Row) -> str:
    """The key among `times_of` its run of a row's first figure of time."""
    return _key(label_of(row), next(iter(TIMES[row.stage])))


def _key(label: Label, name: str) -> str:
    return f"{label.place} | {label.arm} | {name}"


def swept_ops(rows: Iterable[Row]) -> dict[tuple[str, str], None]:
    """(stage, op) of which rows have several variants, in the rows' order."""
    labels: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        for op, label in row.arm.items():
            labels.setdefault((row.stage, op), set()).add(label)
    return {key: None for key, values in labels.items() if len(values) > 1}


def label_of(
    row: Row, across: Collection[str] = (), leave_out: bool = False, swept: Collection[tuple[str, str]] = ()
) -> Label:
    """What a row is of; `across` and `leave_out` are those of `times_of`, `swept` the ops that a title names."""
    shared, own = _split_settings(row, across, leave_out)
    dtype = None if "dtype" in (*across, *shared) else row.dtype
    if row.stage in _OF_AN_OP:
        place, arm = _words(row.op, row.point, dtype, **shared), _words(row.variant, **own)
        return Label(place, arm, arm)
    if row.stage == "quantization":
        codes = f"{row.method}, {row.bits} bits, group {row.group_size}" if row.bits else row.method
        place, arm = _words("quantization", dtype, **shared), _words(codes, **own)
        return Label(place, arm, arm)
    place = _words("engine" if row.workload is not None else row.stage, row.workload, dtype, **shared)
    if row.url is not None:
        place = _words("http", row.workload, **shared)
        return Label(place, _words(row.url, **own), row.url)
    if row.peer is not None:
        arm = _words(f"peer {row.peer}", **own)
        return Label(place, arm, arm)
    named = sorted(row.arm.items())
    arm = _words(*(f"{op}={label}" for op, label in named), **own)
    title = _words(*(label for op, label in named if (row.stage, op) in swept), **own)
    return Label(place, arm, title or "the only arm")


def _split_settings(row: Row, across: Collection[str], leave_out: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The swept settings that a place is told by, and those that an arm is told by."""
    shared: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key, value in row.settings.items():
        if leave_out and key in across:
            continue
        alike = key in _ALIKE and key not in across
        (shared if alike or key.startswith("workload.") else own)[key] = value
    return shared, own


def place_of(row: Row) -> str:
    """Where a row's speed can be compared."""
    return label_of(row).place


def question_of(row: Row) -> str:
    """Where a row's answer can be compared: arms of another dtype were asked the same."""
    return label_of(row, ("dtype",), leave_out=True).place


def distinct_parts(places: Iterable[str]) -> dict[str, str]:
    """ "75% shared" of "engine, 75% shared, float32": what all places have in common tells none from the others."""
    parts = {place: place.split(", ") for place in places}
    common = set.intersection(*map(set, parts.values())) if parts else set()
    return {place: ", ".join(one for one in some if one not in common) for place, some in parts.items()}


def _words(*parts: object, **settings: object) -> str:
    """The parts that there are, and "key=value" of each setting."""
    shown = [str(part) for part in parts if part not in (None, "")]
    keyed = [f"{key}={json.dumps(value) if isinstance(value, dict) else value}" for key, value in settings.items()]
    return ", ".join([*shown, *sorted(keyed)])


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third, of at least two values."""
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def spread(values: Sequence[float]) -> float | None:
    """The distance between the quartiles; a single value has none."""
    if len(values) < 2:
        return None
    first, third = quartiles(values)
    return third - first
