"""What quantization costs and saves, for people: a table, and a plot."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from experiments.reporting.drawing import Series, draw_series, point_without_spread, set_log_ticks
from experiments.reporting.pictures import Picture
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

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def quantization_table(rows: Sequence[Row]) -> PlainTable:
    """A line for each model."""
    first = next((row for row in rows if row.status == "ok"), None)
    # A sweep has a dense model for each of its settings.
    dense = {str(row.settings): row.perplexity for row in rows if row.status == "ok" and row.bits is None}

    def judged(show: Callable[[Any], str]) -> Callable[[Row], str]:
        """`show` of a model that was judged."""
        return lambda row: show(row) if row.status == "ok" else "-"

    def cost(row: Row) -> str:
        """Perplexity over the dense model's, as "+0.18%"."""
        theirs = dense.get(str(row.settings))
        if theirs is None or row.perplexity is None or row.bits is None:
            return "-"
        return f"{row.perplexity / theirs - 1:+.2%}"

    show: dict[Column, Callable[[Row], str | Cell]] = {
        Column("model"): _title,
        number_column("perplexity"): lambda row: (
            format_number(row.perplexity, ".3f") if row.status == "ok" else status_cell(row.status)
        ),
        number_column("cost"): cost,
        number_column("KL"): lambda row: format_number(row.kl, ".4f"),
        number_column("top-1"): lambda row: format_number(row.top1_agreement, ".1%"),
        number_column("disk", wide=True): judged(lambda row: f"{row.disk_bytes / 1e6:,.2f}"),
        number_column("memory"): judged(lambda row: f"{row.memory_bytes / 1e6:,.2f}"),
        number_column("tokens/s", wide=True): judged(lambda row: format_number(row.tokens_per_s, ",.0f", "n/m")),
        number_column("x dense"): judged(lambda row: format_number(row.speedup, ".2f", "n/m")),
    }
    caption = "" if first is None else (
        f"Of {first.num_tokens:,} tokens, in windows of {first.window} that are each read alone. cost: perplexity over "
        "the dense model's; KL in nats, and top-1 agreement, with it. W8A8: inputs are quantized too. disk, memory: MB "
        "of all weights. x dense: tokens/s over its. n/m: not measured."
    )  # fmt: skip
    return build_table("Quantization", show, rows, caption)


def _title(row: Row) -> str:
    """ "gptq 4 bits g32"."""
    if row.bits is None:
        return str(row.method)
    return f"{row.method} {row.bits} bits" + ("" if row.group_size == -1 else f" g{row.group_size}")


def quantization_picture(rows: Sequence[Row], device: str) -> Picture | None:
    """Perplexity over the weights' size in memory, a line for each method; None where no quantized model was judged."""
    judged = [row for row in rows if row.status == "ok" and row.perplexity is not None]
    if all(row.bits is None for row in judged):
        return None
    records = [
        row.model_dump(include={"method", "bits", "group_size"})
        | {"memory_mb": _megabytes(row), "perplexity": row.perplexity}
        for row in judged
    ]
    caption = f"Perplexity on {judged[0].num_tokens:,} tokens; beside each point its bits. {device}."
    title = "Perplexity by size"
    return Picture("quantization", title, caption, records, lambda figure: _draw(figure, judged))


def _megabytes(row: Row) -> float:
    return (row.memory_bytes or 0) / 1e6


def _draw(figure: "Figure", rows: Sequence[Any]) -> None:
    lines = []
    finite = [row for row in rows if math.isfinite(row.perplexity)]
    dense_last = sorted(finite, key=lambda row: (row.bits is None, _megabytes(row)))
    for method, mine in group_by(dense_last, lambda row: str(row.method)).items():
        if mine[0].bits is None:
            name = f"dense, {_megabytes(mine[0]):,.2f} MB"
            lines.append(Series(name, (point_without_spread(None, mine[0].perplexity),)))
        else:
            points = tuple(point_without_spread(_megabytes(row), row.perplexity) for row in mine)
            lines.append(Series(method, points, tuple(str(row.bits) for row in mine)))
    axes = draw_series(figure, lines, "weights in memory, MB", "perplexity")
    axes.set_yscale("log")
    axes.margins(0.06, 0.14)
    set_log_ticks(axes.yaxis)
