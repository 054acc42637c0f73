"""A run, and the registry, as tables for people: every column explains itself, and 80 columns are enough."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from experiments.plan import Plan
from experiments.quantization_report import quantization_table
from experiments.rows import CheckRow, EngineRow, KernelRow, ParityRow, PeerRow, QuantizationRow
from experiments.run_folder import AnyRow
from experiments.schema import PromptsWorkload
from experiments.table_style import add_row, new_table, status_text


def print_report(console: Console, plan: Plan, rows: Sequence[AnyRow]) -> None:
    """What a run found, stage by stage, reasons last. A replay command stays one line, so that it can be copied."""
    console.print(_tables(plan, rows))
    for reason, replay in _reasons(rows):
        console.print(reason)
        if replay:
            console.print(Text(f"  replay: {replay}"), soft_wrap=True)


def _tables(plan: Plan, rows: Sequence[AnyRow]) -> RenderableType:
    parts: list[RenderableType] = []
    checks = [row for row in rows if isinstance(row, CheckRow)]
    timings = {(r.op, r.variant, r.point): r for r in rows if isinstance(r, KernelRow)}
    if checks:
        parts.append(_kernel_table(plan, checks, timings))
    engines = [row for row in rows if isinstance(row, EngineRow)]
    if engines:
        parts.append(_engine_table(plan, engines, [row for row in rows if isinstance(row, ParityRow)]))
        parts += _texts(plan, engines)
    peers = [row for row in rows if isinstance(row, PeerRow)]
    served: list[EngineRow | PeerRow] = [*engines, *peers]
    timed = [row for row in served if row.status == "ok" and row.ttft_s is not None]
    if timed:
        parts.append(_latency_table(plan, timed))
    scheduled = [row for row in engines if row.status == "ok" and row.settings]
    if scheduled:
        parts.append(_memory_table(plan, scheduled))
    if peers:
        parts.append(_peer_table(peers))
    quantized = [row for row in rows if isinstance(row, QuantizationRow)]
    if quantized:
        parts.append(quantization_table(quantized))
    return Group(*parts)


def microseconds(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _kernel_table(plan: Plan, checks: Sequence[CheckRow], timings: Mapping[Any, KernelRow]) -> Table:
    with_roofline = any(row.status == "ok" and row.roofline_fraction is not None for row in timings.values())
    right = ["error", "median us", "IQR us", "MB", "roofline"]
    columns = ["variant", "shape", "check", *right[: None if with_roofline else -1]]
    table = new_table(f"Kernels ({plan.dtype_name}, {plan.device.type})", columns, right)
    table.columns[0].no_wrap = True
    last = None
    for row in checks:
        if row.op != last:
            add_row(table, Text(str(row.op), "bold"))
        timing = timings.get((row.op, row.variant, row.point))
        error = f"{row.max_error_ratio:.2f}" if row.max_error_ratio is not None else "-"
        cells: list[str | Text] = [f"  {row.variant}", str(row.point), status_text(row.status), error]
        cells += _timing_cells(timing)
        add_row(table, *cells[: len(columns)])
        last = row.op
    table.caption = "error: over what the error rule allows, 1.00 at most. n/m: not measured."
    table.caption_justify = "left"
    return table


def _timing_cells(timing: KernelRow | None) -> list[str | Text]:
    if timing is None:
        return ["-"] * 4
    if timing.status == "failed":
        return [status_text("failed"), "-", "-", "-"]
    assert timing.bytes_moved is not None
    size = f"{timing.bytes_moved / 1e6:.3g}"
    if timing.median_us is None or timing.iqr_us is None:
        return ["n/m", "n/m", size, "n/m"]
    share = f"{timing.roofline_fraction:.0%}" if timing.roofline_fraction is not None else "n/m"
    return [microseconds(timing.median_us), microseconds(timing.iqr_us), size, share]


def _engine_table(plan: Plan, engines: Sequence[EngineRow], parities: Sequence[ParityRow]) -> Table:
    swept = plan.arms[0].swept
    several = len({row.workload for row in engines}) > 1
    right = ["tokens/s", "IQR", "ttft ms", "drift"]
    names = [key.removeprefix("scheduler.") for key in swept]
    columns = [*(["workload"] if several else []), *names, "status", *right[:3], "same tokens", right[3]]
    table = new_table("Engine", columns, right)
    for column in table.columns[: len(names) + several]:
        column.overflow = "fold"
    parity = {_key(row): row for row in parities}
    firsts: set[str | None] = set()
    for row in engines:
        known = {**row.arm, **row.settings}
        arm = [known.get(name, "-") for name in names]
        cells: list[str | Text] = [str(row.workload)] if several else []
        cells += [*map(str, arm), status_text(row.status)]
        if row.status != "ok":
            add_row(table, *cells, *["-"] * 5)
            continue
        if row.tokens_per_s is None or row.ttft_s is None:
            cells += ["n/m"] * 3
        else:
            iqr = f"{row.tokens_per_s_iqr:,.0f}" if row.tokens_per_s_iqr is not None else "-"
            cells += [f"{row.tokens_per_s:,.0f}", iqr, _ms(row.ttft_s["p50"])]
        compared = parity.get(_key(row))
        if compared is not None:
            assert compared.logprob_drift is not None
            cells += [_same(compared.requests_equal, compared.requests), f"{compared.logprob_drift:.1e}"]
        else:
            cells += ["first arm" if row.workload not in firsts else "-", "-"]
            firsts.add(row.workload)
        add_row(table, *cells)
    table.caption = (
        "Output tokens per second; ttft: time to first token, p50; same tokens, drift: as "
        "the first arm, and the largest difference of a log-probability. n/m: not measured."
    )
    groups = {row.group for row in engines if row.group is not None}
    if len(groups) > 1:
        table.caption += (
            f" The engines were in memory in {len(groups)} groups, one after the other; only those of a group took "
            "turns: a smaller kv_cache_bytes lets more of them."
        )
    table.caption_justify = "left"
    return table


def _title(plan: Plan, row: EngineRow | PeerRow) -> str:
    """What tells a row from the others: its arm's swept values, or a peer's name."""
    if isinstance(row, PeerRow):
        return str(row.peer).replace("_", " ")
    ops = [row.arm[key] for key in plan.arms[0].swept if key in row.arm]
    return ", ".join([*ops, *(f"{key} {value}" for key, value in row.settings.items())]) or "this engine"


def _by_workload(
    table: Table, rows: Sequence[EngineRow | PeerRow], cells: Callable[[Any], Sequence[str]], plan: Plan
) -> None:
    """A line for each row, with a heading for each workload where there are several."""
    workloads = list(dict.fromkeys(row.workload for row in rows))
    for workload in workloads:
        if len(workloads) > 1:
            add_row(table, Text(str(workload), "bold"))
        for row in rows:
            if row.workload == workload:
                add_row(table, _title(plan, row), *cells(row))


def _latency_table(plan: Plan, rows: Sequence[EngineRow | PeerRow]) -> Table:
    """Percentiles of what users wait for."""
    right = ["ttft", "tpot", "gap"]
    table = new_table("Waiting, ms: p50/p90/p99", ["arm", *right], right)
    _by_workload(table, rows, lambda row: [_three(row.ttft_s), _three(row.tpot_s), _three(row.gap_s)], plan)
    table.caption = (
        "ttft: to a request's first token; tpot: its mean time between tokens; gap: any time between two of its "
        "tokens. With late requests, ttft is theirs, the others are of those that were there before."
    )
    table.caption_justify = "left"
    return table


def _memory_table(plan: Plan, rows: Sequence[EngineRow]) -> Table:
    """What the cache's memory was good for; counts, not times, so also where kernels are interpreted."""
    right = ["running", "lent", "empty", "preempted", "hits", "saved", "evicted"]
    table = new_table("Memory", ["arm", *right], right)
    _by_workload(table, rows, _memory_cells, plan)
    table.caption = (
        "running: sequences in one step, at most; lent: of the cache's pages, at the peak; empty: of the slots lent "
        "then, those without a token; hits: of the prompts' tokens, in the prefix cache; saved: their keys and values, "
        "MB; evicted: pages."
    )
    table.caption_justify = "left"
    return table


