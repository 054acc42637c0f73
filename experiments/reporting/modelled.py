"""What a model says of kernels on a GPU that is not there, in tables of its own: no measured figure stands in them."""

from collections.abc import Sequence

from experiments.reporting.arms import swept_columns
from experiments.reporting.table_style import (
    Column,
    PlainTable,
    build_table,
    format_microseconds,
    group_by,
    name_runs,
    number_column,
    plain_place,
)
from experiments.runs.rows import Row
from experiments.runs.table import distinct_parts, place_of

_STEP = "decode"
"""How the points of decode steps are called: what an arm's kernels are added up for."""


_TELLING = 1.1
"""Times that lie closer together the model does not tell apart."""


def modelled_winners(rows: Sequence[Row]) -> list[str]:
    """Of each op's `shapes`, which variant a model finds the fastest where.

    What runs other variants' code is none of them, and a time of code that was compiled for other constants is none.

    Args:
        rows: Of the foretold stage.
    """
    asked = [row for row in rows if row.predicted_us and not row.serves]
    return [text for mine in group_by(asked, lambda row: str(row.op)).values() if (text := _winners_of_op(mine))]


def _winners_of_op(rows: Sequence[Row]) -> str:
    own = _own_times(rows)
    times = {
        place: mine
        for place in dict.fromkeys(map(place_of, rows))
        if len(mine := {variant: some[place] for variant, some in own.items() if place in some}) > 1
    }
    names = list(map(plain_place, distinct_parts(times).values()))
    wins: dict[str, list[int]] = {}
    close = []
    for index, mine in enumerate(times.values()):
        best, second = sorted(mine, key=lambda variant: mine[variant])[:2]
        wins.setdefault(best, []).append(index)
        close += [index] if mine[second] < _TELLING * mine[best] else []
    which = "; ".join(f"{variant} at {', '.join(name_runs(won, names))}" for variant, won in wins.items())
    text = f"modelled on {rows[0].gpu}, not measured: for {rows[0].op} the fastest is {which}"
    ahead = f" (by less than a tenth, which the model does not tell, at {', '.join(name_runs(close, names))})"
    return (text + ahead * bool(close)) * bool(wins)


def _own_times(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Variant -> place -> its modelled time, of those whose every time is not another's too."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        mine = times.setdefault(str(row.variant), {})
        if row.predicted_us and not row.predicted_from:
            mine[place_of(row)] = row.predicted_us
    for variant in reversed([*times]):
        others = [other for name, other in times.items() if name != variant]
        if all(any(other.get(place) == us for other in others) for place, us in times[variant].items()):
            del times[variant]
    return times


def modelled_kernels_table(rows: Sequence[Row]) -> PlainTable:
    """A line for each variant at each point. rows: of the foretold stage."""
    show = {
        Column("variant", whole=True): lambda row: str(row.variant),
        Column("shape"): lambda row: str(row.point),
        number_column("modelled us"): lambda row: format_modelled(row.predicted_us),
        number_column("at least us"): lambda row: format_modelled(row.predicted_limit_us),
        Column("bound by"): lambda row: row.predicted_bound or "-",
    }
    caption = (
        "By a model, from what each kernel compiles to: no figure here was measured. Shapes are of full sizes, where "
        "the experiment has them, configs the variants' defaults where it pins none: a tuned one may be faster. at "
        "least: what the data sheet's peaks allow; bound by: memory, the second-level cache, issue of instructions, "
        "special functions, matrix units, or the chain of what one program does."
    )
    if reasons := dict.fromkeys(
        f"{row.op}.{row.variant}: {row.predicted_reason}" for row in rows if row.predicted_reason
    ):
        missing = next(row for row in rows if row.predicted_reason)
        caption += (
            f" Not modelled: {'; '.join(reasons)}. What is missing is compiled, and kept, by: {_command(missing)}"
        )
    others = {f"{row.op}.{row.variant} ({_constants(row)})": None for row in rows if row.predicted_from}
    if others:
        caption += f" From the nearest code that there is: {', '.join(others)}."
    return build_table(_title("Kernels", rows), show, rows, caption, lambda row: str(row.op))


def modelled_arms_table(rows: Sequence[Row], engines: Sequence[Row], names: Sequence[str]) -> PlainTable | None:
    """A line for each arm that has a modelled kernel; None where none has.

    Args:
        rows: Of the foretold stage.
        engines: The arms.
        names: What differs between them.
    """
    of_arm = {id(arm): _kernels_of(arm, rows) for arm in engines}
    shown = [arm for arm in engines if of_arm[id(arm)]]
    if not shown:
        return None
    show = {
        **swept_columns(shown, names),
        number_column("modelled us"): lambda arm: format_modelled(
            sum(row.predicted_us or 0.0 for row in of_arm[id(arm)])
        ),
        Column("of"): lambda arm: ", ".join(f"{row.op} {format_modelled(row.predicted_us)}" for row in of_arm[id(arm)]),
    }
    caption = (
        "The arm's Triton kernels, a call of each at the sizes of a decode step: no figure here was measured, and "
        "torch's part of an arm is not modelled."
    )
    return build_table(_title("Arms", rows), show, shown, caption)


def _kernels_of(arm: Row, rows: Sequence[Row]) -> list[Row]:
    """The modelled kernels that an arm calls in a decode step, the first point of each op."""
    found: dict[str, Row] = {}
    for row in rows:
        serves = any(one.get("workload") == arm.workload for one in row.serves or ())
        is_its_own = arm.arm.get(str(row.op)) == row.variant and row.dtype == arm.dtype
        if is_its_own and serves and row.predicted_us is not None and str(row.point).startswith(_STEP):
            found.setdefault(str(row.op), row)
    return list(found.values())


def _command(row: Row) -> str:
    """What compiles a row's kernel for its call; of a variant from outside, with where it is."""
    axes = ",".join(f"{name}={value}" for name, value in (row.axes or {}).items())
    named = f"--op {row.op} --variant {str(row.variant).partition('[')[0]}"
    return f"tk inspect --predict {row.gpu} {named} --axes {axes} (and --variants-from)"


def _title(what: str, rows: Sequence[Row]) -> str:
    return f"{what}, modelled on {rows[0].gpu}"


def format_modelled(value: float | None) -> str:
    """Modelled microseconds for people: of a kernel at toy sizes they may be below 1."""
    return "-" if value is None else f"{value:.2g}" if value < 1 else format_microseconds(value)


def _constants(row: Row) -> str:
    return ", ".join(f"{name}={value}" for name, value in (row.predicted_from or {}).items())
