"""What /metrics shows, in Prometheus's text: vLLM's names where it has one, `tkernels_…` for the rest.

Dashboards and autoscalers read the first. Their buckets are supersets of vLLM's, whose first ones hide a fast server.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tsched.serving.device_use import read_device_use
from tsched.serving.engine_client import (
    Delta,
    EngineClient,
    EngineUnavailableError,
    ModelFacts,
    RequestTimes,
    State,
    StatsSnapshot,
)

TTFT_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
PHASE_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_BUCKETS = (1, *(2**power for power in range(3, 15)))
COUNT_BUCKETS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Seconds, but for tokens of a step and of a request."""

ENGINE = "0"
"""The label `engine`: there is one."""

_LABELS = ("model_name", "engine")
_LAG_S = 0.25
_SEVERITY = ("stop", "length", "abort", "error")
"""Of several completions' reasons the request has the last one here."""


class Metrics:
    """The metrics of one server, in a registry of their own.

    Every generation request that was received is counted once more, when it ends: as refused, where it made no token
    because of what it asked or when, or as finished, by its reason.

    Args:
        client: The engine.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.registry = CollectorRegistry()
        registry = self.registry

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(name, meaning, (*_LABELS, *labels), registry=registry)

        def histogram(name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, meaning, _LABELS, buckets=buckets, registry=registry)

        self._received = counter("tkernels_requests_received", "Generation requests received.")
        self._refused = counter("tkernels_requests_refused", "Those refused, by the error's code.", "reason")
        self._rejected = counter("vllm:admission_rejections", "Refused by a bound of the server.", "reason")
        self._finished = counter("vllm:request_success", "Those that ended otherwise.", "finished_reason")
        self._ttft = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Between a completion's outputs.", TOKEN_BUCKETS)
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time after a request's first token.", TOKEN_BUCKETS
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", PHASE_BUCKETS)
        self._times = RequestTimesHistograms(
            histogram("vllm:request_queue_time_seconds", "Waiting for a place in the batch.", PHASE_BUCKETS),
            histogram("vllm:request_prefill_time_seconds", "Computing the prompt.", PHASE_BUCKETS),
            histogram("vllm:request_decode_time_seconds", "From the first token to the last.", PHASE_BUCKETS),
        )
        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", COUNT_BUCKETS)
        self._generated = histogram("vllm:request_generation_tokens", "Output tokens of a request.", COUNT_BUCKETS)
        self._iteration = histogram("vllm:iteration_tokens_total", "Tokens of an engine's step.", STEP_BUCKETS)
        self._lag = Histogram(
            "tkernels_event_loop_lag_seconds", "How late the front end's event loop runs what is due.",
            buckets=LAG_BUCKETS, registry=registry,
        )  # fmt: skip
        self.registry.register(DeviceCollector())
        self._last: StatsSnapshot | None = None
        client.listen(self._take_stats)

    def labels(self) -> tuple[str, str]:
        """The model's name, "" before it is loaded, and the engine's number."""
        try:
            return self._client.facts.name, ENGINE
        except EngineUnavailableError:
            return "", ENGINE

    def begin_request(self) -> RequestMeter:
        """Counts a generation request that has just arrived."""
        self._received.labels(*self.labels()).inc()
        return RequestMeter(self)

    def read_engine(self) -> EngineReading:
        """What the engine says of itself now; as all that asks the client, it is called on the event loop."""
        try:
            return EngineReading(self._client.state, self._client.facts, self._client.stats())
        except EngineUnavailableError:
            return EngineReading(self._client.state, None, None)

    def expose(self, engine: EngineReading) -> bytes:
        """All of it, in Prometheus's text format. Any thread may ask."""
        return generate_latest(self.registry) + generate_latest(engine)

    async def watch_loop(self) -> None:
        """Measures the lag of the event loop that it runs on, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_S
            await asyncio.sleep(_LAG_S)
            self._lag.observe(max(0.0, loop.time() - due))

    def _take_stats(self, stats: StatsSnapshot) -> None:
        """Observes the tokens of the steps since the last snapshot; where there were several, their mean."""
        last, self._last = self._last, stats
        before = (0, 0, 0) if last is None else (last.num_steps, last.num_prompt_tokens, last.num_output_tokens)
        num_steps = stats.num_steps - before[0]
        num_tokens = stats.num_prompt_tokens - before[1] + stats.num_output_tokens - before[2]
        histogram = self._iteration.labels(*self.labels())
        for _ in range(num_steps):
            histogram.observe(num_tokens / num_steps)


class RequestTimesHistograms:
    """The phases of a request that its engine measures."""

    def __init__(self, queue: Histogram, prefill: Histogram, decode: Histogram) -> None:
        self._histograms = (queue, prefill, decode)

    def observe(self, labels: tuple[str, str], times: RequestTimes) -> None:
        for histogram, seconds in zip(self._histograms, times, strict=True):
            histogram.labels(*labels).observe(seconds)


class RequestMeter:
    """One generation request, from its arrival to its end."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._labels = metrics.labels()
        self._arrival = time.monotonic()
        self._has_token = False
        self._firsts: dict[int, float] = {}  # prompt -> when its first token came
        self._last: dict[tuple[int, int], float] = {}  # (prompt, completion) -> when its last output came
        self._num_tokens: Counts[int] = Counts()  # of each prompt
        self._times: list[RequestTimes] = []  # of the prompts that have ended

    def take(self, prompt: int, delta: Delta) -> None:
        """Observes what has come of the request's `prompt`."""
        metrics, now = self._metrics, time.monotonic()
        if delta.starts_over:
            self._forget(prompt)
        for sample in delta.samples:
            if not sample.token_ids:
                continue
            self._num_tokens[prompt] += len(sample.token_ids)
            self._firsts.setdefault(prompt, now)
            if not self._has_token:
                self._has_token = True
                metrics._ttft.labels(*self._labels).observe(now - self._arrival)
            before = self._last.get((prompt, sample.sample))
            if before is not None:
                metrics._itl.labels(*self._labels).observe(now - before)
            self._last[prompt, sample.sample] = now
        if delta.times is not None:
            self._times.append(delta.times)

    def _forget(self, prompt: int) -> None:
        """Forgets what a life of the engine made of a prompt that the next one serves anew."""
        self._num_tokens.pop(prompt, None)
        self._firsts.pop(prompt, None)
        self._last = {place: then for place, then in self._last.items() if place[0] != prompt}

    def end(self, status: int, error: str | None, finish_reasons: Iterable[str], num_prompt_tokens: int) -> None:
        """Counts the request's end.

        Args:
            status: Of the response, or the one that its error would have had.
            error: The code of its error; None where it ended well.
            finish_reasons: Of its completions that ended.
            num_prompt_tokens: Of all its prompts; 0 where they were not counted.
        """
        metrics, labels = self._metrics, self._labels
        if error is not None and self._is_refusal(error):
            metrics._refused.labels(*labels, error).inc()
            if status == 429:
                metrics._rejected.labels(*labels, error).inc()
            return
        metrics._finished.labels(*labels, _reason_of(error, finish_reasons)).inc()
        now = time.monotonic()
        metrics._e2e.labels(*labels).observe(now - self._arrival)
        metrics._prompt.labels(*labels).observe(num_prompt_tokens)
        num_tokens = self._num_tokens.total()
        metrics._generated.labels(*labels).observe(num_tokens)
        if self._times:  # an aborted request has none
            metrics._times.observe(labels, RequestTimes(*map(max, zip(*self._times, strict=True))))
        if num_tokens > len(self._last):
            decoding = max(self._last.values()) - min(self._firsts.values())
            per_token = decoding / (num_tokens / len(self._last) - 1)
            metrics._tpot.labels(*labels).observe(per_token)

    def _is_refusal(self, error: str) -> bool:
        return not self._has_token and error not in _ENDS


