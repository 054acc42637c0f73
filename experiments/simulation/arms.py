"""What is compared: arms of settings, and one arm's run as a row of facts."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from experiments.document import ExperimentError
from experiments.simulation.hardware import Gpu
from experiments.simulation.metrics import Metrics, summarize_times
from experiments.simulation.replay import Replay
from experiments.simulation.shapes import ModelShape
from experiments.simulation.step_time import StepTime
from experiments.simulation.traces import Extent, Trace
from tsched.options import BYTES_END, GPU_FRACTION, EngineOptions, OptionError
from tsched.resolved_options import (
    CacheUnits,
    ResolvedOptions,
    check_expected_len,
    fit_cache,
    fit_host,
    most_states,
    most_units,
)
from tsched.scheduling.scheduler import Scheduler

UNBOUNDED = "unbounded"

VERIFIED = (2, 3, 5, 9)
"""Tokens of one sequence in a step that verifies 1, 2, 4 or 8 drafts."""


@dataclass(frozen=True)
class Arm:
    """One run's settings. pool_blocks: UNBOUNDED is as many as all requests fill, None what the memory holds."""

    policy: str
    pool_blocks: int | str | None
    page_size: int


@dataclass(frozen=True)
class Setup:
    """What all arms share.

    options        the engine's; an arm has its own prefix cache, blocks and block size
    max_model_len  tokens of the longest sequence
    swaps_as_much  swapped sequences have as many blocks on the host as the pool has, not swap_bytes
    times_factor   how many times as dense as the trace's own its arrivals are
    hit_bounds     by page size, where a pool is unbounded: what the trace itself has to give
    """

    trace: Trace
    extent: Extent
    gpu: Gpu
    model: ModelShape
    options: EngineOptions
    max_model_len: int
    swaps_as_much: bool
    times_factor: float
    hit_bounds: Mapping[int, float]


def memory_left(setup: Setup) -> int:
    """Bytes that kv_cache_fraction of the GPU's memory leaves beside the weights; ExperimentError for none."""
    gpu, model, fraction = setup.gpu, setup.model, setup.options.kv_cache_fraction
    left = int(gpu.memory_bytes * (GPU_FRACTION if fraction is None else fraction)) - model.weight_bytes
    if left <= 0:
        sizes = f"its weights take {model.weight_bytes / 1e9:.1f} GB, {gpu.name} has {gpu.memory_bytes / 1e9:.0f} GB"
        raise ExperimentError([f"--model {model.name}: {sizes}"])
    return left


def fit_arm(arm: Arm, setup: Setup) -> ResolvedOptions:
    """The sizes of the arm's scheduler; ExperimentError where the bytes hold no block, or too few states.

    A pool that is given by its bytes has all of them, where the engine takes no more than max_num_seqs requests fill,
    and pages may be of any size: what is asked here is what a cache could give.
    """
    longest, page_size, options = setup.max_model_len, arm.page_size, replace(setup.options, prefix_cache=arm.policy)
    sizes = setup.model.unit_sizes(page_size)
    try:
        check_expected_len(options, sizes, longest)
        if arm.pool_blocks is None:
            given = options.kv_cache_bytes
            most_blocks = BYTES_END if sizes.block_bytes else most_units(options, sizes, longest, page_size).num_blocks
            left, most = memory_left(setup) if given is None else given, CacheUnits(most_blocks, BYTES_END)
            units = fit_cache(options, sizes, left, longest, page_size, most)
        else:
            num_blocks = setup.extent.num_blocks[page_size] if isinstance(arm.pool_blocks, str) else arm.pool_blocks
            units = CacheUnits(num_blocks, most_states(options, sizes, num_blocks))
        host = units if setup.swaps_as_much else fit_host(options, sizes, longest, page_size)
    except OptionError as error:
        raise ExperimentError([str(error)]) from None
    return ResolvedOptions(
        options,
        longest,
        page_size,
        num_blocks=units.num_blocks,
        num_host_blocks=host.num_blocks,
        num_states=units.num_states,
        num_host_states=host.num_states,
        state_interval=sizes.state_interval,
        window=sizes.window,
    )


def make_scheduler(arm: Arm, setup: Setup) -> Scheduler:
    """ExperimentError where the settings do not go together."""
    fitted = fit_arm(arm, setup)
    try:
        return Scheduler(fitted)
    except ValueError as error:
        raise ExperimentError([str(error)]) from None
    except MemoryError:
        options, longest = fitted.options, setup.max_model_len
        sizes = f"{options.max_num_seqs:,} sequences of {longest:,} tokens, {fitted.num_blocks:,} blocks"
        raise ExperimentError([f"{sizes}: the tables of these do not fit this machine's memory"]) from None


