"""The loop, with the real scheduler: times worked out by hand, accounts, and what it must not load."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from experiments.simulation.hardware import Gpu
from experiments.simulation.metrics import Metrics
from experiments.simulation.replay import Replay
from experiments.simulation.shapes import find_shape
from experiments.simulation.step_time import StepTime, Work
from experiments.simulation.traces import PRIVATE_TOKENS, Request, open_trace
from tests.tsched.schedulers import build_scheduler
from tsched.scheduling.policies import ORDERS, PREFIX_CACHES
from tsched.scheduling.scheduler import Scheduler
from tsched.scheduling.sequence import Ints

DATA = Path(__file__).parent / "data"
GPU = Gpu("some", 80 * 10**9, memory_bytes_per_s=3e12, flops_per_s=9e14, host_bytes_per_s=6e10)
MODEL = find_shape("Qwen3-4B")


def private(id: int, arrival: float, input_len: int, output_len: int) -> Request:
    return Request(id, arrival, input_len, output_len, (PRIVATE_TOKENS + id,), input_len)


def make_scheduler(num_blocks: int = 4096, page_size: int = 16, seqs: int = 16, **more: object) -> Scheduler:
    return build_scheduler(
        num_blocks=num_blocks,
        block_size=page_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=int(str(more.pop("budget", 2048))),
        max_model_len=8192,
        **more,  # type: ignore[arg-type]
    )


def replayed(
    requests: Sequence[Request] | Iterator[Request], scheduler: Scheduler, lookahead: int | None = None
) -> Metrics:
    step_time = StepTime(GPU, MODEL, scheduler.pool.block_size)
    metrics = Replay(scheduler, iter(requests), step_time, lookahead=lookahead).run()
    assert scheduler.pool.num_referenced == 0
    assert not scheduler.has_unfinished
    return metrics


def test_a_request_alone_takes_the_time_of_its_steps() -> None:
    step = StepTime(GPU, MODEL, 16).step
    prefill = step(Work(2048, 0, 2048 * 2049 // 2, 2048)) + step(
        Work(952, 1, 952 * 2048 + 952 * 953 // 2, 3000)
    )  # the prompt's 3000 tokens in two steps
    decodes = [step(Work(1, 1, context, context)) for context in range(3001, 3010)]
    metrics = replayed([private(0, 5.0, 3000, 10)], make_scheduler())
    assert metrics.clock == pytest.approx(5.0 + prefill + sum(decodes), rel=1e-12)
    assert metrics.busy_seconds == pytest.approx(prefill + sum(decodes))
    assert sum(metrics.time_to_first_token) == pytest.approx(prefill)
    assert sum(metrics.time_per_output_token) == pytest.approx(sum(decodes) / 9)
    assert sum(metrics.end_to_end) == pytest.approx(prefill + sum(decodes))
    assert (metrics.prompt_tokens, metrics.output_tokens, metrics.num_finished) == (3000, 10, 1)


def test_idle_time_is_skipped_and_not_counted() -> None:
    alone = replayed([private(0, 0.0, 100, 5)], make_scheduler())
    both = replayed([private(0, 0.0, 100, 5), private(1, 1e6, 100, 5)], make_scheduler())
    assert both.clock == pytest.approx(1e6 + alone.clock)
    assert both.busy_seconds == pytest.approx(2 * alone.busy_seconds)
    assert both.running.mean == pytest.approx(both.busy_seconds / both.clock)


def test_one_token_needs_no_decode_and_has_no_time_per_token() -> None:
    metrics = replayed([private(0, 0.0, 50, 1)], make_scheduler())
    assert not metrics.time_per_output_token
    assert metrics.time_to_first_token.tolist() == metrics.end_to_end.tolist() == [metrics.clock]


@pytest.mark.parametrize("name", ["azure.csv", "mooncake.jsonl"])
@pytest.mark.parametrize("policy", sorted(PREFIX_CACHES))
def test_every_request_of_a_trace_finishes_whatever_the_pressure(name: str, policy: str) -> None:
    requests = list(open_trace(str(DATA / name)).requests())
    longest = max(r.input_len + r.output_len for r in requests)
    for num_blocks in (-(-longest // 16), 10_000):
        metrics = replayed(requests, make_scheduler(num_blocks, prefix_cache=policy))
        assert metrics.num_finished == metrics.num_requests == len(requests)
        assert metrics.output_tokens == sum(r.output_len for r in requests)
        assert metrics.prompt_tokens == sum(r.input_len for r in requests)
        assert metrics.wanted_blocks == sum(-(-r.input_len // 16) for r in requests)
        assert len(metrics.time_to_first_token) == len(metrics.end_to_end) == len(requests)
        assert 0 < metrics.used.mean <= metrics.peak_used <= num_blocks
        if policy == "none":
            assert metrics.hit_tokens == 0


def test_a_request_that_can_never_fit_is_refused_and_the_rest_go_on() -> None:
    requests = [private(0, 0.0, 100, 5), private(1, 0.0, 1000, 5), private(2, 0.0, 100, 5)]
    metrics = replayed(requests, make_scheduler(num_blocks=10))
    assert (metrics.num_requests, metrics.num_refused, metrics.num_finished) == (3, 1, 2)


@pytest.mark.parametrize("policy", sorted(PREFIX_CACHES))
def test_first_come_first_served_does_not_see_who_waits_outside(policy: str) -> None:
    """A bounded lookahead changes nothing, preemptions and hits included."""
    requests = list(open_trace(str(DATA / "mooncake.jsonl")).requests())
    outcomes = []
    for lookahead in (None, 5):
        scheduler = make_scheduler(240, seqs=4, prefix_cache=policy)
        metrics = replayed(requests, scheduler, lookahead)
        outcomes.append((metrics.clock, metrics.hit_tokens, metrics.end_to_end.tolist(), asdict(scheduler.counters)))
    assert outcomes[0] == outcomes[1]


def test_preemptions_happen_and_a_preempted_request_counts_once() -> None:
    requests = [private(i, 0.0, 200, 400) for i in range(6)]
    scheduler = make_scheduler(100)
    metrics = replayed(requests, scheduler)
    assert scheduler.counters.num_preemptions > 0
    assert len(metrics.time_to_first_token) == 6
    assert metrics.wanted_blocks == 6 * 13


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_orders_are_drivable(order: str) -> None:
    assert replayed(open_trace(str(DATA / "azure.csv")).requests(), make_scheduler(order=order)).num_finished == 30


@pytest.mark.parametrize("name", ["azure.csv", "mooncake.jsonl"])
@pytest.mark.parametrize("policy", sorted(PREFIX_CACHES))
def test_skipped_steps_change_no_figure(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock to the last bit, the areas but for the order of their sums."""
    requests = list(open_trace(str(DATA / name)).requests())
    num_blocks = -(-max(r.input_len + r.output_len for r in requests) // 16)
    outcomes, counts = [], []
    for is_skipping in (True, False):
        if not is_skipping:
            monkeypatch.setattr(Scheduler, "quiet_steps", lambda self, most: 0)
        scheduler = make_scheduler(num_blocks, prefix_cache=policy)
        skip = scheduler.skip_steps
        counts.append(0)

        def counted(count: int, tokens: Ints, skip: Callable[[int, Ints], Ints] = skip) -> Ints:
            counts[-1] += count
            return skip(count, tokens)

        monkeypatch.setattr(scheduler, "skip_steps", counted)
        outcomes.append((replayed(requests, scheduler), scheduler))
    (one, first), (other, second) = outcomes
    assert counts[0] > first.counters.num_steps / 3
    assert counts[1] == 0
    assert first.counters == second.counters
    assert first.cache_stats() == second.cache_stats()
    assert (one.clock, one.hit_tokens, one.peak_used, one.peak_running) == (
        other.clock, other.hit_tokens, other.peak_used, other.peak_running,
    )  # fmt: skip
    for times in ("time_to_first_token", "time_per_output_token", "end_to_end"):
        assert getattr(one, times) == getattr(other, times)
    for area in ("busy_seconds", "lent_slot_seconds", "filled_slot_seconds"):
        assert getattr(one, area) == pytest.approx(getattr(other, area), rel=1e-9)
    assert one.used.mean == pytest.approx(other.used.mean, rel=1e-9)
    assert one.running.mean == pytest.approx(other.running.mean, rel=1e-9)


def test_the_more_urgent_goes_first_where_the_order_looks_at_it() -> None:
    """The last of six is short and urgent: it is served first, or last."""
    requests = [private(i, 0.0, 500, 200) for i in range(5)] + [replace(private(5, 0.0, 10, 1), priority=-1)]
    quickest = {
        order: min(replayed(requests, make_scheduler(seqs=1, order=order)).end_to_end) for order in ("fcfs", "priority")
    }
    step = StepTime(GPU, MODEL, 16).step
    assert quickest["priority"] == pytest.approx(step(Work(10, 1, 55, 10)), rel=1e-3)
    alone = replayed(requests[:1], make_scheduler(seqs=1)).clock
    assert quickest["fcfs"] == pytest.approx(alone, rel=1e-3)


def test_empty_slots_are_those_past_the_tokens() -> None:
    """Reserved whole, a sequence's slots are empty but for its tokens; in pages of 16, but for the last page's."""
    requests = [private(i, 0.0, 64, 300) for i in range(8)]
    paged = replayed(requests, make_scheduler(512))
    reserved = replayed(requests, make_scheduler(8, page_size=1024))
    filled = {m: m.filled_slot_seconds / m.lent_slot_seconds for m in (paged, reserved)}
    assert 1 - 15 / 64 < filled[paged] < 1
    assert 64 / 1024 < filled[reserved] < 364 / 1024


def test_the_loop_loads_neither_torch_nor_a_model() -> None:
    command = (
        "import sys; import experiments.simulation.replay, experiments.simulation.arms; "
        "assert not {'torch', 'tmodel', 'tkernels', 'triton'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
