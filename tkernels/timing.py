"""How long a call takes: every sample kept, the median with its spread reported, and the timer named.

On a CPU the host clock. On CUDA events, launched eagerly or replayed from a CUDA graph, with a cold or a warm L2
cache. The first call, which compiles, plans and allocates, is timed apart from all others.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tkernels.clocks import Clocks, read_clocks

Launch = Literal["eager", "graph"]
Cache = Literal["cold", "warm"]

# A host clock reads 50 ns or so late; a sample of 100 us keeps that below a thousandth.
_SHORTEST_SAMPLE_US = 100.0

# Twice a cache's size at least: a replacement policy that is not least-recently-used keeps some lines through one pass.
# And large enough that reading it keeps a GPU busy until the host has queued the call behind it: 60 us at 4 TB/s.
_FLUSHED_BYTES = 256 * 2**20


_UNREAD = Clocks.unknown("not read")


@dataclass(frozen=True)
class Timing:
    """Microseconds per call. Each sample is the mean of `calls_per_sample` calls; at least two samples.

    Attributes:
        timer: "perf_counter", or "cuda events" or "cuda graph" with "cold L2" or "warm L2".
        first_call_us: The host's time for the very first call, waited for: compilation, plans, allocations.
        before, after: The clocks around the samples.
    """

    samples_us: tuple[float, ...]
    calls_per_sample: int
    timer: str
    first_call_us: float | None = None
    before: Clocks = _UNREAD
    after: Clocks = _UNREAD

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
    launch: Launch = "eager",
    l2: Cache = "cold",
    between: Callable[[], object] | None = None,
) -> Timing:
    """`time_calls` of one call on one set of data."""
    return time_calls((call,), device, samples=samples, warmup=warmup, launch=launch, l2=l2, between=between)


def time_calls(
    calls: Sequence[Callable[[], object]],
    device: torch.device | str,
    *,
    samples: int = 20,
    warmup: int = 3,
    launch: Launch = "eager",
    l2: Cache = "cold",
    between: Callable[[], object] | None = None,
) -> Timing:
    """Times calls that do the same work, each on data of its own, and reports what one of them takes.

    Several sets of data are what lets a graph hold several calls that all meet a cold cache: a sample is then their
    mean, and the microseconds that starting a graph takes are shared. A warm cache needs the first set only.

    Args:
        calls: Each runs the work once; on CUDA it only has to queue it.
        device: Where the work is done; decides the timer.
        samples: How many to take, at least 2.
        warmup: Calls before the first sample, at least 1.
        launch: On CUDA, "eager" puts events around each call: where it is shorter than its launch, the launch is what
            is measured (behind a cold cache's flush it is hidden). "graph" replays the calls from one CUDA graph.
        l2: On CUDA, "cold" reads a large buffer before each sample, so that nothing of the call's is cached.
        between: On a CPU, called after each sample and not timed.

    Raises:
        ValueError: Too few samples, a device without a timer, or `between` on CUDA, where samples are queued together.
        Whatever a call raises, capture's refusals included.
    """
    if samples < 2 or warmup < 1 or not calls:
        raise ValueError(
            f"samples must be at least 2 and warmup and calls at least 1, got {samples}, {warmup} and {len(calls)}"
        )
    if launch not in ("eager", "graph") or l2 not in ("cold", "warm"):
        raise ValueError(f"launch {launch!r}, l2 {l2!r}: there is eager and graph, cold and warm")
    device = torch.device(device)
    if device.type == "cuda":
        if between is not None:
            raise ValueError("on CUDA nothing can be done between samples: the host queues them all before one runs")
        with torch.cuda.device(device):
            return _time_on_cuda(calls, device, samples, warmup, launch, l2)
    if device.type == "cpu":
        return _time_on_cpu(calls[0], samples, warmup, between)
    raise ValueError(f"device {device}: there is a timer for cpu and cuda")


def _time_on_cpu(call: Callable[[], object], samples: int, warmup: int, between: Callable[[], object] | None) -> Timing:
    lengths = []
    for _ in range(warmup):
        start = time.perf_counter()
        call()
        lengths.append((time.perf_counter() - start) * 1e6)
    calls = max(1, round(_SHORTEST_SAMPLE_US / max(min(lengths), 0.1)))
    taken = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        taken.append((time.perf_counter() - start) * 1e6 / calls)
        if between is not None:
            between()
    unread = read_clocks(torch.device("cpu"))
    return Timing(tuple(taken), calls, "perf_counter", lengths[0], unread, unread)


def _time_on_cuda(
    calls: Sequence[Callable[[], object]], device: torch.device, samples: int, warmup: int, launch: Launch, l2: Cache
) -> Timing:
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    # Read, not written: lines that a flush left dirty would be written back within the time of the call.
    words = max(2 * cache_bytes, _FLUSHED_BYTES) // 4
    flushed = torch.ones(words, dtype=torch.float32, device=device) if l2 == "cold" else None
    torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    calls[0]()
    torch.cuda.synchronize(device)
    first_call_us = (time.perf_counter() - start_s) * 1e6
    # A capture needs a stream of its own; warming up there too leaves each call's scratch memory where it is replayed.
    stream = torch.cuda.Stream(device) if launch == "graph" else torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            for call in calls:
                call()
        torch.cuda.synchronize(device)
        bodies, calls_per_sample = _bodies(calls, stream, launch, l2)
        for body in bodies:
            body()
        torch.cuda.synchronize(device)
        before = read_clocks(device)
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(samples)]
        for index, (start, end) in enumerate(pairs):
            if flushed is not None:
                flushed.sum()
            start.record()
            bodies[index % len(bodies)]()
            end.record()
        torch.cuda.synchronize(device)
        after = read_clocks(device)
    taken = tuple(start.elapsed_time(end) * 1e3 / calls_per_sample for start, end in pairs)
    timer = f"cuda {'graph' if launch == 'graph' else 'events'}, {l2} L2"
    return Timing(taken, calls_per_sample, timer, first_call_us, before, after)


def _bodies(
    calls: Sequence[Callable[[], object]], stream: torch.cuda.Stream, launch: Launch, l2: Cache
) -> tuple[Sequence[Callable[[], object]], int]:
    """What a sample runs, one after the other in turn, and how many calls that is."""
    if launch == "eager":
        return (calls if l2 == "cold" else calls[:1]), 1
    captured = calls if l2 == "cold" else [calls[0]] * len(calls)
    graph = torch.cuda.CUDAGraph()
    kept = []  # each call's results stay alive through the capture, or the next would write into warm lines
    with torch.cuda.graph(graph, stream=stream):
        for call in captured:
            kept.append(call())

    def replay() -> object:
        graph.replay()
        return kept

    return [replay], len(captured)