_ENDS = {
    "client_gone": "abort",
    "engine_error": "error",
    "internal_error": "error",
    "queue_timeout": "timeout",
    "request_timeout": "timeout",
    "unsatisfiable": "error",
}
"""Code of an error -> the reason by which a request finished. Others are refusals, or aborts where tokens had come."""


def _reason_of(error: str | None, finish_reasons: Iterable[str]) -> str:
    if error is not None:
        return _ENDS.get(error, "abort")
    return max(finish_reasons, key=_SEVERITY.index, default="abort")


@dataclass(frozen=True)
class EngineReading(Collector):
    """What the engine said when somebody asked: gauges do not freeze, and sums do not drift.

    Attributes:
        state: Of the engine.
        facts: Of the model; None until it was loaded once.
        stats: The last step's; None until then.
    """

    state: State
    facts: ModelFacts | None
    stats: StatsSnapshot | None

    def collect(self) -> Iterator[Metric]:
        state = GaugeMetricFamily("tkernels_engine_state", "1 for the state that the engine is in.", labels=["state"])
        state.add_metric([self.state], 1)
        yield state
        facts, stats = self.facts, self.stats
        if facts is None or stats is None:
            return
        labels = [facts.name, ENGINE]
        yield from chain(_gauges(labels, stats), _sums(labels, stats))
        yield _info(
            "vllm:cache_config_info", "The KV cache.", labels,
            {"block_size": str(facts.block_size), "num_gpu_blocks": str(stats.num_blocks)},
        )  # fmt: skip
        arm = GaugeMetricFamily(
            "tkernels_kernel_arm", "1 for the variant of each op.", labels=[*_LABELS, "op", "variant"]
        )
        for op, variant in sorted(stats.arm.items()):
            arm.add_metric([*labels, op, variant], 1)
        yield arm
        phases = CounterMetricFamily(
            "tkernels_step_phase_seconds", "The host's time in each phase of the steps.", labels=[*_LABELS, "phase"]
        )
        for phase, seconds in stats.phase_seconds.items():
            phases.add_metric([*labels, phase], seconds)
        yield phases