def _memory_cells(row: EngineRow) -> list[str]:
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


def _same(equal: int | None, of: int | None) -> Text:
    return Text("yes", "green") if equal == of else Text(f"{equal} of {of} requests", "yellow")


def _texts(plan: Plan, engines: Sequence[EngineRow]) -> list[RenderableType]:
    """What the first arm made of each prompt of a workload of texts."""
    lines: list[RenderableType] = []
    for workload in plan.experiment.workload:
        row = next((r for r in engines if r.workload == workload.name and r.status == "ok"), None)
        if row is None or row.texts is None or not isinstance(workload, PromptsWorkload):
            continue
        lines.append(Text("\nContinued by the first arm", "bold"))
        for prompt, text in zip(workload.prompts, row.texts, strict=True):
            lines += [Text.assemble((prompt, "dim"), text), Text()]
    return lines


def _key(row: EngineRow | ParityRow) -> tuple[Any, ...]:
    return row.workload, tuple(sorted(row.arm.items())), tuple(sorted(row.settings.items()))


def _peer_table(peers: Sequence[PeerRow]) -> Table:
    right = ["tokens/s", "speed-up", "IQR"]
    table = new_table("Against peers", ["workload", "peer", "settings", *right, "same tokens"], right)
    for row in peers:
        if row.status != "ok" or row.speedup is None:
            add_row(table, str(row.workload), str(row.peer), status_text(row.status), "-", "-", "-", "-")
            continue
        settings = ", ".join(str(value) for value in (row.peer_settings or {}).values())
        speed = f"{row.tokens_per_s:,.1f}"
        speedup, iqr = f"{row.speedup:.2f}x", f"{row.speedup_iqr:.2f}" if row.speedup_iqr is not None else "-"
        add_row(
            table,
            str(row.workload),
            str(row.peer).replace("_", " "),
            settings,
            speed,
            speedup,
            iqr,
            _same(row.requests_equal, row.requests),
        )
    table.caption = "speed-up: this engine's tokens/s over the peer's, median over interleaved rounds."
    table.caption_justify = "left"
    return table


def _reasons(rows: Iterable[AnyRow]) -> list[tuple[Text, str | None]]:
    """Each reason once, with what it concerns, and the command that shows it again."""
    found: dict[tuple[str, str | None, str | None], list[str]] = {}
    for row in rows:
        if row.status == "ok":
            continue
        about = f"{row.op}.{row.variant}" if row.op else ", ".join(f"{k}={v}" for k, v in row.arm.items())
        replay = row.replay if isinstance(row, CheckRow) else None
        abouts = found.setdefault((row.status, row.reason, replay), [])
        if about not in abouts:
            abouts.append(about)
    lines: list[tuple[Text, str | None]] = []
    for (status, reason, replay), abouts in found.items():
        about = abouts[0] + (f" and {len(abouts) - 1} more" if len(abouts) > 1 else "")
        lines.append((Text.assemble("" if lines else "\n", status_text(status), f" {about}: {reason}"), replay))
    return lines
