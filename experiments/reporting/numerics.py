"""How right the variants are and how equal the arms, for people: tables of checks and of parity."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.reporting.arms import arm_key, swept_columns, swept_names
from experiments.reporting.table_style import (
    Cell,
    Column,
    PlainTable,
    build_table,
    format_number,
    group_by,
    number_column,
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

    def worst(name: str, show: Callable[[Row], str]) -> Callable[[Sequence[Row]], str]:
        """`show` of the row whose column `name` is the largest."""

        def cell(rows: Sequence[Row]) -> str:
            judged = [row for row in rows if getattr(row, name) is not None]
            return show(max(judged, key=lambda row: float(getattr(row, name)))) if judged else "-"

        return cell

    show: dict[Column, Callable[[Any], str | Cell]] = {
        Column("op"): lambda rows: str(rows[0].op),
        Column("variant"): lambda rows: str(rows[0].variant),
        Column("dtype"): lambda rows: rows[0].dtype,
        Column("result"): lambda rows: status_cell(min((row.status for row in rows), key=_WORST_FIRST.index)),
        number_column("points right"): lambda rows: f"{sum(row.status == 'ok' for row in rows)} of {len(rows)}",
        number_column("worst error"): worst("max_error_ratio", lambda row: f"{row.max_error_ratio:.2f}"),
        number_column("worst RMS"): worst("rms_error_ratio", lambda row: f"{row.rms_error_ratio:.2f}"),
        Column("at"): worst("max_error_ratio", lambda row: str(row.point)),
    }
    caption = (
        "Every variant once at every point, against the op's definition in float64. Errors are over what the error "
        "rule allows, at most 1.00: for the largest error that is 2 times torch's own at the same dtype and 2 eps of "
        "the largest value; for the RMS error 1.25 times torch's and eps/4. Small outputs have no RMS rule."
    )
    variants = group_by(checks, lambda row: (row.op, row.variant, row.dtype))
    return build_table("Checks", show, variants.values(), caption)


def parity_table(parities: Sequence[Row], engines: Sequence[Row]) -> PlainTable:
    """A line for each arm after the first of its place: the same tokens, where not, and how far log-probabilities
    drift. engines: the arms, which know how many requests there were.
    """
    requests = {arm_key(row): row.requests for row in engines}
    names = swept_names(engines)
    show: dict[Column, Callable[[Row], str | Cell]] = {
        **swept_columns(parities, names),
        Column("same tokens"): lambda row: same_tokens_cell(row, requests.get(arm_key(row), row.requests)),
        Column("first difference"): lambda row: _divergence(row.first_divergence),
        number_column("drift, nats"): lambda row: format_number(row.logprob_drift, ".1e"),
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


def _divergence(divergence: Mapping[str, float | int | None] | None) -> str:
    if divergence is None:
        return "-"
    margin = divergence.get("margin")
    sure = f", by a margin of {margin:.2g} nats" if margin is not None else ""
    return f"request {divergence['request']}, token {divergence['place']}{sure}"
