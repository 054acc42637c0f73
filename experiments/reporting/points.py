"""What was measured, as points of a sweep: what each point's numbers are, and what it was measured at."""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from experiments.reporting.arms import swept_names
from experiments.runs.rows import Row

Factor = str | int | float | bool
_LABEL = re.compile(r"(?P<variant>[^\[]*)(\[(?P<pins>.*)\])?")


@dataclass(frozen=True)
class Measured:
    """One median with its quartiles, and the factors that it was measured at: variant, pins, sizes, options."""

    factors: Mapping[str, Factor]
    median: float
    low: float
    high: float


def quartiles(values: Sequence[float], median: float, iqr: float | None) -> tuple[float, float]:
    """The first and third quartile; where the values are not there, half the spread to either side."""
    if len(values) > 1:
        first, _, third = statistics.quantiles(values, n=4, method="inclusive")
        return first, third
    return median - (iqr or 0) / 2, median + (iqr or 0) / 2


def label_factors(op: str, label: str, several_ops: bool) -> dict[str, Factor]:
    """ "split_kv[num_splits=4]" -> {"variant": "split_kv", "num_splits": 4}; of several ops, named after its op."""
    match = _LABEL.fullmatch(label)
    assert match is not None
    prefix = f"{op}." if several_ops else ""
    factors: dict[str, Factor] = {f"{prefix}variant" if not several_ops else op: match["variant"]}
    for pin in (match["pins"] or "").split(","):
        name, equals, value = pin.partition("=")
        if equals:
            factors[f"{prefix}{name}"] = int(value) if re.fullmatch(r"-?\d+", value) else value
    return factors


def kernel_points(rows: Iterable[Row]) -> dict[str, list[Measured]]:
    """op -> its times in microseconds."""
    points: dict[str, list[Measured]] = {}
    for row in rows:
        if row.status != "ok" or row.median_us is None:
            continue
        low, high = quartiles(row.samples_us or (), row.median_us, row.iqr_us)
        factors: dict[str, Factor] = label_factors(str(row.op), str(row.variant), several_ops=False)
        factors |= {"dtype": row.dtype, **_plain(row.settings), **_sizes(row.axes or {})}
        points.setdefault(str(row.op), []).append(Measured(factors, row.median_us, low, high))
    return points


def _sizes(axes: Mapping[str, object]) -> dict[str, Factor]:
    """An op's axes; of paged ops the context, in tokens, for the pages that hold it."""
    sizes = {name: value for name, value in _plain(axes).items() if name != "activation"}
    pages, page = sizes.get("N"), sizes.get("S")
    if isinstance(pages, int) and isinstance(page, int) and "B" in sizes:
        sizes["context"] = pages * page
        del sizes["N"]
    if "P" in sizes:  # last: a pool's pages mostly follow from what lies in them
        sizes["P"] = sizes.pop("P")
    return sizes


def _plain(values: Mapping[str, object]) -> dict[str, Factor]:
    return {name: value for name, value in values.items() if isinstance(value, str | int | float | bool)}


METRICS: Mapping[str, str] = {
    "tokens_per_s": "output tokens per second",
    "ttft_s": "time to first token, ms",
    "tpot_s": "time per output token, ms",
}


def engine_points(rows: Sequence[Row], metric: str) -> list[Measured]:
    """An engine figure of every arm and workload. Of waiting times the median is p50, and what is shown to p90."""
    names = swept_names(rows)
    ops = [name for name in names if any(name in row.arm for row in rows)]
    points = []
    for row in rows:
        if row.status != "ok" or row.tokens_per_s is None:
            continue
        factors: dict[str, Factor] = {"workload": str(row.workload), **_plain(row.settings), "dtype": row.dtype}
        for op in ops:
            if op in row.arm:
                factors |= label_factors(op, row.arm[op], several_ops=len(ops) > 1)
        if metric == "tokens_per_s":
            rates = [(row.output_tokens or 0) / second for second in row.seconds or ()]
            low, high = quartiles(rates, row.tokens_per_s, row.tokens_per_s_iqr)
            points.append(Measured(factors, row.tokens_per_s, low, high))
        elif waits := getattr(row, metric):
            points.append(Measured(factors, waits["p50"] * 1e3, waits["p50"] * 1e3, waits["p90"] * 1e3))
    return points


def varying(points: Sequence[Measured]) -> dict[str, list[Factor]]:
    """The factors that differ among points, with their values in order of appearance; a factor that follows from those
    before it (the pages of a pool from its batch and context) is none of its own.
    """
    kept: dict[str, list[Factor]] = {}
    names = dict.fromkeys(name for point in points for name in point.factors)
    for name in names:
        values = list(dict.fromkeys(point.factors[name] for point in points if name in point.factors))
        if len(values) < 2:
            continue
        seen: dict[tuple[object, ...], object] = {}
        follows = bool(kept)
        for point in points:
            before = tuple(point.factors.get(other) for other in kept)
            if name in point.factors and seen.setdefault(before, point.factors[name]) != point.factors[name]:
                follows = False
                break
        if not follows:
            kept[name] = values
    return kept


def numeric(values: Sequence[Factor]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
