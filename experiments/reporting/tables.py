"""A run as tables for people: every column explains itself, and 80 columns are enough.

The tables are plain data: the console prints them, and a report shows the same ones with their wide columns.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from experiments.reporting.arms import arm_key, merged, processes, swept_names, title_of
from experiments.reporting.effects import effects_table, step_table
from experiments.reporting.numerics import same_tokens_cell
from experiments.reporting.quantization import quantization_table
from experiments.reporting.table_style import (
    Cell,
    Column,
    PlainTable,
    build_table,
    cells,
    figure,
    format_microseconds,
    format_value,
    setting_name,
    status_cell,
    status_text,
)
from experiments.runs.rows import Row
from experiments.runs.table import place_of, question_of

Prompts = Mapping[str, Sequence[str]]
"""A workload's name -> the texts that it gives."""

_NOT_MEASURED = "n/m: not measured."


def print_report(console: Console, prompts: Prompts, rows: Sequence[Row]) -> None:
    """What a run found, stage by stage, reasons last. A replay command stays one line, so that it can be copied."""
    parts: list[RenderableType] = []
    for name, table in tables_of(rows).items():
        parts.append(table.as_rich())
        if name == "engine":
            parts += _continued_prompts(prompts, rows)
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
    stages: dict[str, list[Row]] = {}
    for row in rows:
        stages.setdefault(row.stage, []).append(row)
    engines, peers = stages.get("engine", []), stages.get("peers", [])
    names = swept_names(engines)
    timed = [row for row in (*engines, *peers) if row.status == "ok" and row.ttft_s is not None]
    scheduled = [row for row in engines if row.status == "ok" and row.settings]
    titles = {arm_key(row): ", ".join(filter(None, [row.workload, title_of(row, names)])) for row in engines}
    found = {
        "kernels": _kernel_table(stages["check"], stages.get("kernels", []), count) if "check" in stages else None,
        "engine": _engine_table(engines, stages.get("parity", []), count) if engines else None,
        "waiting": _waiting_table(timed, names) if timed else None,
        "memory": _memory_table(scheduled, names) if scheduled else None,
        "peers": _peer_table(peers, stages.get("speedup", [])) if peers else None,
        "effects": effects_table(rows, names, every),
        "steps": step_table(rows, titles),
        "quantization": quantization_table(stages["quantization"]) if "quantization" in stages else None,
    }
    return {name: table for name, table in found.items() if table is not None}


def _medians(count: int, what: str) -> str:
    """How a figure of several processes came about."""
    return f" Medians over {count} processes; IQR: between {what}." if count > 1 else ""


def _kernel_table(checks: Sequence[Row], kernels: Sequence[Row], count: int) -> PlainTable:
    timings = {arm_key(row): row for row in kernels}
    dtypes = list(dict.fromkeys(row.dtype for row in checks))
    show: dict[Column, Callable[[Row], str | Cell]] = {
        Column("variant", whole=True): lambda row: str(row.variant),
        Column("shape"): lambda row: str(row.point),
    }
    if len(dtypes) > 1:
        show[Column("dtype")] = lambda row: row.dtype
    show[Column("check")] = lambda row: status_cell(row.status)
    show[figure("error")] = lambda row: f"{row.max_error_ratio:.2f}" if row.max_error_ratio is not None else "-"
    headings = {"median us": False, "IQR us": False, "MB": False, "GB/s": True, "GFLOP/s": True}
    if any(row.roofline_fraction is not None for row in kernels if row.status == "ok"):
        headings["roofline"] = False
    for place, (name, wide) in enumerate(headings.items()):
        show[figure(name, wide=wide)] = lambda row, place=place: _timing(timings.get(arm_key(row)))[place]  # type: ignore[misc]
    items: list[Row | str] = []
    for op, mine in itertools.groupby(checks, key=lambda row: str(row.op)):
        items += [op, *mine]
    caption = f"error: over what the error rule allows, 1.00 at most. {_NOT_MEASURED}"
    title = f"Kernels ({', '.join(dtypes)}, {checks[0].device})"
    return build_table(title, show, items, caption + _medians(count, "the processes' medians"))


