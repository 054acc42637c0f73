"""What pictures draw: one figure of everything that has it, with what each point was measured at."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.reporting.arms import select_stages, select_timed, swept_names, title_of
from experiments.reporting.table_style import group_by
from experiments.runs.rows import Row
from experiments.runs.table import quartiles

Factor = str | int | float | bool

_SERVED = {
    "tokens_per_s": ("throughput", "Output tokens per second", "tokens/s"),
    "ttft_s": ("waiting-ttft", "Time to first token", "time to first token, ms"),
    "tpot_s": ("waiting-tpot", "Time per output token", "time per output token, ms"),
    "gap_s": ("waiting-gap", "Gap between two tokens", "gap between two tokens, ms"),
}
"""Column -> its picture's name and title, and its unit."""


@dataclass(frozen=True)
class Measured:
    """One figure of one thing.

    group, name: what it is called among dots. factors: what it was measured at: variant, pins, sizes, options; a peer
    has none. values: the median alone, or p50, p90 and p99. low, high: the median's quartiles, or p50 and p90. samples:
    what the quartiles are of, where it is shown.
    """

    group: str
    name: str
    factors: Mapping[str, Factor]
    values: tuple[float, ...]
    low: float
    high: float
    samples: tuple[float, ...] = ()


@dataclass(frozen=True)
class Plot:
    """One figure of several points, to be drawn over the numbers that vary, and as dots.

    about: device, timer and spread. curve, dots: name and title of the pictures of each kind; None where there is none.
    least: how many values of a size make a curve.
    """

    points: Sequence[Measured]
    unit: str
    about: str
    curve: tuple[str, str] | None
    dots: tuple[str, str] | None
    least: int = 2


def kernel_plots(rows: Sequence[Row], asked: Mapping[str, object], about: str) -> list[Plot]:
    """Of each op the times of its variants.

    Args:
        rows: Of the kernels stage, merged.
        asked: The experiment's `shapes`; sizes that a workload gives make a curve from three on.
        about: Device, timer and spread, for the captions.
    """
    plots = []
    for op, mine in group_by(select_timed(rows), lambda row: str(row.op)).items():
        points = list(map(_time_of_kernel, mine))
        several = len({point.name for point in points}) > 1
        dots = (f"variants-{op}", f"Variants of {op}") if several else None
        plots.append(Plot(points, "time, µs", about, (f"time-{op}", op), dots, 2 if op in asked else 3))
    return plots


def _time_of_kernel(row: Row) -> Measured:
    factors = label_factors(str(row.op), str(row.variant), several_ops=False)
    factors |= {"dtype": row.dtype, **_scalars(row.settings), **_sizes(row.axes or {})}
    median = row.median_us or 0.0
    low, high = _quartiles(row.samples_us or (), median, row.iqr_us)
    return Measured(str(row.point), str(row.variant), factors, (median,), low, high)


def engine_plots(rows: Sequence[Row], about: str, waits: str) -> list[Plot]:
    """Of arms, peers and servers the tokens per second, and what users wait for; `waits` is what is said of the latter.

    Args:
        rows: Of the engine, peers and http stages, merged.
    """
    engines = select_stages(rows, "engine")
    names = swept_names(engines)
    ops = [name for name in names if any(name in row.arm for row in engines)]
    plots = []
    for column, (name, title, unit) in _SERVED.items():
        points = [
            Measured(str(row.workload), title_of(row, names), _factors_of_arm(row, ops), *figures)
            for row in select_timed(rows)
            if (figures := _rates(row) if column == "tokens_per_s" else _waits(getattr(row, column)))
        ]
        curve = None if column == "gap_s" else (f"engine-{column.replace('_', '-')}", title)
        plots.append(Plot(points, unit, about if column == "tokens_per_s" else waits, curve, (name, title)))
    return plots


def _factors_of_arm(row: Row, ops: Sequence[str]) -> dict[str, Factor]:
    if row.stage == "peers":
        return {}
    factors: dict[str, Factor] = {"workload": str(row.workload), **_scalars(row.settings), "dtype": row.dtype}
    for op in ops:
        if op in row.arm:
            factors |= label_factors(op, row.arm[op], several_ops=len(ops) > 1)
    return factors


def _rates(row: Row) -> tuple[tuple[float, ...], float, float, tuple[float, ...]]:
    """The median of tokens per second, its quartiles, and what these are of."""
    rates = tuple((row.output_tokens or 0) / second for second in row.seconds or ())
    median = row.tokens_per_s or 0.0
    return (median,), *_quartiles(rates, median, row.tokens_per_s_iqr), rates


def _waits(seconds: Mapping[str, float] | None) -> tuple[tuple[float, ...], float, float, tuple[float, ...]] | None:
    """The percentiles in milliseconds, and the ends of a curve's bars."""
    if not seconds:
        return None
    p50, p90, p99 = (seconds[key] * 1e3 for key in ("p50", "p90", "p99"))
    return (p50, p90, p99), p50, p90, ()


def _quartiles(values: Sequence[float], median: float, iqr: float | None) -> tuple[float, float]:
    """Of the values; where they are not there, half the spread to either side."""
    if len(values) > 1:
        return quartiles(values)
    return median - (iqr or 0) / 2, median + (iqr or 0) / 2


def label_factors(op: str, label: str, several_ops: bool) -> dict[str, Factor]:
    """ "split_kv[num_splits=4]" -> {"variant": "split_kv", "num_splits": 4}; of several ops, named after its op."""
    key, prefix = (op, f"{op}.") if several_ops else ("variant", "")
    variant, _, pins = label.removesuffix("]").partition("[")
    factors: dict[str, Factor] = {key: variant}
    for pin in pins.split(","):
        name, equals, value = pin.partition("=")
        if equals:
            factors[f"{prefix}{name}"] = int(value) if re.fullmatch(r"-?\d+", value) else value
    return factors


def _sizes(axes: Mapping[str, object]) -> dict[str, Factor]:
    """An op's axes; of paged ops the context, in tokens, for the pages that hold it."""
    sizes = {name: value for name, value in _scalars(axes).items() if name != "activation"}
    pages, page = sizes.get("N"), sizes.get("S")
    if isinstance(pages, int) and isinstance(page, int) and "B" in sizes:
        sizes["context"] = pages * page
        del sizes["N"]
    if "P" in sizes:  # last: a pool's pages mostly follow from what lies in them
        sizes["P"] = sizes.pop("P")
    return sizes


def _scalars(values: Mapping[str, object]) -> dict[str, Factor]:
    return {name: value for name, value in values.items() if isinstance(value, str | int | float | bool)}
