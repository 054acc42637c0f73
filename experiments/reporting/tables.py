"""A run as tables for people: every column explains itself, and 80 columns are enough.

The tables are plain data: the console prints them, and a report shows the same ones with their wide columns.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from experiments.reporting.arms import (
    arm_key,
    count_processes,
    merge_processes,
    select_stages,
    swept_columns,
    swept_names,
    title_of,
)
from experiments.reporting.effects import effects_table
from experiments.reporting.modelled import modelled_arms_table, modelled_kernels_table, modelled_winners
from experiments.reporting.quantization import quantization_table
from experiments.reporting.steps import steps_of, whole_steps_table
from experiments.reporting.table_style import (
    Cell,
    Column,
    PlainTable,
    build_table,
    format_microseconds,
    format_number,
    format_value,
    group_by,
    number_column,
    status_cell,
    status_text,
)
from experiments.runs.rows import Row
from experiments.runs.table import place_of, question_of

Show = dict[Column, Callable[[Row], str | Cell]]
"""A column -> a row's cell there."""

_NOT_MEASURED = "n/m: not measured."
_WORST_FIRST = ("wrong", "failed", "ok", "unsupported")


def print_report(console: Console, prompts: Mapping[str, Sequence[str]], rows: Sequence[Row]) -> None:
    """What a run found, stage by stage, reasons last. A replay command stays one line, so that it can be copied.

    Args:
        prompts: A workload's name -> the texts that it gives.
    """
    parts: list[RenderableType] = []
    for name, table in tables_of(rows).items():
        parts.append(table.as_rich())
        if name == "modelled kernels":
            parts += [
                Text(f"{text[:1].upper()}{text[1:]}.") for text in modelled_winners(select_stages(rows, "foretold"))
            ]
        if name == "engine" and (texts := continued_prompts(prompts, rows)):
            parts.append(Text("\nContinued by the first arm", "bold"))
            parts += [part for prompt, text in texts for part in (Text.assemble((prompt, "dim"), text), Text())]
    console.print(Group(*parts))
    for number, reason in enumerate(list_reasons(rows)):
        text = Text.assemble("" if number else "\n", status_text(reason.status), f" {reason.about}: {reason.reason}")
        console.print(text)
        if reason.replay:
            console.print(Text(f"  replay: {reason.replay}"), soft_wrap=True)


def tables_of(rows: Sequence[Row]) -> dict[str, PlainTable]:
    """The tables of what a run found, by name, stage by stage; figures of several processes are merged."""
    count = count_processes(rows)
    every, rows = rows, merge_processes(rows)
    stages: dict[str, list[Row]] = group_by(rows, lambda row: str(row.stage))
    checks, engines, peers, servers = (stages.get(stage, []) for stage in ("check", "engine", "peers", "http"))
    quantized, foretold = stages.get("quantization", []), stages.get("foretold", [])
    names = swept_names(engines)
    waited = [row for row in (*engines, *peers, *servers) if row.ttft_s is not None]
    scheduled = [row for row in engines if row.status == "ok" and row.settings]
    steps = steps_of(rows, engines)
    makers: dict[str, tuple[Sequence[Any], Callable[[], PlainTable | None]]] = {
        "kernels": (checks, lambda: _kernel_table(checks, stages.get("kernels", []), count)),
        "modelled kernels": (foretold, lambda: modelled_kernels_table(foretold)),
        "engine": (engines, lambda: _engine_table(engines, stages.get("parity", []), count)),
        "modelled arms": (foretold, lambda: modelled_arms_table(foretold, engines, names)),
        "http": (servers, lambda: _server_table(servers, count)),
        "waiting": (waited, lambda: _waiting_table(waited, names)),
        "memory": (scheduled, lambda: _memory_table(scheduled, names)),
        "peers": (peers, lambda: _peer_table(peers, stages.get("speedup", []))),
        "effects": (steps, lambda: effects_table(rows, names, every)),
        "steps": (steps, lambda: whole_steps_table(steps)),
        "quantization": (quantized, lambda: quantization_table(quantized)),
    }
    return {name: table for name, (shown, make) in makers.items() if shown and (table := make()) is not None}


def _medians(count: int, what: str) -> str:
    """How a figure of several processes came about."""
    return f" Medians over {count} processes; IQR: between {what}." if count > 1 else ""


