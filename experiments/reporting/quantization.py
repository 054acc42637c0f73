"""What quantization costs and saves, for people: a table, and a plot."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.reporting.pictures import PAPER, SOFT, Picture, legend, log_ticks, look
from experiments.reporting.table_style import Column, Line, PlainTable, cells, status_cell
from experiments.runs.rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def name_of(row: Row) -> str:
    """ "gptq 4 bits g32"."""
    if row.bits is None:
        return str(row.method)
    group = "" if row.group_size == -1 else f" g{row.group_size}"
    return f"{row.method} {row.bits} bits{group}"


def quantization_table(rows: Sequence[Row]) -> PlainTable:
    """A line for each model."""
    right = ("perplexity", "KL", "top-1", "disk", "memory", "tokens/s", "x dense")
    columns = (Column("model", whole=True), *(Column(name, right=True) for name in right))
    lines: list[Line] = []
    for row in rows:
        if row.status != "ok":
            lines.append(cells(name_of(row), status_cell(row.status), *["-"] * 6))
            continue
        assert row.disk_bytes is not None
        assert row.memory_bytes is not None
        line = cells(name_of(row), f"{row.perplexity:.3f}")
        line += cells("-", "-") if row.kl is None else cells(f"{row.kl:.4f}", f"{row.top1_agreement:.1%}")
        line += cells(f"{row.disk_bytes / 1e6:,.2f}", f"{row.memory_bytes / 1e6:,.2f}")
        timed = row.tokens_per_s is not None
        line += cells(f"{row.tokens_per_s:,.0f}", f"{row.speedup:.2f}") if timed else cells("n/m", "n/m")
        lines.append(line)
    judged = [row for row in rows if row.status == "ok"]
    caption = (
        (
            f"Of {judged[0].num_tokens:,} tokens, in windows of {judged[0].window} that are each read alone. KL in "
            "nats, and top-1 agreement, with the dense model. disk, memory: MB of all weights. n/m: not measured."
        )
        if judged
        else ""
    )
    return PlainTable("Quantization", columns, tuple(lines), caption)


def quantization_picture(rows: Sequence[Row], device: str) -> Picture | None:
    """Perplexity over the weights' size in memory, a line for each method; None where no quantized model was judged."""
    judged = [row for row in rows if row.status == "ok" and row.perplexity is not None]
    methods = list(dict.fromkeys(str(row.method) for row in judged if row.bits is not None))
    if not methods:
        return None
    records = tuple(
        (row.method, row.bits, row.group_size, (row.memory_bytes or 0) / 1e6, row.perplexity) for row in judged
    )
    caption = f"Perplexity on {judged[0].num_tokens:,} tokens; beside each point its bits. {device}."

    def draw(figure: "Figure") -> None:
        _draw(figure, judged, methods)

    columns = ("method", "bits", "group_size", "memory_mb", "perplexity")
    return Picture("quantization", "Perplexity by size", caption, columns, records, draw)


def _draw(figure: "Figure", judged: Sequence[Row], methods: Sequence[str]) -> None:
    axes = figure.subplots()
    for index, method in enumerate(methods):
        line = sorted((row for row in judged if row.method == method), key=lambda row: row.memory_bytes or 0)
        sizes, perplexities = [(row.memory_bytes or 0) / 1e6 for row in line], [row.perplexity or 0 for row in line]
        axes.plot(sizes, perplexities, markeredgecolor=PAPER, markeredgewidth=0.5, **look(index))
        for row, size, perplexity in zip(line, sizes, perplexities, strict=True):
            axes.annotate(f"{row.bits}", (size, perplexity), xytext=(4, 4), textcoords="offset points", fontsize=8)
    for row in judged:
        if row.bits is None and row.perplexity is not None:
            axes.axhline(row.perplexity, linestyle="--", color=SOFT, linewidth=1)
            text = f"dense, {(row.memory_bytes or 0) / 1e6:,.2f} MB"
            axes.annotate(
                text, (0, row.perplexity), xycoords=("axes fraction", "data"), va="top", xytext=(3, -3),
                textcoords="offset points", color=SOFT, fontsize=8,
            )  # fmt: skip
    axes.set_yscale("log")
    axes.margins(0.06, 0.14)
    log_ticks(axes.yaxis)
    axes.set_xlabel("weights in memory, MB")
    axes.set_title("perplexity")
    legend(figure, [(method, look(index)) for index, method in enumerate(methods)])
