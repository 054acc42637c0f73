"""What is right, and what says the same: the checks of every variant, and the arms beside the first one."""

from collections.abc import Mapping, Sequence

from experiments.reporting.replicates import arm_key
from experiments.reporting.table_style import Column, Line, PlainTable, cells, plain, status_cell, told
from experiments.reporting.tables import same_cell
from experiments.runs.rows import Row
from experiments.runs.table import question_of

_WORST_FIRST = ("wrong", "failed", "ok", "unsupported")


def check_table(checks: Sequence[Row]) -> PlainTable:
    """A line for each variant and dtype: at how many points it was checked, and its largest error over the allowed."""
    columns = (
        Column("op"), Column("variant"), Column("dtype"), Column("result"), Column("points right", right=True),
        Column("worst error", right=True), Column("worst RMS", right=True), Column("at"),
    )  # fmt: skip
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in checks:
        groups.setdefault((str(row.op), str(row.variant), row.dtype), []).append(row)
    lines: list[Line] = []
    for (op, variant, dtype), mine in groups.items():
        status = min((row.status for row in mine), key=_WORST_FIRST.index)
        right = f"{sum(row.status == 'ok' for row in mine)} of {len(mine)}"
        judged = [row for row in mine if row.max_error_ratio is not None]
        worst = max(judged, key=lambda row: row.max_error_ratio or 0.0, default=None)
        rms = max((row.rms_error_ratio for row in judged if row.rms_error_ratio is not None), default=None)
        error = f"{worst.max_error_ratio:.2f}" if worst is not None else "-"
        place = str(worst.point) if worst is not None else "-"
        rms_text = f"{rms:.2f}" if rms is not None else "-"
        lines.append(cells(op, variant, dtype, status_cell(status), right, error, rms_text, place))
    caption = (
        "Every variant once at every point, against the op's definition in float64. Errors are over what the error "
        "rule allows, at most 1.00: for the largest error that is 2 times torch's own at the same dtype and 2 eps of "
        "the largest value; for the RMS error 1.25 times torch's and eps/4. Small outputs have no RMS rule."
    )
    return PlainTable("Checks", columns, tuple(lines), caption)


def parity_table(parities: Sequence[Row], engines: Sequence[Row]) -> PlainTable:
    """A line for each arm after the first of its place: the same tokens, where not, and how far log-probabilities
    drift. engines: the arms, which know how many requests there were.
    """
    requests = {arm_key(row): row.requests for row in engines}
    several = len({row.workload for row in parities}) > 1
    names = _swept(parities)
    columns = [*([Column("workload")] if several else []), *(Column(plain(name)) for name in names)]
    columns.append(Column("same tokens"))
    columns += [Column("first difference"), Column("drift, nats", right=True)]
    lines: list[Line] = []
    for row in parities:
        known = {**row.arm, **row.settings}
        line = cells(*([str(row.workload)] if several else []), *(told(known.get(name, "-")) for name in names))
        equal = same_cell(row, requests.get(arm_key(row), row.requests))
        drift = f"{row.logprob_drift:.1e}" if row.logprob_drift is not None else "-"
        lines.append((*line, *cells(equal, _place(row.first_divergence), drift)))
    firsts = {
        ", ".join(f"{op} {label}" for op, label in (row.first_arm or {}).items() if op in names) for row in parities
    }
    several_places = len(set(map(question_of, parities))) > 1
    against = "the first arm" + (" of the same model, workload and sizes" if several_places else "")
    against += f" ({first})" if len(firsts) == 1 and (first := firsts.pop()) else ""
    caption = (
        f"Beside {against}. Drift: the largest difference of any log-probability that both arms report, up to the "
        "first token that differs."
    )
    return PlainTable("Parity", tuple(columns), tuple(lines), caption)


def _swept(parities: Sequence[Row]) -> list[str]:
    arms = [{**row.arm, **row.settings} for row in parities] + [row.first_arm or {} for row in parities[:1]]
    names = dict.fromkeys(name for arm in arms for name in arm)
    settings = {name for row in parities for name in row.settings}
    return [name for name in names if name in settings or len({arm[name] for arm in arms if name in arm}) > 1]


def _place(divergence: Mapping[str, float | int | None] | None) -> str:
    if divergence is None:
        return "-"
    margin = divergence.get("margin")
    sure = f", by a margin of {margin:.2g} nats" if margin is not None else ""
    return f"request {divergence['request']}, token {divergence['place']}{sure}"
