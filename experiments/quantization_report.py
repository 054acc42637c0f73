"""What quantization costs and saves, for people: a table, and a plot."""

from collections.abc import Sequence
from pathlib import Path

from experiments.rows import QuantizationRow
from experiments.table_style import Column, Line, PlainTable, cells, status_cell

PLOT = "quantization.svg"


def name_of(row: QuantizationRow) -> str:
    """ "gptq 4 bits g32"."""
    if row.bits is None:
        return str(row.method)
    group = "" if row.group_size == -1 else f" g{row.group_size}"
    return f"{row.method} {row.bits} bits{group}"


def quantization_table(rows: Sequence[QuantizationRow]) -> PlainTable:
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


def write_plot(rows: Sequence[QuantizationRow], folder: Path) -> Path | None:
    """Perplexity over the weights' size in memory, a line for each method, as an SVG; None where matplotlib is not
    installed (the extra `plot`) or no quantized model was judged.
    """
    judged = [row for row in rows if row.status == "ok"]
    methods = list(dict.fromkeys(str(row.method) for row in judged if row.bits is not None))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not methods:
        return None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for method in methods:
        line = sorted((row for row in judged if row.method == method), key=lambda row: row.memory_bytes or 0)
        sizes, perplexities = [(row.memory_bytes or 0) / 1e6 for row in line], [row.perplexity or 0 for row in line]
        axes.plot(sizes, perplexities, marker="o", label=method)
        for row, size, perplexity in zip(line, sizes, perplexities, strict=True):
            axes.annotate(f"{row.bits}", (size, perplexity), xytext=(4, 4), textcoords="offset points", fontsize=8)
    for row in judged:
        if row.bits is None and row.perplexity is not None:
            label = f"dense, {(row.memory_bytes or 0) / 1e6:,.2f} MB"
            axes.axhline(row.perplexity, linestyle="--", color="black", linewidth=1, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("weights in memory, MB (at each point: bits)")
    axes.set_ylabel("perplexity")
    axes.legend()
    figure.savefig(folder / PLOT)
    return folder / PLOT
