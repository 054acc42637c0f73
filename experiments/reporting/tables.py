"""A run, and the registry, as tables for people: every column explains itself, and 80 columns are enough.

The tables are plain data: the console prints them, and a report shows the same ones with their wide columns.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from experiments.reporting.effects import effects_table, key_of, step_table
from experiments.reporting.quantization import quantization_table
from experiments.reporting.replicates import arm_key, merged, processes
from experiments.reporting.table_style import (
    Cell,
    Column,
    Line,
    PlainTable,
    add_row,
    cells,
    new_table,
    plain,
    status_cell,
    status_text,
    told,
)
from experiments.runs.rows import Row
from experiments.runs.table import place_of, question_of

__all__ = ["add_row", "new_table", "print_report", "status_text", "tables_of"]

Prompts = Mapping[str, Sequence[str]]
"""A workload's name -> the texts that it gives."""


def print_report(console: Console, prompts: Prompts, rows: Sequence[Row]) -> None:
    """What a run found, stage by stage, reasons last. A replay command stays one line, so that it can be copied."""
    parts: list[RenderableType] = []
    engines = [row for row in rows if row.stage == "engine"]
    for name, table in tables_of(rows).items():
        parts.append(table.as_rich())
        if name == "engine":
            parts += _texts(prompts, engines)
    console.print(Group(*parts))
    for number, reason in enumerate(reasons(rows)):
        text = Text.assemble("" if number else "\n", status_text(reason.status), f" {reason.about}: {reason.reason}")
        console.print(text)
        if reason.replay:
            console.print(Text(f"  replay: {reason.replay}"), soft_wrap=True)


def tables_of(rows: Sequence[Row]) -> dict[str, PlainTable]:
    """The tables of what a run found, by name, stage by stage; figures of several processes are merged."""
    count = processes(rows)
    every, rows = rows, merged(rows)
    parts: dict[str, PlainTable] = {}
    checks = [row for row in rows if row.stage == "check"]
    timings = {_place(r): r for r in rows if r.stage == "kernels"}
    if checks:
        parts["kernels"] = _kernel_table(checks, timings, count)
    engines = [row for row in rows if row.stage == "engine"]
    names = swept(engines)
    if engines:
        parts["engine"] = _engine_table(engines, [row for row in rows if row.stage == "parity"], count)
    peers = [row for row in rows if row.stage == "peers"]
    served: list[Row] = [*engines, *peers]
    timed = [row for row in served if row.status == "ok" and row.ttft_s is not None]
    if timed:
        parts["waiting"] = _latency_table(timed, names)
    scheduled = [row for row in engines if row.status == "ok" and row.settings]
    if scheduled:
        parts["memory"] = _memory_table(scheduled, names)
    if peers:
        parts["peers"] = _peer_table(peers, [row for row in rows if row.stage == "speedup"])
    titles = {key_of(row): _title_at(row, names) for row in engines}
    levels = {"effects": effects_table(rows, names, every), "steps": step_table(rows, titles)}
    parts |= {name: table for name, table in levels.items() if table is not None}
    quantized = [row for row in rows if row.stage == "quantization"]
    if quantized:
        parts["quantization"] = quantization_table(quantized)
    return parts


def swept(engines: Sequence[Row]) -> list[str]:
    """What differs between arms: ops, then settings."""
    values: dict[str, set[str]] = {}
    for row in engines:
        for op, label in row.arm.items():
            values.setdefault(op, set()).add(label)
    settings = dict.fromkeys(key for row in engines for key in row.settings)
    return [*(op for op, labels in values.items() if len(labels) > 1), *settings]


def title_of(row: Row, names: Sequence[str]) -> str:
    """What tells a row from the others: the values of its arm under the swept `names`, or a peer's name."""
    if row.stage == "peers":
        return str(row.peer).replace("_", " ")
    ops = [row.arm[key] for key in names if key in row.arm]
    settings = [f"{plain(key)} {told(value)}" for key, value in row.settings.items()]
    return ", ".join([*ops, *settings]) or "this engine"


