"""What is right, and what says the same: the checks of every variant, and the arms beside the first one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.reporting.arms import arm_key
from experiments.reporting.table_style import (
    Cell,
    Column,
    PlainTable,
    build_table,
    figure,
    format_value,
    setting_name,
    status_cell,
)
from experiments.runs.rows import Row
from experiments.runs.table import question_of

_WORST_FIRST = ("wrong", "failed", "ok", "unsupported")


def same_tokens_cell(row: Row, asked: int | None) -> Cell:
    """Whether the tokens are the same, of `asked` requests; those that failed on either side are not compared."""
    equal, of = row.requests_equal, row.requests
    if equal == of == asked:
        return Cell("yes", "yes")
    return Cell(f"{equal} of {of} {'requests' if of == asked else 'both served'}", "partly")


def check_table(checks: Sequence[Row]) -> PlainTable:
    """A line for each variant and dtype: at how many points it was checked, and its largest error over the allowed."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in checks:
        groups.setdefault((str(row.op), str(row.variant), row.dtype), []).append(row)

    def worst(rows: Sequence[Row], name: str, show: Callable[[Any], str]) -> str:
        judged = [row for row in rows if getattr(row, name) is not None]
        return show(max(judged, key=lambda row: float(getattr(row, name)))) if judged else "-"

    show: dict[Column, Callable[[Sequence[Row]], str | Cell]] = {
        Column("op"): lambda rows: str(rows[0].op),
        Column("variant"): lambda rows: str(rows[0].variant),
        Column("dtype"): lambda rows: rows[0].dtype,
        Column("result"): lambda rows: status_cell(min((row.status for row in rows), key=_WORST_FIRST.index)),
        figure("points right"): lambda rows: f"{sum(row.status == 'ok' for row in rows)} of {len(rows)}",
        figure("worst error"): lambda rows: worst(rows, "max_error_ratio", lambda row: f"{row.max_error_ratio:.2f}"),
        figure("worst RMS"): lambda rows: worst(rows, "rms_error_ratio", lambda row: f"{row.rms_error_ratio:.2f}"),
        Column("at"): lambda rows: worst(rows, "max_error_ratio", lambda row: str(row.point)),
    }
    caption = (
        "Every variant once at every point, against the op's definition in float64. Errors are over what the error "
        "rule allows, at most 1.00: for the largest error that is 2 times torch's own at the same dtype and 2 eps of "
        "the largest value; for the RMS error 1.25 times torch's and eps/4. Small outputs have no RMS rule."
    )
    return build_table("Checks", show, groups.values(), caption)


def parity_table(parities: Sequence[Row], engines: Sequence[Row]) -> PlainTable:
    """A line for each arm after the first of its place: the same tokens, where not, and how far log-probabilities
    drift. engines: the arms, which know how many requests there were.
    """
    requests = {arm_key(row): row.requests for row in engines}
    names = _swept_names(parities)
    show: dict[Column, Callable[[Row], str | Cell]] = {}
    if len({row.workload for row in parities}) > 1:
        show[Column("workload")] = lambda row: str(row.workload)
    for name in names:
        show[Column(setting_name(name))] = lambda row, name=name: format_value(  # type: ignore[misc]
            {**row.arm, **row.settings}.get(name, "-")
        )
    show |= {
        Column("same tokens"): lambda row: same_tokens_cell(row, requests.get(arm_key(row), row.requests)),
        Column("first difference"): lambda row: _divergence(row.first_divergence),
        figure("drift, nats"): lambda row: f"{row.logprob_drift:.1e}" if row.logprob_drift is not None else "-",
    }
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
    return build_table("Parity", show, parities, caption)


def _swept_names(parities: Sequence[Row]) -> list[str]:
    arms = [{**row.arm, **row.settings} for row in parities] + [row.first_arm or {} for row in parities[:1]]
    names = dict.fromkeys(name for arm in arms for name in arm)
    settings = {name for row in parities for name in row.settings}
    return [name for name in names if name in settings or len({arm[name] for arm in arms if name in arm}) > 1]


def _divergence(divergence: Mapping[str, float | int | None] | None) -> str:
    if divergence is None:
        return "-"
    margin = divergence.get("margin")
    sure = f", by a margin of {margin:.2g} nats" if margin is not None else ""
    return f"request {divergence['request']}, token {divergence['place']}{sure}"
