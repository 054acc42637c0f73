"""Rows of the same thing from several processes, as one row: the median over them, and how far they lie apart."""

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.runs.rows import EngineRow, KernelRow, ParityRow, PeerRow, Row
from experiments.stages.serving import spread

_IDENTITY = ("stage", "op", "variant", "arm", "settings", "dtype", "point", "workload", "peer", "peer_settings")


def identity(row: Row) -> str:
    """What a row is about, whichever process wrote it."""
    about = [getattr(row, name, None) for name in _IDENTITY]
    return json.dumps(about, sort_keys=True, default=str)


def arm_key(row: Row) -> str:
    """An arm at a workload; the rows that compare it have another stage and the same key."""
    return identity(row.model_copy(update={"stage": ""}))


def merged(rows: Sequence[Row]) -> list[Row]:
    """One row for each thing that was measured, in the order of their first rows.

    A figure is the median over the processes, its spread the distance between their quartiles; rows of a single process
    stay as they are, with the spread of its own samples. Of a thing that went wrong in some process, that row is left.
    """
    groups: dict[object, list[Row]] = {}
    for row in rows:
        # Of what is not repeated, such as a check, every row stands for itself.
        repeated = isinstance(row, KernelRow | EngineRow | PeerRow | ParityRow)
        groups.setdefault(identity(row) if repeated else id(row), []).append(row)
    return [_one(group) for group in groups.values()]


def processes(rows: Sequence[Row]) -> int:
    """The most processes that any thing was timed in."""
    return 1 + max((row.replicate for row in rows), default=0)


def _one(group: Sequence[Row]) -> Row:
    first = group[0]
    if len(group) == 1:
        return first
    if bad := next((row for row in group if row.status != "ok"), None):
        return bad
    if isinstance(first, KernelRow):
        return first.model_copy(update=_kernel(group))
    if isinstance(first, EngineRow | PeerRow):
        return first.model_copy(update=_served(group))
    if isinstance(first, ParityRow):
        return _worst([row for row in group if isinstance(row, ParityRow)])
    return first


def _kernel(group: Sequence[Any]) -> dict[str, Any]:
    timed = [row for row in group if row.median_us is not None]
    if not timed:
        return {}
    shares = [row.roofline_fraction for row in timed if row.roofline_fraction is not None]
    return {
        "median_us": statistics.median(row.median_us for row in timed),
        "iqr_us": spread([row.median_us for row in timed]) if len(timed) > 1 else timed[0].iqr_us,
        "min_us": min(row.min_us for row in timed),
        "max_us": max(row.max_us for row in timed),
        "samples_us": [row.median_us for row in timed] if len(timed) > 1 else timed[0].samples_us,
        "speed_reason": None,
        "roofline_fraction": statistics.median(shares) if shares else None,
    }


def _served(group: Sequence[Any]) -> dict[str, Any]:
    timed = [row for row in group if row.tokens_per_s is not None]
    worst = max(group, key=lambda row: row.requests_failed or 0)
    failed = {"requests_failed": worst.requests_failed, "requests_error": worst.requests_error}
    if len(timed) < 2:
        return failed
    tokens = timed[0].output_tokens or 0
    figures: dict[str, Any] = {
        **failed,
        "tokens_per_s": statistics.median(row.tokens_per_s for row in timed),
        "tokens_per_s_iqr": spread([row.tokens_per_s for row in timed]),
        # A process is one value: rounds of several, taken together, would have another spread than the figure says.
        "seconds": [tokens / row.tokens_per_s for row in timed],
    }
    for name in ("ttft_s", "tpot_s", "gap_s"):
        figures[name] = _quantiles([getattr(row, name) for row in timed if getattr(row, name)])
    return figures


def _quantiles(several: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    if not several:
        return None
    return {key: statistics.median(one[key] for one in several) for key in several[0]}


def _worst(group: Sequence[ParityRow]) -> ParityRow:
    """The row that differs most."""
    return max(group, key=lambda row: (-(row.requests_equal or 0), row.logprob_drift or 0.0))
