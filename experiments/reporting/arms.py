"""Arms: what tells them apart, and their rows from several processes as one: the median, and how far they lie apart."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.reporting.table_style import format_value, setting_name
from experiments.runs.rows import COLUMNS, Row
from experiments.runs.table import label_of, spread, swept_ops

_REPEATED = ("kernels", "engine", "peers", "parity")


def swept_names(engines: Sequence[Row]) -> list[str]:
    """What differs between arms: ops, then settings."""
    ops = [op for _, op in swept_ops(engines)]
    return [*ops, *dict.fromkeys(key for row in engines for key in row.settings)]


def title_of(row: Row, names: Sequence[str]) -> str:
    """What tells a row from the others: the values of its arm under the swept `names`, or a peer's name."""
    if row.stage == "peers":
        return str(row.peer).replace("_", " ")
    ops = [row.arm[key] for key in names if key in row.arm]
    settings = [f"{setting_name(key)} {format_value(value)}" for key, value in row.settings.items()]
    return ", ".join([*ops, *settings]) or "this engine"


def arm_key(row: Row) -> tuple[str, str]:
    """An arm at its place; the rows that compare it have another stage and the same key."""
    label = label_of(row)
    return label.place, label.arm


def merged(rows: Sequence[Row]) -> list[Row]:
    """One row for each thing that was measured, in the order of their first rows.

    A figure is the median over the processes, its spread the distance between their quartiles; rows of a single process
    stay as they are, with the spread of its own samples. Of a thing that went wrong in some process, that row is left.
    """
    groups: dict[object, list[Row]] = {}
    for row in rows:
        # Of what is not repeated, such as a check, every row stands for itself.
        key = (row.stage, arm_key(row)) if row.stage in _REPEATED else id(row)
        groups.setdefault(key, []).append(row)
    return [_merge(group) if len(group) > 1 else group[0] for group in groups.values()]


def processes(rows: Sequence[Row]) -> int:
    """The most processes that any thing was timed in."""
    return 1 + max((row.replicate for row in rows), default=0)


def _merge(group: Sequence[Row]) -> Row:
    first = group[0]
    if bad := next((row for row in group if row.status != "ok"), None):
        return bad
    if first.stage == "parity":  # the one that differs most
        return max(group, key=lambda row: (-(row.requests_equal or 0), row.logprob_drift or 0.0))
    merge = _merged_times if first.stage == "kernels" else _merged_rates
    return first.model_copy(update={**_medians(group, ("host_peak_bytes", "device_peak_bytes"), max), **merge(group)})


def _medians(
    group: Sequence[Row], names: Sequence[str], of: Callable[[Sequence[Any]], Any] = statistics.median
) -> dict[str, Any]:
    """Of each column the median over the rows that have it, key by key where it is a mapping."""
    found: dict[str, Any] = {}
    for name in names:
        values = [value for row in group if (value := getattr(row, name)) is not None]
        if values and isinstance(values[0], Mapping):
            found[name] = {key: of([one[key] for one in values]) for key in values[0]}
        else:
            found[name] = of(values) if values else None
    return found


def _merged_times(group: Sequence[Row]) -> dict[str, Any]:
    timed = [row for row in group if row.median_us is not None]
    if len(timed) < 2:
        return {name: getattr(timed[0], name) for name in COLUMNS["kernels"]["ok"]} if timed else {}
    medians = [row.median_us for row in timed if row.median_us is not None]
    return {
        **_medians(timed, ("median_us", "roofline_fraction")),
        "iqr_us": spread(medians), "min_us": min(row.min_us or 0.0 for row in timed),
        "max_us": max(row.max_us or 0.0 for row in timed), "samples_us": medians, "speed_reason": None,
    }  # fmt: skip


def _merged_rates(group: Sequence[Row]) -> dict[str, Any]:
    worst = max(group, key=lambda row: row.requests_failed or 0)
    failed = {"requests_failed": worst.requests_failed, "requests_error": worst.requests_error}
    rates = [row.tokens_per_s for row in group if row.tokens_per_s is not None]
    if len(rates) < 2:
        return failed
    # A process is one value: rounds of several, taken together, would have another spread than the figure says.
    seconds = [(group[0].output_tokens or 0) / rate for rate in rates]
    medians = _medians(group, ("tokens_per_s", "ttft_s", "tpot_s", "gap_s"))
    return {**failed, **medians, "tokens_per_s_iqr": spread(rates), "seconds": seconds}
