"""Arms: what tells them apart, and their rows from several processes as one: the median, and how far they lie apart."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from experiments.reporting.table_style import Column, format_value, group_by, setting_name
from experiments.runs.rows import Row, Stage
from experiments.runs.table import label_of, spread, swept_ops

_REPEATED = ("kernels", "engine", "peers", "http", "parity")


def swept_names(engines: Sequence[Row]) -> list[str]:
    """What differs between arms: ops, then settings."""
    ops = [op for _, op in swept_ops(engines)]
    return [*ops, *dict.fromkeys(key for row in engines for key in row.settings)]


def title_of(row: Row, names: Sequence[str]) -> str:
    """What tells a row from the others: the values of its arm under the swept `names`, or a peer's name."""
    if row.stage == "peers":
        return str(row.peer).replace("_", " ")
    ops = [str(row.url)] if row.stage == "http" else [row.arm[key] for key in names if key in row.arm]
    settings = [f"{setting_name(key)} {format_value(value)}" for key, value in row.settings.items()]
    return ", ".join([*ops, *settings]) or "this engine"


def swept_columns(rows: Sequence[Row], names: Sequence[str]) -> dict[Column, Callable[[Row], str]]:
    """A column for each of the swept `names`, and the workload's where there are several."""
    show: dict[Column, Callable[[Row], str]] = {}
    if len({row.workload for row in rows}) > 1:
        show[Column("workload")] = lambda row: str(row.workload)
    for name in names:
        show[Column(setting_name(name))] = lambda row, name=name: format_value(  # type: ignore[misc]
            {**row.arm, **row.settings}.get(name, "-")
        )
    return show


def select_stages(rows: Iterable[Row], *stages: Stage) -> list[Row]:
    return [row for row in rows if row.stage in stages]


def select_timed(rows: Iterable[Row]) -> list[Row]:
    """The rows that have a time; an arm that brought forth no token has none."""
    return [row for row in rows if row.median_us or row.tokens_per_s]


def arm_key(row: Row) -> tuple[str, str]:
    """An arm at its place; the rows that compare it have another stage and the same key."""
    label = label_of(row)
    return label.place, label.arm


def merge_processes(rows: Sequence[Row]) -> list[Row]:
    """One row for each thing that was measured, in the order of their first rows.

    A figure is the median over the processes, its spread the distance between their quartiles; rows of a single process
    stay as they are, with the spread of its own samples. Of a thing that went wrong in some process, that row is left.
    """
    # Of what is not repeated, such as a check, every row stands for itself.
    groups = group_by(rows, lambda row: (row.stage, arm_key(row)) if row.stage in _REPEATED else id(row))
    return [_merge(group) if len(group) > 1 else group[0] for group in groups.values()]


def count_processes(rows: Sequence[Row]) -> int:
    """The most processes that any thing was timed in."""
    return 1 + max((row.replicate for row in rows), default=0)


def _merge(group: Sequence[Row]) -> Row:
    if bad := next((row for row in group if row.status != "ok"), None):
        return bad
    if group[0].stage == "parity":
        return max(group, key=_difference)
    timed = select_timed(group)
    found = {name: of(values) for name, of in _OVER_PROCESSES.items() if (values := _values(group, name))}
    return (timed or group)[0].model_copy(update=found | (_spread_between(timed) if len(timed) > 1 else {}))


def _difference(parity: Row) -> tuple[int, float]:
    """The larger, the more it differs."""
    return -(parity.requests_equal or 0), parity.logprob_drift or 0.0


def _values(group: Sequence[Row], column: str) -> list[Any]:
    return [value for row in group if (value := getattr(row, column)) is not None]


def _median(values: Sequence[Any]) -> Any:
    """Key by key where they are mappings."""
    if isinstance(values[0], Mapping):
        return {key: statistics.median(one[key] for one in values) for key in values[0]}
    return statistics.median(values)


def _spread_between(timed: Sequence[Row]) -> dict[str, Any]:
    """A process is one value: samples of several, taken together, would have another spread than the figure says."""
    if timed[0].stage == "kernels":
        medians = [row.median_us or 0.0 for row in timed]
        return {"iqr_us": spread(medians), "samples_us": medians}
    rates = [row.tokens_per_s or 0.0 for row in timed]
    return {"tokens_per_s_iqr": spread(rates), "seconds": [(timed[0].output_tokens or 0) / rate for rate in rates]}


_OVER_PROCESSES: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    **dict.fromkeys(
        ("median_us", "roofline_fraction", "tokens_per_s", "ttft_s", "tpot_s", "gap_s", "goodput", "slo_met"), _median
    ),
    **dict.fromkeys(("max_us", "host_peak_bytes", "device_peak_bytes", "requests_failed"), max),
    "min_us": min,
    "requests_error": lambda errors: errors[0],
}
"""What a column of several processes comes to; any other is the first one's."""