def simulate(arm: Arm, setup: Setup, on_progress: Callable[[int], None] = lambda finished: None) -> dict[str, Any]:
    """The arm's row."""
    scheduler = make_scheduler(arm, setup)
    step_time = StepTime(setup.gpu, setup.model, scheduler.pool.block_size)
    lookahead = setup.options.max_num_seqs + 1 if setup.options.order == "fcfs" else None
    replay = Replay(scheduler, setup.trace.requests(), step_time, lookahead=lookahead)
    began, cpu_began = time.perf_counter(), time.process_time()
    metrics = replay.run(on_progress)
    cpu_seconds = time.process_time() - cpu_began
    return {
        **_row(arm, setup, scheduler, metrics),
        "wall_seconds": time.perf_counter() - began,
        "cpu_seconds": cpu_seconds,
        "requests_per_cpu_minute": _ratio(metrics.num_requests * 60, cpu_seconds),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _row(arm: Arm, setup: Setup, scheduler: Scheduler, metrics: Metrics) -> dict[str, Any]:
    """Times in seconds. quantization: the method of the layers that are; the other weights are bfloat16.
    hit_rate: prompt blocks found over all prompt blocks, ceil(prompt / page_size) each.
    hit_rate_bound: what no cache can exceed on this trace; where the pool is unbounded, else null. unread_bytes: of the
    longest sequence's, those that layers with a window keep for others without. weight_traffic: tokens of one sequence
    that a step verifies -> how many times the weights it reads that a step of one token reads.
    """
    pool, clock, options, used = scheduler.pool, metrics.clock, setup.options, metrics.used.means()
    return {
        "trace": setup.trace.name,
        "gpu": setup.gpu.name,
        "model": setup.model.name,
        "weight_bytes": setup.model.weight_bytes,
        "quantization": setup.model.quantization,
        "prefix_cache": arm.policy,
        "order": options.order,
        "preemption": options.preemption,
        "page_size": pool.block_size,
        "pool_blocks": pool.num_blocks,
        "pool": str(arm.pool_blocks) if arm.pool_blocks is not None else "memory",
        "pool_bytes": pool.num_blocks * pool.block_size * setup.model.kv_bytes_per_token,
        "states": 0 if scheduler.states is None else scheduler.states.pool.num_blocks,
        "state_bytes": setup.model.state_bytes,
        "window": setup.model.window,
        "unread_bytes": setup.model.unread_bytes(setup.max_model_len),
        "weight_traffic": {str(tokens): setup.model.weight_traffic(tokens) for tokens in VERIFIED},
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_model_len": setup.max_model_len,
        "max_chunk_tokens": options.max_chunk_tokens,
        "chunked_prefill": options.chunked_prefill,
        "decode_share": options.decode_share,
        "expected_len": options.expected_len,
        "host_blocks": scheduler.host_pool.num_blocks if scheduler.host_pool is not None else 0,
        "speedup": setup.times_factor,
        "requests": metrics.num_requests,
        "finished": metrics.num_finished,
        "refused": metrics.num_refused,
        "seconds": clock,
        "busy_share": metrics.busy_share,
        "requests_per_s": _ratio(metrics.num_finished, clock),
        "prompt_tokens_per_s": _ratio(metrics.prompt_tokens, clock),
        "output_tokens_per_s": _ratio(metrics.output_tokens, clock),
        "time_to_first_token_s": summarize_times(metrics.time_to_first_token),
        "time_per_output_token_s": summarize_times(metrics.time_per_output_token),
        "end_to_end_s": summarize_times(metrics.end_to_end),
        "hit_rate": _ratio(metrics.hit_blocks, metrics.wanted_blocks),
        "hit_rate_bound": setup.hit_bounds.get(pool.block_size) if arm.pool_blocks == UNBOUNDED else None,
        "hit_blocks": metrics.hit_blocks,
        "prompt_blocks": metrics.wanted_blocks,
        "hit_rate_tokens": _ratio(metrics.hit_tokens, metrics.prompt_tokens),
        "hit_tokens": metrics.hit_tokens,
        "bytes_saved": metrics.hit_tokens * setup.model.kv_bytes_per_token,
        "evictions": scheduler.cache_stats().num_evictions,
        "preemptions": scheduler.counters.num_preemptions,
        "swapped_blocks": scheduler.counters.num_swapped_out + scheduler.counters.num_swapped_in,
        "steps": scheduler.counters.num_steps,
        "running_mean": metrics.running.mean,
        "running_peak": metrics.peak_running,
        "pool_used_mean": metrics.used.mean / pool.num_blocks,
        "pool_used_peak": metrics.peak_used / pool.num_blocks,
        "empty_slots": 1.0 - _ratio(metrics.filled_slot_seconds, metrics.lent_slot_seconds),
        "pool_cached_mean": metrics.cached.mean / pool.num_blocks,
        "pool_bin_seconds": clock / len(used) if used else 0.0,
        "pool_used_over_time": [level / pool.num_blocks for level in used],
        "pool_cached_over_time": [level / pool.num_blocks for level in metrics.cached.means()],
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