def _gauges(labels: list[str], stats: StatsSnapshot) -> Iterator[Metric]:
    values = {
        "vllm:num_requests_running": ("Sequences in the batch.", stats.num_running),
        "vllm:num_requests_waiting": ("Sequences that wait for a place in it.", stats.num_waiting),
        "vllm:kv_cache_usage_perc": ("Part of the KV cache's blocks in use.", stats.num_used_blocks / stats.num_blocks),
    }
    for name, (help_text, value) in values.items():
        family = GaugeMetricFamily(name, help_text, labels=_LABELS)
        family.add_metric(labels, value)
        yield family


def _sums(labels: list[str], stats: StatsSnapshot) -> Iterator[Metric]:
    values = {
        "vllm:prompt_tokens": ("Prompt tokens computed.", stats.num_prompt_tokens),
        "vllm:generation_tokens": ("Output tokens.", stats.num_output_tokens),
        "vllm:num_preemptions": ("Sequences that gave way to others.", stats.num_preemptions),
        "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.num_cache_queries),
        "vllm:prefix_cache_hits": ("Those found there.", stats.num_cache_hits),
        "tkernels_engine_steps": ("Steps of the engine.", stats.num_steps),
        "tkernels_worker_restarts": ("Starts of the engine after its first.", stats.num_restarts),
    }
    for name, (help_text, value) in values.items():
        family = CounterMetricFamily(name, help_text, labels=_LABELS)
        family.add_metric(labels, value)
        yield family


def _info(name: str, help_text: str, labels: list[str], values: dict[str, str]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=[*_LABELS, *values])
    family.add_metric([*labels, *values.values()], 1)
    return family


class DeviceCollector(Collector):
    """Use and memory of the GPUs, where NVML tells."""

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Any] = {
            "tkernels_device_utilization_ratio": "Part of the last moment in which a kernel ran.",
            "tkernels_device_memory_used_bytes": "Of the device's memory, by all processes.",
            "tkernels_device_memory_total_bytes": "The device's memory.",
        }
        families = [GaugeMetricFamily(name, text, labels=["device"]) for name, text in found.items()]
        for use in read_device_use():
            for family, value in zip(families, (use.utilization, use.used_bytes, use.total_bytes), strict=True):
                family.add_metric([use.device], value)
        yield from families