def _title_at(row: Row, names: Sequence[str]) -> str:
    """An arm with its workload, where that has a name."""
    return ", ".join(filter(None, [row.workload, title_of(row, names)]))


def microseconds(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _place(row: Row) -> tuple[Any, ...]:
    """What a check and a timing of the same thing share."""
    return row.op, row.variant, row.point, row.dtype, str(row.settings)


def _several(count: int, what: str) -> str:
    """How a figure of several processes came about."""
    return f" Medians over {count} processes; IQR: between {what}." if count > 1 else ""


def _kernel_table(checks: Sequence[Row], timings: Mapping[tuple[Any, ...], Row], count: int) -> PlainTable:
    with_roofline = any(row.status == "ok" and row.roofline_fraction is not None for row in timings.values())
    dtypes = list(dict.fromkeys(row.dtype for row in checks))
    several = len(dtypes) > 1
    right = ["error", "median us", "IQR us", "MB", "GB/s", "GFLOP/s", "roofline"]
    columns = [Column(name) for name in ("shape", *(["dtype"] if several else []), "check")]
    columns.insert(0, Column("variant", whole=True))
    columns += [Column(name, right=True, wide=name in ("GB/s", "GFLOP/s")) for name in right]
    columns = columns if with_roofline else columns[:-1]
    lines: list[Line] = []
    last = None
    for row in checks:
        if row.op != last:
            lines.append(str(row.op))
        error = f"{row.max_error_ratio:.2f}" if row.max_error_ratio is not None else "-"
        line = cells(str(row.variant), str(row.point), *([row.dtype] if several else []), status_cell(row.status))
        line += cells(error, *_timing_cells(timings.get(_place(row))))
        lines.append(line[: len(columns)])
        last = row.op
    caption = "error: over what the error rule allows, 1.00 at most. n/m: not measured."
    title = f"Kernels ({', '.join(dtypes)}, {checks[0].device})"
    return PlainTable(title, tuple(columns), tuple(lines), caption + _several(count, "the processes' medians"))


def _timing_cells(timing: Row | None) -> list[str | Cell]:
    if timing is None:
        return ["-"] * 6
    if timing.status == "failed":
        return [status_cell("failed"), *["-"] * 5]
    assert timing.bytes_moved is not None
    assert timing.flops is not None
    size = f"{timing.bytes_moved / 1e6:.3g}"
    if timing.median_us is None or timing.iqr_us is None:
        return ["n/m", "n/m", size, "n/m", "n/m", "n/m"]
    share = f"{timing.roofline_fraction:.0%}" if timing.roofline_fraction is not None else "n/m"
    rates = [f"{count / timing.median_us / 1e3:,.3g}" for count in (timing.bytes_moved, timing.flops)]
    return [microseconds(timing.median_us), microseconds(timing.iqr_us), size, *rates, share]


def _engine_table(engines: Sequence[Row], parities: Sequence[Row], count: int) -> PlainTable:
    names = swept(engines)
    several = len({row.workload for row in engines}) > 1
    right = ["tokens/s", "IQR", "ttft ms"]
    headings = [plain(name) for name in names]
    columns = [Column(name) for name in ([*(["workload"] if several else []), *headings, "status"])]
    columns += [Column(name, right=True) for name in right]
    columns += [Column("same tokens"), Column("drift", right=True)]
    parity = {arm_key(row): row for row in parities}
    firsts: set[str] = set()
    lines: list[Line] = []
    for row in engines:
        known = {**row.arm, **row.settings}
        line = cells(*([str(row.workload)] if several else []), *(told(known.get(name, "-")) for name in names))
        line += cells(_served_cell(row))
        if row.status != "ok":
            lines.append((*line, *cells(*["-"] * 5)))
            continue
        if row.tokens_per_s is None or row.ttft_s is None:
            line += cells(*["n/m"] * 3)
        else:
            iqr = f"{row.tokens_per_s_iqr:,.0f}" if row.tokens_per_s_iqr is not None else "-"
            line += cells(f"{row.tokens_per_s:,.0f}", iqr, _ms(row.ttft_s["p50"]))
        compared = parity.get(arm_key(row))
        if compared is not None:
            assert compared.logprob_drift is not None
            line += cells(same_cell(compared, row.requests), f"{compared.logprob_drift:.1e}")
        else:
            line += cells("first arm" if question_of(row) not in firsts else "-", "-")
            firsts.add(question_of(row))
        lines.append(line)
    caption = (
        "Output tokens per second; ttft: time to first token, p50; same tokens, drift: as "
        "the first arm, and the largest difference of a log-probability. n/m: not measured."
    )
    if any(row.requests_failed for row in engines):
        caption += " failed: of the requests; of tokens, those that both arms served are compared."
    caption += _several(count, "the processes' tokens/s")
    return PlainTable("Engine", tuple(columns), tuple(lines), caption)


def _served_cell(row: Row) -> Cell:
    """A row's status; of one that is ok, how many requests failed all the same."""
    if not row.requests_failed:
        return status_cell(row.status)
    return Cell(f"{row.requests_failed} of {row.requests} failed", "failed")


def _by_workload(
    rows: Sequence[Row], names: Sequence[str], figures: Callable[[Any], Sequence[str]]
) -> tuple[Line, ...]:
    """A line for each row, with a heading for each workload where there are several."""
    workloads = list(dict.fromkeys(row.workload for row in rows))
    lines: list[Line] = []
    for workload in workloads:
        if len(workloads) > 1:
            lines.append(str(workload))
        lines += [cells(title_of(row, names), *figures(row)) for row in rows if row.workload == workload]
    return tuple(lines)


def _latency_table(rows: Sequence[Row], names: Sequence[str]) -> PlainTable:
    """Percentiles of what users wait for."""
    columns = (Column("arm"), *(Column(name, right=True) for name in ("ttft", "tpot", "gap")))
    lines = _by_workload(rows, names, lambda row: [_three(row.ttft_s), _three(row.tpot_s), _three(row.gap_s)])
    caption = (
        "ttft: to a request's first token; tpot: its mean time between tokens; gap: any time between two of its "
        "tokens. With late requests, ttft is theirs, the others are of those that were there before."
    )
    return PlainTable("Waiting, ms: p50/p90/p99", columns, lines, caption)


def _memory_table(rows: Sequence[Row], names: Sequence[str]) -> PlainTable:
    """What the cache's memory was good for; counts, not times, so also where kernels are interpreted."""
    right = ["running", "lent", "empty", "preempted", "hits", "saved", "evicted"]
    columns = (Column("arm"), *(Column(name, right=True) for name in right))
    caption = (
        "running: sequences in one step, at most; lent: of the cache's pages, at the peak; empty: of the slots lent "
        "then, those without a token; hits: of the prompts' tokens, in the prefix cache; saved: their keys and values, "
        "MB; evicted: pages."
    )
    return PlainTable("Memory", columns, _by_workload(rows, names, _memory_cells), caption)


def _memory_cells(row: Row) -> list[str]:
    assert row.peak_occupancy is not None
    assert row.last_page_waste is not None
    assert row.hit_tokens is not None
    assert row.saved_bytes is not None
    hits = row.hit_tokens / row.prompt_tokens if row.prompt_tokens else 0.0
    shares = [f"{share:.0%}" for share in (row.peak_occupancy, row.last_page_waste, hits)]
    return [
        str(row.peak_running),
        shares[0],
        shares[1],
        str(row.preemptions),
        shares[2],
        f"{row.saved_bytes / 1e6:.3g}",
        str(row.evicted_blocks),
    ]


def _three(quantiles: Mapping[str, float] | None) -> str:
    if not quantiles:
        return "-"
    return "/".join(map(_ms, quantiles.values()))


def _ms(seconds: float) -> str:
    return f"{ms:.3g}" if (ms := seconds * 1e3) < 999.5 else f"{ms:,.0f}"


def same_cell(row: Row, asked: int | None) -> Cell:
    """Whether the tokens are the same, of `asked` requests; those that failed on either side are not compared."""
    equal, of = row.requests_equal, row.requests
    if equal == of == asked:
        return Cell("yes", "yes")
    return Cell(f"{equal} of {of} {'requests' if of == asked else 'both served'}", "partly")


def _texts(prompts: Prompts, engines: Sequence[Row]) -> list[RenderableType]:
    """What the first arm made of each prompt of a workload of texts."""
    lines: list[RenderableType] = []
    for workload, texts in prompts.items():
        row = next((r for r in engines if r.workload == workload and r.status == "ok"), None)
        if row is None or row.texts is None:
            continue
        lines.append(Text("\nContinued by the first arm", "bold"))
        for prompt, text in zip(texts, row.texts, strict=True):
            lines += [Text.assemble((prompt, "dim"), text), Text()]
    return lines


def _peer_table(peers: Sequence[Row], speedups: Sequence[Row]) -> PlainTable:
    columns = [Column(name) for name in ("workload", "peer", "settings")]
    columns += [Column(name, right=True) for name in ("tokens/s", "speed-up", "IQR")]
    columns.append(Column("same tokens"))
    compared = {(row.peer, place_of(row)): row for row in speedups if row.status == "ok"}
    lines: list[Line] = []
    for row in peers:
        if row.status != "ok":
            lines.append(cells(str(row.workload), str(row.peer), status_cell(row.status), "-", "-", "-", "-"))
            continue
        settings = ", ".join(str(value) for value in (row.peer_settings or {}).values())
        if row.requests_failed:
            settings = "; ".join(filter(None, [settings, _served_cell(row).text]))
        about = cells(str(row.workload), str(row.peer).replace("_", " "), settings, f"{row.tokens_per_s:,.1f}")
        beside = compared.get((row.peer, place_of(row)))
        if beside is None:
            lines.append((*about, *cells("-", "-", "-")))
            continue
        iqr = f"{beside.speedup_iqr:.2f}" if beside.speedup_iqr is not None else "-"
        lines.append((*about, *cells(f"{beside.speedup:.2f}x", iqr, same_cell(beside, beside.requests))))
    several = any(row.speedup_of == "median of replicates" for row in speedups)
    how = "the median over replicates" if several else "each the median over its rounds in one process"
    return PlainTable(
        "Against peers", tuple(columns), tuple(lines), f"speed-up: this engine's tokens/s over the peer's, {how}."
    )


def _arm_of(row: Row, names: Sequence[str]) -> str:
    """ "swiglu=fused, block_size=16": of the swept values those that the row has, or all of its arm."""
    known = {**row.arm, **row.settings}
    shown = [name for name in names if name in known] or list(known)
    return ", ".join(f"{name}={told(known[name])}" for name in shown)


@dataclass(frozen=True)
class Reason:
    """Why rows are not ok: what they concern, and the command that shows it again, where there is one."""

    status: str
    about: str
    reason: str
    replay: str | None


def reasons(rows: Iterable[Row]) -> list[Reason]:
    """Each reason once, with what it concerns: of an arm, what tells it from the others."""
    rows = list(rows)
    names = swept([row for row in rows if row.stage == "engine"])
    found: dict[tuple[str, str | None, str | None], list[str]] = {}
    for row in rows:
        unserved = row.unserved if row.stage in ("engine", "peers") else None
        if row.status == "ok" and unserved is None:
            continue
        about = f"{row.op}.{row.variant}" if row.op else _arm_of(row, names)
        about = str(row.peer) if row.stage in ("peers", "speedup") else about
        replay = row.replay if row.stage == "check" else None
        status, reason = (row.status, row.reason) if unserved is None else ("failed", unserved)
        abouts = found.setdefault((status, reason, replay), [])
        if about not in abouts:
            abouts.append(about)
    return [
        Reason(status, abouts[0] + (f" and {len(abouts) - 1} more" if len(abouts) > 1 else ""), str(reason), replay)
        for (status, reason, replay), abouts in found.items()
    ]
