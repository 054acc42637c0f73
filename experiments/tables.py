"""A run, and the registry, as tables for people: every column explains itself, and 80 columns are enough."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from experiments.plan import Plan
from experiments.rows import CheckRow, EngineRow, KernelRow, ParityRow, PeerRow
from experiments.run_folder import AnyRow
from experiments.schema import PromptsWorkload

_STYLES = {"ok": "green", "wrong": "bold red", "failed": "red", "unsupported": "yellow", "finding": "bold red"}


def status_text(status: str) -> Text:
    return Text(status, style=_STYLES.get(status, ""))


def new_table(title: str, columns: Sequence[str], right: Sequence[str] = ()) -> Table:
    """A table without vertical rules; columns named in `right` are aligned there and never broken."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for column in columns:
        numeric = column in right
        # Text breaks between words; only a word longer than its column is cut up.
        table.add_column(column, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    return table


def add_row(table: Table, *cells: str | Text) -> None:
    """A row whose cells are shown as they are: rich would take "split_kv[num_splits=4]" for its own markup."""
    table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))


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
    if peers:
        parts.append(_peer_table(peers))
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
        arm = [row.settings.get(name) if key != name else row.arm[key] for key, name in zip(swept, names, strict=True)]
        cells: list[str | Text] = [str(row.workload)] if several else []
        cells += [*map(str, arm), status_text(row.status)]
        if row.status != "ok":
            add_row(table, *cells, *["-"] * 5)
            continue
        if row.tokens_per_s is None or row.time_to_first_token_s is None:
            cells += ["n/m"] * 3
        else:
            iqr = f"{row.tokens_per_s_iqr:,.0f}" if row.tokens_per_s_iqr is not None else "-"
            cells += [f"{row.tokens_per_s:,.0f}", iqr, f"{row.time_to_first_token_s * 1e3:,.1f}"]
        compared = parity.get(_key(row))
        if compared is not None:
            assert compared.logprob_drift is not None
            cells += [_same(compared.requests_equal, compared.requests), f"{compared.logprob_drift:.1e}"]
        else:
            cells += ["first arm" if row.workload not in firsts else "-", "-"]
            firsts.add(row.workload)
        add_row(table, *cells)
    table.caption = (
        "Output tokens per second; ttft: time to first token, all requests arriving at once; same tokens, drift: as "
        "the first arm, and the largest difference of a log-probability. n/m: not measured."
    )
    table.caption_justify = "left"
    return table


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