def _kernel_table(checks: Sequence[Row], kernels: Sequence[Row], count: int) -> PlainTable:
    timings = {arm_key(row): _timing(row) for row in kernels}
    dtypes = list(dict.fromkeys(row.dtype for row in checks))
    show: Show = {
        Column("variant", whole=True): lambda row: str(row.variant),
        Column("shape"): lambda row: row.point or "-",  # it died after its last point
    }
    if len(dtypes) > 1:
        show[Column("dtype")] = lambda row: row.dtype
    show[Column("check")] = lambda row: status_cell(row.status)
    show[number_column("error")] = lambda row: format_number(row.max_error_ratio, ".2f")
    columns = [number_column("median us"), number_column("IQR us"), number_column("MB")]
    columns += [number_column("GB/s", wide=True), number_column("GFLOP/s", wide=True)]
    if any(row.roofline_fraction is not None for row in kernels):
        columns.append(number_column("roofline"))
    for place, column in enumerate(columns):
        show[column] = lambda row, place=place: timings.get(arm_key(row), ["-"] * 6)[place]  # type: ignore[misc]
    caption = f"error: over what the error rule allows, 1.00 at most. {_NOT_MEASURED}"
    caption += _medians(count, "the processes' medians")
    title = f"Kernels ({', '.join(dtypes)}, {checks[0].device})"
    return build_table(title, show, checks, caption, lambda row: str(row.op))


def _timing(row: Row) -> Sequence[str | Cell]:
    """A kernel's median, IQR, MB, GB/s, GFLOP/s and share of the roofline."""
    if row.status != "ok":
        return [status_cell(row.status), *["-"] * 5]
    size = format_number((row.bytes_moved or 0) / 1e6, ".3g")
    if row.median_us is None:
        return ["n/m", "n/m", size, "n/m", "n/m", "n/m"]
    rates = [f"{(amount or 0) / row.median_us / 1e3:,.3g}" for amount in (row.bytes_moved, row.flops)]
    times = [format_microseconds(row.median_us), format_microseconds(row.iqr_us or 0.0)]
    return [*times, size, *rates, format_number(row.roofline_fraction, ".0%", "n/m")]


