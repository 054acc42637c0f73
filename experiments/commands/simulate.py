"""`tk simulate`: the real scheduler and prefix cache under a trace of requests, on a GPU that need not be there."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.commands.output import print_json, progress_bar
from experiments.commands.requests import SimulateRequest
from experiments.document import ExperimentError
from experiments.exits import parse_names
from experiments.option_flags import engine_options
from experiments.reporting.table_style import make_table
from experiments.simulation.arms import UNBOUNDED, Arm, Setup, make_scheduler, simulate
from experiments.simulation.hardware import find_gpu
from experiments.simulation.metrics import sparkline
from experiments.simulation.shapes import ModelShape, find_shape
from experiments.simulation.traces import Trace, bound_hit_rate, limit_requests, measure_extent, open_trace, speed_up
from tsched.options import OPTIONS, EngineOptions
from tsched.torch_free import suggest_name

Row = Mapping[str, Any]

_CONTIGUOUS = "contiguous"  # one block for each sequence, as long as the longest may be
_SPARK_WIDTH = 16


def run(request: SimulateRequest) -> int:
    """Prints a row for each arm."""
    setup, arms = _resolve(request)
    for arm in arms:
        make_scheduler(arm, setup)  # what cannot run is refused before anything does
    rows: list[dict[str, Any]] = []
    of_arm = setup.extent.num_requests
    with progress_bar("simulate", of_arm * len(arms)) as update:
        for index, arm in enumerate(arms):
            update(doing=f"{arm.policy}, pool {arm.pool_blocks or 'by memory'}")

            def on_progress(finished: int, before: int = index * of_arm) -> None:
                update(completed=before + finished)

            rows.append(simulate(arm, setup, on_progress))
    if request.as_json:
        print_json(rows)
    else:
        _print(Console(), rows, setup)
    return 0


def _resolve(request: SimulateRequest) -> tuple[Setup, list[Arm]]:
    """What the arms share, and the arms; ExperimentError for what is wrong or does not go together."""
    gpu, model = find_gpu(request.gpu), find_shape(request.model, request.architectures_from)
    options = _read_options(request)
    policies = parse_names("--policy", request.policy, OPTIONS["prefix_cache"].choices)
    trace = limit_requests(open_trace(request.trace), request.limit)
    pools = _parse_pools(request)
    pages: list[int | str] = [trace.page_size]
    if request.page_size is not None:
        pages = _parse_sizes("--page-size", request.page_size, _CONTIGUOUS)
    trace, factor, longest = _set_rate(request, trace)
    max_model_len = options.max_model_len or longest
    sizes = list(dict.fromkeys(page if isinstance(page, int) else max_model_len for page in pages))
    # The blocks of all prompts are kept to count them, as an unbounded pool keeps them; no smaller run needs so much.
    bounds = {size: bound_hit_rate(trace, size) for size in sizes} if UNBOUNDED in pools else {}
    setup = Setup(
        trace=trace,
        extent=measure_extent(trace, sizes),
        gpu=gpu,
        model=model,
        options=options,
        max_model_len=max_model_len,
        swaps_as_much=options.preemption == "swap" and "swap_bytes" not in request.engine,
        times_factor=factor,
        hit_bounds=bounds,
    )
    return setup, [Arm(policy, pool, size) for size, pool, policy in itertools.product(sizes, pools, policies)]


def _read_options(request: SimulateRequest) -> EngineOptions:
    options = engine_options(request.engine)
    if "swap_bytes" in request.engine and options.preemption != "swap":
        raise ExperimentError(["--swap-bytes hold what --preemption swap moves: give both"])
    return options


def _parse_pools(request: SimulateRequest) -> list[int | str | None]:
    """The sizes of the pool, in blocks; None is what the memory holds."""
    if request.pool_blocks is None:
        return [None]
    if "kv_cache_bytes" in request.engine or "kv_cache_fraction" in request.engine:
        raise ExperimentError(["--pool-blocks and --kv-cache-bytes both say how large the pool is: give one"])
    return [*_parse_sizes("--pool-blocks", request.pool_blocks, UNBOUNDED)]


def _set_rate(request: SimulateRequest, trace: Trace) -> tuple[Trace, float, int]:
    """The trace at the rate that is asked for, how much denser that is, and the most tokens of a request."""
    extent = measure_extent(trace, [])
    if request.rate is not None and request.speedup is not None:
        raise ExperimentError(["--rate and --speedup both say how fast requests come: give one"])
    for option, value in (("--rate", request.rate), ("--speedup", request.speedup)):
        if value is not None and not math.isfinite(value):
            raise ExperimentError([f"{option} {value}: must be a finite number above 0"])
    factor = request.speedup if request.speedup is not None else 1.0
    if request.rate is not None:
        if extent.last_arrival <= 0:
            raise ExperimentError([f"--rate {request.rate:g}: all requests of {trace.name} come at once"])
        factor = request.rate * extent.last_arrival / extent.num_requests
    return (speed_up(trace, factor) if factor != 1.0 else trace), factor, extent.longest


def _parse_sizes(option: str, text: str, word: str) -> list[int | str]:
    """Whole numbers from 1, or `word`, separated by commas."""
    sizes: list[int | str] = []
    for part in (part.strip() for part in text.split(",")):
        is_size = part.isascii() and part.isdecimal() and len(part) < 20 and int(part) >= 1
        if part != word and not is_size:
            allowed = f"whole numbers from 1, or {word}, separated by commas"
            raise ExperimentError([f"{option} {part}: there is {allowed}{suggest_name(part, [word])}"])
        sizes.append(int(part) if is_size else word)
    return list(dict.fromkeys(sizes))


def _print(console: Console, rows: Sequence[Row], setup: Setup) -> None:
    where = f"{setup.model.name} on {setup.gpu.name}, {setup.extent.num_requests:,} requests of {setup.trace.name}"
    console.print(Text(f"Simulated: {where}", "bold"))
    pools: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        pools.setdefault((row["page_size"], row["pool_blocks"]), []).append(row)
    for mine in pools.values():
        console.print(_tabulate_pool(mine))
    if len(pools) > len({page for page, _ in pools}):
        console.print(Text("Hit rate by pool size", "bold"))
        console.print(_tabulate_hit_rates(pools))
    console.print(Text(f"{_LEGEND} {_describe_weights(setup.model)}", "dim"))
    if unread := setup.model.unread_bytes(setup.max_model_len):
        some = f"{len(setup.model.layer_windows)} of {setup.model.num_layers} layers"
        lost = f"a sequence of {setup.max_model_len:,} tokens keeps {unread / 1e9:,.4g} GB in them that nobody reads"
        words = f"Blocks hold all layers' keys and values. {some} have a window: {lost}."
        console.print(Text(words, "yellow"))
    if setup.model.expert_bytes:
        traffic = rows[0]["weight_traffic"]
        words = (
            f"A step that verifies {'/'.join(traffic)} tokens of one sequence reads "
            f"{'/'.join(f'{times:.2f}' for times in traffic.values())} times the weights of a step of one token: each "
            "token brings experts of its own."
        )
        console.print(Text(words, "yellow"))
    if refused := max(row["refused"] for row in rows):
        words = f"Refused, because they could never fit the pool or the longest sequence: up to {refused:,} requests."
        console.print(Text(words, "yellow"))


def _describe_weights(model: ModelShape) -> str:
    """How much memory they are counted as, and in what."""
    kinds = "bfloat16" if model.quantization is None else f"{model.quantization} where quantized, else bfloat16"
    return f"Weights: {model.weight_bytes / 1e9:,.3g} GB, {kinds}."


def _tabulate_pool(rows: Sequence[Row]) -> Table:
    """The policies over one pool, side by side: a column each."""
    first = rows[0]
    size = f"{first['pool_blocks']:,} blocks of {first['page_size']:,} tokens, {first['pool_bytes'] / 1e9:,.4g} GB"
    names = [row["prefix_cache"] for row in rows]
    has_bound = first["hit_rate_bound"] is not None
    facts = {name: cell for name, cell in _FACTS.items() if name != "hits, at most" or has_bound}
    lines = ([name, *map(cell, rows)] for name, cell in facts.items())
    table = make_table(size, ["prefix cache", *names], lines, right=names)
    table.columns[0].no_wrap = True
    return table


_FACTS: Mapping[str, Callable[[Row], str]] = {
    "requests/s": lambda row: f"{row['requests_per_s']:.3g}",
    "tokens/s": lambda row: f"{row['output_tokens_per_s']:,.0f}",
    "TTFT s": lambda row: _percentiles(row["time_to_first_token_s"], 1),
    "TPOT ms": lambda row: _percentiles(row["time_per_output_token_s"], 1e3),
    "end to end s": lambda row: _percentiles(row["end_to_end_s"], 1),
    "hits, blocks": lambda row: f"{row['hit_rate']:.1%}",
    "hits, at most": lambda row: f"{row['hit_rate_bound']:.1%}",
    "hits, tokens": lambda row: f"{row['hit_rate_tokens']:.1%}",
    "GB saved": lambda row: f"{row['bytes_saved'] / 1e9:,.0f}",
    "evicted blocks": lambda row: f"{row['evictions']:,}",
    "preemptions": lambda row: f"{row['preemptions']:,}",
    "running": lambda row: f"{row['running_mean']:.1f}/{row['running_peak']}",
    "pool in use": lambda row: f"{row['pool_used_mean'] * 100:.3g}/{row['pool_used_peak'] * 100:.3g}%",
    "pool cached": lambda row: f"{row['pool_cached_mean']:.1%}",
    "empty slots": lambda row: f"{row['empty_slots']:.1%}",
    "time busy": lambda row: f"{row['busy_share']:.1%}",
    "use over time": lambda row: sparkline(row["pool_used_over_time"], 1.0, _SPARK_WIDTH),
}

_LEGEND = (
    "Times: p50/p90/p99, by a roofline: lower bounds, not a GPU's. Tokens: output. Hits: of the prompts'; at "
    "most: what the trace itself has to give. "
    "Running, in use: mean/peak; in use: by sequences; cached: held by the cache alone. Empty: of the slots of the "
    "sequences' blocks, those without a token."
)


def _tabulate_hit_rates(pools: Mapping[tuple[int, int], Sequence[Row]]) -> Table:
    """A line for each pool, the policies side by side."""
    policies = list(dict.fromkeys(row["prefix_cache"] for rows in pools.values() for row in rows))
    sizes = ["page", "blocks"] if len({page for page, _ in pools}) > 1 else ["blocks"]
    lines = []
    for pool, rows in pools.items():
        rates = {row["prefix_cache"]: row["hit_rate"] for row in rows}
        lines.append([*(f"{size:,}" for size in pool[-len(sizes) :]), *(f"{rates[name]:.1%}" for name in policies)])
    columns = [*sizes, *policies]
    return make_table("", columns, lines, right=columns)


def _percentiles(summary: Mapping[str, float | None], scale: float) -> str:
    return "/".join(_format_figure(summary[name], scale) for name in ("p50", "p90", "p99"))


def _format_figure(value: float | None, scale: float) -> str:
    if value is None:
        return "-"
    return f"{value * scale:.3g}" if value * scale < 999.5 else f"{value * scale:,.0f}"
