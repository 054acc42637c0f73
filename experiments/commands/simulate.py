"""`tk simulate`: the real scheduler and prefix cache under a trace of requests, on a GPU that need not be there."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from experiments.document import ExperimentError, nearest
from experiments.simulation.arms import CONTIGUOUS, UNBOUNDED, Arm, Setup, arms_of, make_scheduler, simulate
from experiments.simulation.hardware import find_gpu
from experiments.simulation.metrics import sparkline
from experiments.simulation.shapes import find_shape
from experiments.simulation.traces import Trace, extent_of, limited, open_trace, sped_up
from experiments.tables import add_row, new_table
from tsched.policies import ORDERS, PREEMPTIONS, PREFIX_CACHES

Row = Mapping[str, Any]

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SPARK_WIDTH = 40


@dataclass(frozen=True)
class Request:
    """What `tk simulate` was asked, as it was written. Lists are axes: every combination is one row."""

    trace: str
    policy: str
    gpu: str
    model: str
    pool_blocks: str | None
    kv_bytes: str | None
    page_size: str | None
    max_num_seqs: int
    budget: int
    max_model_len: int | None
    order: str
    preemption: str
    rate: float | None
    speedup: float | None
    limit: int | None


def run(request: Request, as_json: bool) -> int:
    """Prints a row for each arm."""
    setup, arms = _resolve(request)
    for arm in arms:
        make_scheduler(arm, setup)  # what cannot run is refused before anything does
    console = Console(stderr=True)
    columns = (TextColumn("simulate"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    doing = TextColumn("{task.fields[doing]}", style="dim", markup=False)
    total = setup.extent.num_requests * len(arms)
    rows: list[dict[str, Any]] = []
    with Progress(*columns, doing, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total, doing="")
        for i, arm in enumerate(arms):
            progress.update(task, doing=f"{arm.policy}, pool {arm.pool_blocks or 'by memory'}")
            done = i * setup.extent.num_requests

            def on_progress(finished: int, done: int = done) -> None:
                progress.update(task, completed=done + finished)

            rows.append(simulate(arm, setup, on_progress))
    if as_json:
        json.dump(rows, sys.stdout, indent=1)
        print()
    else:
        _print(rows, setup)
    return 0


def _resolve(request: Request) -> tuple[Setup, list[Arm]]:
    gpu, model = find_gpu(request.gpu), find_shape(request.model)
    policies = _names("--policy", request.policy, PREFIX_CACHES)
    _names("--order", request.order, ORDERS)
    _names("--preemption", request.preemption, PREEMPTIONS)
    trace = limited(open_trace(request.trace), request.limit)
    words = {UNBOUNDED: UNBOUNDED}
    pools: list[int | str | None] = [None]
    if request.pool_blocks is not None:
        if request.kv_bytes is not None:
            raise ExperimentError(["--pool-blocks and --kv-bytes both say how large the pool is: give one"])
        pools = [*_sizes("--pool-blocks", request.pool_blocks, words)]
    page_sizes = [trace.page_size] if request.page_size is None else request.page_size
    pages = (
        [*_sizes("--page-size", page_sizes, {CONTIGUOUS: CONTIGUOUS})] if isinstance(page_sizes, str) else [*page_sizes]
    )
    trace, factor, longest = _in_time(request, trace)
    max_model_len = request.max_model_len or longest
    setup = Setup(
        trace=trace,
        extent=extent_of(trace, [page if isinstance(page, int) else max_model_len for page in pages]),
        gpu=gpu,
        model=model,
        max_num_seqs=request.max_num_seqs,
        max_num_batched_tokens=request.budget,
        max_model_len=max_model_len,
        kv_bytes=None if request.kv_bytes is None else _bytes("--kv-bytes", request.kv_bytes),
        order=request.order,
        preemption=request.preemption,
        times_factor=factor,
    )
    return setup, arms_of(policies, pools, pages)


def _in_time(request: Request, trace: Trace) -> tuple[Trace, float, int]:
    """The trace at the rate that is asked for, how much denser that is, and the most tokens of a request."""
    extent = extent_of(trace, [])
    if request.rate is not None and request.speedup is not None:
        raise ExperimentError(["--rate and --speedup both say how fast requests come: give one"])
    factor = request.speedup if request.speedup is not None else 1.0
    if request.rate is not None:
        if extent.last_arrival <= 0:
            raise ExperimentError([f"--rate {request.rate:g}: all requests of {trace.name} come at once"])
        factor = request.rate * extent.last_arrival / extent.num_requests
    return (sped_up(trace, factor) if factor != 1.0 else trace), factor, extent.longest


def _names(option: str, text: str, known: Mapping[str, object]) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise ExperimentError([f"{option} {name}: there is {', '.join(sorted(known))}{nearest(name, known)}"])
    return names


def _sizes(option: str, text: str, words: Mapping[str, str]) -> list[int | str]:
    """Whole numbers from 1, or one of `words`, separated by commas."""
    sizes: list[int | str] = []
    for part in (part.strip() for part in text.split(",")):
        if part in words:
            sizes.append(words[part])
        elif part.isdecimal() and int(part) >= 1:
            sizes.append(int(part))
        else:
            allowed = f"whole numbers from 1, or {', '.join(words)}, separated by commas"
            raise ExperimentError([f"{option} {part}: there is {allowed}{nearest(part, words)}"])
    return list(dict.fromkeys(sizes))


def _bytes(option: str, text: str) -> int:
    """ "40GB", "40GiB" or "40000000000"."""
    number = text.rstrip("KMGiB")
    unit = text[len(number) :]
    try:
        value = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        value = 0.0
    if not 1 <= value < 2**63:
        units = ", ".join(filter(None, _UNITS))
        raise ExperimentError([f"{option} {text}: must be a number of bytes from 1, with or without {units}"])
    return int(value)


def _print(rows: Sequence[Row], setup: Setup) -> None:
    console = Console()
    where = f"{setup.model.name} on {setup.gpu.name}, {setup.extent.num_requests:,} requests of {setup.trace.name}"
    labels = _labels(rows)
    console.print(_latency_table(rows, labels, where))
    console.print(_memory_table(rows, labels))
    if len({row["pool_blocks"] for row in rows}) > 1:
        console.print(_curve(rows))
    console.print(Text("Pool use over time, full at the top", "bold"))
    for row in rows:
        name = " ".join(label(row) for _, label in labels)
        console.print(Text(f"{sparkline(row['pool_used_over_time'], 1.0, _SPARK_WIDTH):{_SPARK_WIDTH}} {name}"))
    if any(row["refused"] for row in rows):
        console.print(Text("Refused: requests that could never fit the pool or the longest sequence.", "yellow"))


def _labels(rows: Sequence[Row]) -> list[tuple[str, Callable[[Row], str]]]:
    """The columns that tell the rows apart, each with its cell."""
    labels: list[tuple[str, Callable[[Row], str]]] = [("cache", lambda row: row["prefix_cache"])]
    if len({row["pool_blocks"] for row in rows}) > 1:
        labels.append(("blocks", lambda row: f"{row['pool_blocks']:,}"))
    if len({row["page_size"] for row in rows}) > 1:
        labels.append(("page", lambda row: f"{row['page_size']:,}"))
    return labels


def _latency_table(rows: Sequence[Row], labels: Sequence[tuple[str, Callable[[Row], str]]], where: str) -> Any:
    right = ["req/s", "tok/s", "TTFT s", "TPOT ms", "end to end s"]
    table = new_table(f"Simulated: {where}", [*(name for name, _ in labels), *right], [*right, "blocks", "page"])
    for row in rows:
        add_row(
            table,
            *(label(row) for _, label in labels),
            f"{row['requests_per_s']:.3g}",
            f"{row['output_tokens_per_s']:,.0f}",
            _three(row["time_to_first_token_s"], 1),
            _three(row["time_per_output_token_s"], 1e3),
            _three(row["end_to_end_s"], 1),
        )
    table.caption = "p50/p90/p99. A roofline's times, not a GPU's: lower bounds."
    table.caption_justify = "left"
    return table


def _memory_table(rows: Sequence[Row], labels: Sequence[tuple[str, Callable[[Row], str]]]) -> Any:
    right = ["hits", "of tokens", "evicted", "preempted", "used", "peak", "running", "empty", "refused"]
    table = new_table("Memory", [*(name for name, _ in labels), *right], [*right, "blocks", "page"])
    for row in rows:
        add_row(
            table,
            *(label(row) for _, label in labels),
            f"{row['hit_rate']:.1%}",
            f"{row['hit_rate_tokens']:.1%}",
            f"{row['evictions']:,}",
            f"{row['preemptions']:,}",
            f"{row['pool_used_mean']:.1%}",
            f"{row['pool_used_peak']:.1%}",
            f"{row['running_mean']:.1f}/{row['running_peak']}",
            f"{row['empty_slots']:.1%}",
            f"{row['refused']:,}",
        )
    table.caption = (
        "hits: prompt blocks found in the cache; used: of the pool, by sequences; running: mean/peak; empty: of the "
        "slots lent, those without a token."
    )
    table.caption_justify = "left"
    return table


def _curve(rows: Sequence[Row]) -> Any:
    """Hit rate by pool size, the policies side by side."""
    policies = list(dict.fromkeys(row["prefix_cache"] for row in rows))
    pages = list(dict.fromkeys(row["page_size"] for row in rows))
    table = new_table("Hit rate by pool size", ["page", "blocks", *policies], ["page", "blocks", *policies])
    for page in pages:
        for blocks in dict.fromkeys(row["pool_blocks"] for row in rows if row["page_size"] == page):
            rates = {r["prefix_cache"]: r["hit_rate"] for r in rows if (r["page_size"], r["pool_blocks"]) == (page, blocks)}
            add_row(table, f"{page:,}", f"{blocks:,}", *(f"{rates[p]:.1%}" if p in rates else "-" for p in policies))
    return table


def _three(summary: Mapping[str, float | None], scale: float) -> str:
    return "/".join("-" if (value := summary[p]) is None else f"{value * scale:.3g}" for p in ("p50", "p90", "p99"))