def _timing(row: Row | None) -> Sequence[str | Cell]:
    """A kernel's median, IQR, MB, GB/s, GFLOP/s and share of the roofline."""
    if row is None:
        return ["-"] * 6
    if row.bytes_moved is None or row.flops is None:
        return [status_cell(row.status), *["-"] * 5]
    size = f"{row.bytes_moved / 1e6:.3g}"
    if row.median_us is None or row.iqr_us is None:
        return ["n/m", "n/m", size, "n/m", "n/m", "n/m"]
    share = f"{row.roofline_fraction:.0%}" if row.roofline_fraction is not None else "n/m"
    rates = [f"{amount / row.median_us / 1e3:,.3g}" for amount in (row.bytes_moved, row.flops)]
    return [format_microseconds(row.median_us), format_microseconds(row.iqr_us), size, *rates, share]


def _engine_table(engines: Sequence[Row], parities: Sequence[Row], count: int) -> PlainTable:
    parity = {arm_key(row): row for row in parities}
    firsts: dict[str, Row] = {}
    for row in engines:
        if row.status == "ok" and arm_key(row) not in parity:
            firsts.setdefault(question_of(row), row)

    def timed(row: Row, text: Callable[[Any], str]) -> str:
        return "-" if row.status != "ok" else "n/m" if row.tokens_per_s is None or row.ttft_s is None else text(row)

    def same(row: Row) -> str | Cell:
        if (compared := parity.get(arm_key(row))) is not None and row.status == "ok":
            return same_tokens_cell(compared, row.requests)
        return "first arm" if firsts.get(question_of(row)) is row else "-"

    def drift(row: Row) -> str:
        compared = parity.get(arm_key(row))
        return f"{compared.logprob_drift:.1e}" if compared is not None and row.status == "ok" else "-"

    show: dict[Column, Callable[[Row], str | Cell]] = {}
    if len({row.workload for row in engines}) > 1:
        show[Column("workload")] = lambda row: str(row.workload)
    for name in swept_names(engines):
        show[Column(setting_name(name))] = lambda row, name=name: format_value(  # type: ignore[misc]
            {**row.arm, **row.settings}.get(name, "-")
        )
    show |= {
        Column("status"): _served_cell,
        figure("tokens/s"): lambda row: timed(row, lambda r: f"{r.tokens_per_s:,.0f}"),
        figure("IQR"): lambda row: timed(
            row, lambda r: f"{r.tokens_per_s_iqr:,.0f}" if r.tokens_per_s_iqr is not None else "-"
        ),
        figure("ttft ms"): lambda row: timed(row, lambda r: _ms(r.ttft_s["p50"])),
        Column("same tokens"): same,
        figure("drift"): drift,
    }
    caption = (
        "Output tokens per second; ttft: time to first token, p50; same tokens, drift: as the first arm, and the "
        f"largest difference of a log-probability. {_NOT_MEASURED}"
    )
    if any(row.requests_failed for row in engines):
        caption += " failed: of the requests; of tokens, those that both arms served are compared."
    return build_table("Engine", show, engines, caption + _medians(count, "the processes' tokens/s"))


def _served_cell(row: Row) -> Cell:
    """A row's status; of one that is ok, how many requests failed all the same."""
    if not row.requests_failed:
        return status_cell(row.status)
    return Cell(f"{row.requests_failed} of {row.requests} failed", "failed")


def _by_workload(rows: Sequence[Row]) -> list[Row | str]:
    """The rows, with a heading for each workload where there are several."""
    workloads = list(dict.fromkeys(row.workload for row in rows))
    items: list[Row | str] = []
    for workload in workloads:
        items += [str(workload)] if len(workloads) > 1 else []
        items += [row for row in rows if row.workload == workload]
    return items


def _waiting_table(rows: Sequence[Row], names: Sequence[str]) -> PlainTable:
    """Percentiles of what users wait for."""
    show: dict[Column, Callable[[Row], str | Cell]] = {
        Column("arm"): lambda row: title_of(row, names),
        figure("ttft"): lambda row: _percentiles(row.ttft_s),
        figure("tpot"): lambda row: _percentiles(row.tpot_s),
        figure("gap"): lambda row: _percentiles(row.gap_s),
    }
    caption = (
        "ttft: to a request's first token; tpot: its mean time between tokens; gap: any time between two of its "
        "tokens. With late requests, ttft is theirs, the others are of those that were there before."
    )
    return build_table("Waiting, ms: p50/p90/p99", show, _by_workload(rows), caption)