def _engine_table(engines: Sequence[Row], parities: Sequence[Row], count: int) -> PlainTable:
    parity = {arm_key(row): row for row in parities}
    firsts: dict[str, Row] = {}
    for row in engines:
        if row.status == "ok" and arm_key(row) not in parity:
            firsts.setdefault(question_of(row), row)

    def timed(show: Callable[[Any], str]) -> Callable[[Row], str]:
        """`show` of an arm that was timed."""
        return lambda row: "-" if row.status != "ok" else "n/m" if row.ttft_s is None else show(row)

    def same(row: Row) -> str | Cell:
        if (compared := parity.get(arm_key(row))) is not None and row.status == "ok":
            return same_tokens_cell(compared, row.requests)
        return "first arm" if firsts.get(question_of(row)) is row else "-"

    def drift(row: Row) -> str:
        compared = parity.get(arm_key(row))
        return format_number(compared.logprob_drift if compared and row.status == "ok" else None, ".1e")

    show: Show = {
        **swept_columns(engines, swept_names(engines)),
        Column("status"): _served_cell,
        number_column("tokens/s"): timed(lambda row: format_number(row.tokens_per_s, ",.0f", "n/m")),
        number_column("IQR"): timed(lambda row: format_number(row.tokens_per_s_iqr, ",.0f")),
        number_column("ttft ms"): timed(lambda row: _milliseconds(row.ttft_s["p50"])),
        Column("same tokens"): same,
        number_column("drift"): drift,
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


def _workload_heading(rows: Sequence[Row]) -> Callable[[Row], str]:
    """A row's workload, where there are several."""
    several = len({row.workload for row in rows}) > 1
    return lambda row: str(row.workload) if several else ""


def _waiting_table(rows: Sequence[Row], names: Sequence[str]) -> PlainTable:
    """Percentiles of what users wait for."""
    show: Show = {
        Column("arm"): lambda row: title_of(row, names),
        number_column("ttft"): lambda row: _percentiles(row.ttft_s),
        number_column("tpot"): lambda row: _percentiles(row.tpot_s),
        number_column("gap"): lambda row: _percentiles(row.gap_s),
    }
    caption = (
        "ttft: to a request's first token; tpot: its mean time between tokens; gap: any time between two of its "
        "tokens. With late requests, ttft is theirs, the others are of those that were there before."
    )
    return build_table("Waiting, ms: p50/p90/p99", show, rows, caption, _workload_heading(rows))


def _memory_table(rows: Sequence[Row], names: Sequence[str]) -> PlainTable:
    """What the cache's memory was good for; counts, not times, so also where kernels are interpreted."""
    show: dict[Column, Callable[[Any], str | Cell]] = {
        Column("arm"): lambda row: title_of(row, names),
        number_column("running"): lambda row: str(row.peak_running),
        number_column("lent"): lambda row: f"{row.peak_occupancy:.0%}",
        number_column("empty"): lambda row: f"{row.last_page_waste:.0%}",
        number_column("preempted"): lambda row: str(row.preemptions),
        number_column("hits"): lambda row: f"{row.hit_tokens / row.prompt_tokens if row.prompt_tokens else 0.0:.0%}",
        number_column("saved"): lambda row: f"{row.saved_bytes / 1e6:.3g}",
        number_column("evicted"): lambda row: str(row.evicted_blocks),
        number_column("host MB", wide=True): lambda row: _megabytes(row.host_peak_bytes),
        number_column("device MB", wide=True): lambda row: _megabytes(row.device_peak_bytes),
    }
    caption = (
        "running: sequences in one step, at most; lent: of the cache's pages, at the peak; empty: of the slots lent "
        "then, those without a token; hits: of the prompts' tokens, in the prefix cache; saved: their keys and values, "
        "MB; evicted: pages."
    )
    return build_table("Memory", show, rows, caption, _workload_heading(rows))


def _megabytes(count: int | None) -> str:
    return format_number(count and count / 1e6, ",.0f")


def _percentiles(quantiles: Mapping[str, float] | None) -> str:
    return "/".join(map(_milliseconds, quantiles.values())) if quantiles else "-"


def _milliseconds(seconds: float) -> str:
    return f"{ms:.3g}" if (ms := seconds * 1e3) < 999.5 else f"{ms:,.0f}"


def continued_prompts(prompts: Mapping[str, Sequence[str]], rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Each prompt, with what the first arm that answered its workload made of it.

    Args:
        prompts: A workload's name -> the texts that it gives.
    """
    answers: dict[str | None, Sequence[str]] = {}
    for row in rows:
        if row.stage == "engine" and row.status == "ok":
            answers.setdefault(row.workload, row.texts or ())
    return [pair for name, texts in prompts.items() for pair in zip(texts, answers.get(name, ()), strict=False)]


def _peer_table(peers: Sequence[Row], speedups: Sequence[Row]) -> PlainTable:
    compared = {(row.peer, place_of(row)): row for row in speedups if row.status == "ok"}

    def settings(row: Row) -> str | Cell:
        if row.status != "ok":
            return status_cell(row.status)
        shown = ", ".join(map(str, (row.peer_settings or {}).values()))
        return "; ".join(filter(None, [shown, _served_cell(row).text if row.requests_failed else ""]))

    def beside(show: Callable[[Row], str | Cell]) -> Callable[[Row], str | Cell]:
        """`show` of the row that compares a peer with this engine, where there is one."""
        return lambda row: "-" if (found := compared.get((row.peer, place_of(row)))) is None else show(found)

    show: Show = {
        Column("workload"): lambda row: str(row.workload),
        Column("peer"): lambda row: title_of(row, ()),
        Column("settings"): settings,
        number_column("tokens/s"): lambda row: format_number(row.tokens_per_s, ",.1f"),
        number_column("speed-up"): beside(lambda row: f"{row.speedup:.2f}x"),
        number_column("IQR"): beside(lambda row: format_number(row.speedup_iqr, ".2f")),
        Column("same tokens"): beside(lambda row: same_tokens_cell(row, row.requests)),
    }
    several = any(row.speedup_of == "median of replicates" for row in speedups)
    how = "the median over replicates" if several else "each the median over its rounds in one process"
    return build_table("Against peers", show, peers, f"speed-up: this engine's tokens/s over the peer's, {how}.")


def _server_table(servers: Sequence[Row], count: int) -> PlainTable:
    """What servers elsewhere did with the requests that they were sent."""
    names = list(dict.fromkeys(key for row in servers for key in row.settings))
    show: Show = {Column("server", whole=True): lambda row: str(row.url), **swept_columns(servers, names)}
    show |= {
        Column("status"): _served_cell,
        number_column("requests"): lambda row: format_number(row.requests, ",d"),
        number_column("tokens/s"): lambda row: format_number(row.tokens_per_s, ",.0f"),
        number_column("IQR"): lambda row: format_number(row.tokens_per_s_iqr, ",.0f"),
    }
    caption = "As the client sees it: output tokens per second."
    if any(row.goodput is not None for row in servers):
        show[number_column("goodput/s")] = lambda row: format_number(row.goodput, ",.2f")
        show[number_column("in slo")] = lambda row: format_number(row.slo_met, ".0%")
        caption += " goodput: requests a second that met the workload's slo; in slo: of all requests."
    return build_table("Over HTTP", show, servers, caption + _medians(count, "the processes' tokens/s"))


def same_tokens_cell(row: Row, asked: int | None) -> Cell:
    """Whether the tokens are the same, of `asked` requests; those that failed on either side are not compared."""
    equal, of = row.requests_equal, row.requests
    if equal == of == asked:
        return Cell("yes", "yes")
    return Cell(f"{equal} of {of} {'requests' if of == asked else 'both served'}", "partly")


def check_table(checks: Sequence[Row]) -> PlainTable:
    """A line for each variant and dtype: at how many points it was checked, and its largest error over the allowed."""

    def count_ok(rows: Sequence[Row]) -> int:
        return sum(row.status == "ok" for row in rows)

    def worst(rows: Sequence[Row], column: str, text: str) -> str:
        """The text, of the row where the column is the largest."""
        judged = [row for row in rows if getattr(row, column) is not None]
        return text.format(max(judged, key=lambda row: float(getattr(row, column)))) if judged else "-"

    show: dict[Column, Callable[[Any], str | Cell]] = {
        Column("op"): lambda rows: str(rows[0].op),
        Column("variant"): lambda rows: str(rows[0].variant),
        Column("dtype"): lambda rows: rows[0].dtype,
        Column("result"): lambda rows: status_cell(min((row.status for row in rows), key=_WORST_FIRST.index)),
        number_column("points right"): lambda rows: f"{count_ok(rows)} of {sum(row.point is not None for row in rows)}",
        number_column("worst error"): lambda rows: worst(rows, "max_error_ratio", "{0.max_error_ratio:.2f}"),
        number_column("worst RMS"): lambda rows: worst(rows, "rms_error_ratio", "{0.rms_error_ratio:.2f}"),
        Column("at"): lambda rows: worst(rows, "max_error_ratio", "{0.point}"),
    }
    caption = (
        "Every variant once at every point, against the op's definition in float64. Errors are over what the error "
        "rule allows, at most 1.00: for the largest error that is 2 times torch's own at the same dtype and 2 eps of "
        "the largest value; for the RMS error 1.25 times torch's and eps/4 (eps in float32). Small outputs have no RMS "
        "rule."
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


@dataclass(frozen=True)
class Reason:
    """Why rows are not ok: what they concern, and the command that shows it again, where there is one."""

    status: str
    about: str
    reason: str
    replay: str | None


def list_reasons(rows: Iterable[Row]) -> list[Reason]:
    """Each reason once, with what it concerns: of an arm, what tells it from the others."""
    rows = list(rows)
    names = swept_names(select_stages(rows, "engine"))
    found: dict[tuple[str, str, str | None], dict[str, None]] = {}
    for row in rows:
        unserved = row.unserved
        if row.status == "ok" and unserved is None:
            continue
        key = (row.status, str(row.reason), row.replay) if unserved is None else ("failed", unserved, None)
        found.setdefault(key, {})[_subject(row, names)] = None
    return [
        Reason(status, next(iter(abouts)) + (f" and {len(abouts) - 1} more" if len(abouts) > 1 else ""), reason, replay)
        for (status, reason, replay), abouts in found.items()
    ]


def _subject(row: Row, names: Sequence[str]) -> str:
    """A peer, "op.variant", or of an arm "swiglu=fused, block_size=16": what it has of the swept `names`, or all."""
    if row.peer or row.op:
        return row.peer or f"{row.op}.{row.variant}"
    known = {**row.arm, **row.settings}
    shown = [name for name in names if name in known] or list(known)
    return ", ".join(f"{name}={format_value(known[name])}" for name in shown)
