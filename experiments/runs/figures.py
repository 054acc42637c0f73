"""The figures of a run that can be compared: of each thing that was timed, a value from every process."""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from experiments.document import ExperimentError
from experiments.runs.comparison import Better
from experiments.runs.rows import EngineRow, KernelRow, PeerRow, QuantizationRow, Row

_FIGURES: Mapping[type, Mapping[str, tuple[str, Better]]] = {
    KernelRow: {"median_us": ("us", "lower")},
    EngineRow: {
        "tokens_per_s": ("tokens/s", "higher"), "ttft_s.p50": ("s", "lower"), "tpot_s.p50": ("s", "lower"),
        "gap_s.p99": ("s", "lower"),
    },
    PeerRow: {"tokens_per_s": ("tokens/s", "higher")},
    QuantizationRow: {"tokens_per_s": ("tokens/s", "higher")},
}  # fmt: skip
"""Of each kind of row: those of time, with their unit, and which of their values are better. A process has few first
tokens, whose percentiles beyond the median say little; it has a gap for every token, and what a long prompt or a swap
does to the others is in the longest of them alone. What is counted is no matter of noise.
"""

_ALIKE = ("dtype", "model")
"""Settings that arms are not compared across."""


@dataclass
class Figure:
    """One figure of one arm. place: where arms can be compared; arm: all that this one is made of; title: what tells it
    from the others, for people.

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

    @property
    def has_yardstick(self) -> bool:
        """Whether every process took one."""
        return bool(self.values) and self.yardsticks.keys() == self.values.keys()

    @property
    def mean(self) -> float:
        """The geometric mean over processes, in `unit`."""
        return math.exp(math.fsum(self.values.values()) / len(self.values))


def figures_of(
    rows: Sequence[Row], *, across: Collection[str] = (), leave_out: bool = False, among: Sequence[Row] | None = None
) -> dict[str, Figure]:
    """The figures by a key that is the same in every run of the same YAML, in the rows' order.

    across: "dtype" and "model", where named, tell arms apart and not places; with `leave_out`, nothing at all, for runs
    that have one each. among: the rows that titles tell arms apart in; `rows` itself by default.

    Raises:
        ExperimentError: two rows of one process are of the same thing.
    """
    swept = _swept(rows if among is None else among)
    found: dict[str, Figure] = {}
    for row in rows:
        if row.status != "ok":
            continue
        for name, (unit, better) in _FIGURES.get(type(row), {}).items():
            value = _value(row, name)
            if value is None or not 0 < value < math.inf:
                continue
            place, arm, title = _labels(row, across, leave_out, swept)
            figure = found.setdefault(_key(place, arm, name), Figure(name, unit, better, place, arm, title))
            if row.replicate in figure.values:
                what = f"{name} of {arm}, {place}"
                raise ExperimentError([f"process {row.replicate} has two rows of {what}: they cannot be told apart"])
            figure.values[row.replicate] = math.log(value)
            if row.yardstick_us is not None and row.yardstick_us > 0:
                sign = -1 if better == "higher" else 1
                figure.yardsticks[row.replicate] = sign * math.log(row.yardstick_us)
    return found


def figure_key(row: Row, name: str) -> str:
    """The key of a row's figure among those of its run, where nothing is across."""
    place, arm, _ = _labels(row, (), False, ())
    return _key(place, arm, name)


def _key(place: str, arm: str, name: str) -> str:
    return f"{place} | {arm} | {name}"


def _value(row: Row, name: str) -> float | None:
    """A row's figure; "ttft_s.p50" is a key of a column."""
    column, _, key = name.partition(".")
    value = getattr(row, column)
    return value.get(key) if key and value is not None else value


def _swept(rows: Iterable[Row]) -> set[tuple[str, str]]:
    """(stage, op) of which rows have several variants."""
    labels: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        for op, label in row.arm.items():
            labels.setdefault((row.stage, op), set()).add(label)
    return {key for key, values in labels.items() if len(values) > 1}


def _labels(
    row: Row, across: Collection[str], leave_out: bool, swept: Collection[tuple[str, str]]
) -> tuple[str, str, str]:
    """Place, arm and title."""
    settings = {key: value for key, value in row.settings.items() if not (leave_out and key in across)}
    alike = [key for key in _ALIKE if key not in across]
    shared = {key: value for key, value in settings.items() if key in alike or key.startswith("workload.")}
    own = {key: value for key, value in settings.items() if key not in shared}
    dtype = None if "dtype" in across or "dtype" in shared else row.dtype
    if isinstance(row, KernelRow):
        place = _words(row.op, row.point, dtype, **shared)
        return place, (arm := _words(row.variant, **own)), arm
    if isinstance(row, QuantizationRow):
        codes = f"{row.method}, {row.bits} bits, group {row.group_size}" if row.bits else row.method
        return _words("quantization", dtype, **shared), (arm := _words(codes, **own)), arm
    place = _words("engine", getattr(row, "workload", None), dtype, **shared)
    if isinstance(row, PeerRow):
        return place, (arm := _words(f"peer {row.peer}", **own)), arm
    named = sorted(row.arm.items())
    arm = _words(*(f"{op}={label}" for op, label in named), **own)
    title = _words(*(label for op, label in named if (row.stage, op) in swept), **own)
    return place, arm, title or "the only arm"


def _words(*parts: object, **settings: object) -> str:
    """The parts that there are, and "key=value" of each setting."""
    told = [str(part) for part in parts if part not in (None, "")]
    keyed = [f"{key}={json.dumps(value) if isinstance(value, dict) else value}" for key, value in settings.items()]
    return ", ".join([*told, *sorted(keyed)])