def _memory_table(rows: Sequence[Row], names: Sequence[str]) -> PlainTable:
    """What the cache's memory was good for; counts, not times, so also where kernels are interpreted."""
    show: dict[Column, Callable[[Any], str | Cell]] = {
        Column("arm"): lambda row: title_of(row, names),
        figure("running"): lambda row: str(row.peak_running),
        figure("lent"): lambda row: f"{row.peak_occupancy:.0%}",
        figure("empty"): lambda row: f"{row.last_page_waste:.0%}",
        figure("preempted"): lambda row: str(row.preemptions),
        figure("hits"): lambda row: f"{row.hit_tokens / row.prompt_tokens if row.prompt_tokens else 0.0:.0%}",
        figure("saved"): lambda row: f"{row.saved_bytes / 1e6:.3g}",
        figure("evicted"): lambda row: str(row.evicted_blocks),
        figure("host MB", wide=True): lambda row: _megabytes(row.host_peak_bytes),
        figure("device MB", wide=True): lambda row: _megabytes(row.device_peak_bytes),
    }
    caption = (
        "running: sequences in one step, at most; lent: of the cache's pages, at the peak; empty: of the slots lent "
        "then, those without a token; hits: of the prompts' tokens, in the prefix cache; saved: their keys and values, "
        "MB; evicted: pages."
    )
    return build_table("Memory", show, _by_workload(rows), caption)


def _megabytes(count: int | None) -> str:
    return f"{count / 1e6:,.0f}" if count is not None else "-"


def _percentiles(quantiles: Mapping[str, float] | None) -> str:
    return "/".join(map(_ms, quantiles.values())) if quantiles else "-"


def _ms(seconds: float) -> str:
    return f"{ms:.3g}" if (ms := seconds * 1e3) < 999.5 else f"{ms:,.0f}"


def _continued_prompts(prompts: Prompts, rows: Sequence[Row]) -> list[RenderableType]:
    """What the first arm made of each prompt of a workload of texts."""
    lines: list[RenderableType] = []
    served = [row for row in rows if row.stage == "engine" and row.status == "ok"]
    for workload, texts in prompts.items():
        row = next((row for row in served if row.workload == workload), None)
        if row is None or row.texts is None:
            continue
        lines.append(Text("\nContinued by the first arm", "bold"))
        for prompt, text in zip(texts, row.texts, strict=True):
            lines += [Text.assemble((prompt, "dim"), text), Text()]
    return lines


def _peer_table(peers: Sequence[Row], speedups: Sequence[Row]) -> PlainTable:
    compared = {(row.peer, place_of(row)): row for row in speedups if row.status == "ok"}
    columns = (
        Column("workload"), Column("peer"), Column("settings"), figure("tokens/s"), figure("speed-up"), figure("IQR"),
        Column("same tokens"),
    )  # fmt: skip
    lines = []
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
        lines.append((*about, *cells(f"{beside.speedup:.2f}x", iqr, same_tokens_cell(beside, beside.requests))))
    several = any(row.speedup_of == "median of replicates" for row in speedups)
    how = "the median over replicates" if several else "each the median over its rounds in one process"
    return PlainTable(
        "Against peers", columns, tuple(lines), f"speed-up: this engine's tokens/s over the peer's, {how}."
    )


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
    names = swept_names([row for row in rows if row.stage == "engine"])
    found: dict[tuple[str, str, str | None], dict[str, None]] = {}
    for row in rows:
        unserved = row.unserved
        if row.status == "ok" and unserved is None:
            continue
        about = str(row.peer) if row.peer else f"{row.op}.{row.variant}" if row.op else _swept_values(row, names)
        key = (row.status, str(row.reason), row.replay) if unserved is None else ("failed", unserved, None)
        found.setdefault(key, {})[about] = None
    return [
        Reason(status, next(iter(abouts)) + (f" and {len(abouts) - 1} more" if len(abouts) > 1 else ""), reason, replay)
        for (status, reason, replay), abouts in found.items()
    ]


def _swept_values(row: Row, names: Sequence[str]) -> str:
    """ "swiglu=fused, block_size=16": of the swept values those that the row has, or all of its arm."""
    known = {**row.arm, **row.settings}
    shown = [name for name in names if name in known] or list(known)
    return ", ".join(f"{name}={format_value(known[name])}" for name in shown)
