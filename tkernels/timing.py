"""How long a call takes: every sample kept, the median with its spread reported, and the timer named.

On a CPU the host clock; on CUDA events around each call, queued behind one another, so that launch cost is hidden
wherever the device is busy, with the L2 cache flushed before each call unless asked not to.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Timer = Literal["perf_counter", "cuda events, cold L2", "cuda events, warm L2"]

# A host clock reads 50 ns or so late; a sample of 100 us keeps that below a thousandth.
_SHORTEST_SAMPLE_US = 100.0


@dataclass(frozen=True)
class Timing:
    """Microseconds per call. Each sample is the mean of `calls_per_sample` calls; at least two samples."""

    samples_us: tuple[float, ...]
    calls_per_sample: int
    timer: Timer

    def __post_init__(self) -> None:
        if len(self.samples_us) < 2:
            raise ValueError(f"a timing needs at least 2 samples for its spread, got {len(self.samples_us)}")

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def iqr_us(self) -> float:
        """The distance between the first and the third quartile: the spread that outliers do not move."""
        first, _, third = statistics.quantiles(self.samples_us, n=4, method="inclusive")
        return third - first

    @property
    def min_us(self) -> float:
        return min(self.samples_us)

    @property
    def max_us(self) -> float:
        return max(self.samples_us)


def time_call(
    call: Callable[[], object],
    device: torch.device | str,
    *,
    samples: int = 20,
    warmup: int = 3,
    flush_l2: bool = True,
) -> Timing:
    """Times `call`, which is run about `warmup + samples` times, more often where one call is too short for the clock.

    Args:
        call: runs the work once; on CUDA it only has to queue it.
        device: where the work is done; decides the timer.
        samples: how many to take, at least 2. warmup: calls before the first sample, at least 1.
        flush_l2: on CUDA, overwrite the L2 cache before every call. A CPU's caches stay as they are.
    """
    if samples < 2 or warmup < 1:
        raise ValueError(f"samples must be at least 2 and warmup at least 1, got {samples} and {warmup}")
    device = torch.device(device)
    if device.type == "cuda":
        return _time_on_cuda(call, device, samples, warmup, flush_l2)
    if device.type == "cpu":
        return _time_on_cpu(call, samples, warmup)
    raise ValueError(f"device {device}: there is a timer for cpu and cuda")


def _time_on_cpu(call: Callable[[], object], samples: int, warmup: int) -> Timing:
    shortest_us = float("inf")
    for _ in range(warmup):
        start = time.perf_counter()
        call()
        shortest_us = min(shortest_us, (time.perf_counter() - start) * 1e6)
    calls = max(1, round(_SHORTEST_SAMPLE_US / max(shortest_us, 0.1)))
    taken = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        taken.append((time.perf_counter() - start) * 1e6 / calls)
    return Timing(tuple(taken), calls, "perf_counter")


def _time_on_cuda(
    call: Callable[[], object], device: torch.device, samples: int, warmup: int, flush_l2: bool
) -> Timing:
    with torch.cuda.device(device):
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        # Twice its size: a replacement policy that is not least-recently-used keeps some lines through one pass.
        flush = torch.empty(2 * cache_bytes, dtype=torch.uint8, device=device) if flush_l2 else None
        for _ in range(warmup):
            call()
        torch.cuda.synchronize(device)
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(samples)]
        for start, end in pairs:
            if flush is not None:
                flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(device)
        taken = tuple(start.elapsed_time(end) * 1e3 for start, end in pairs)
    return Timing(taken, 1, "cuda events, cold L2" if flush_l2 else "cuda events, warm L2")
