"""How much of a full pool is lost to half-filled last pages, and what a step of bookkeeping costs meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.tsched.schedulers import build_scheduler
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.scheduler import Scheduler

BLOCK_SIZE = 16
NUM_BLOCKS = 4096


def full_pool(seed: int = 0) -> Scheduler:
    """A scheduler whose pool is the bottleneck: more requests than fit, of 250 to 750 tokens when they end."""
    rng = np.random.default_rng(seed)
    scheduler = build_scheduler(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        max_model_len=1024,
    )
    for i in range(1200):
        prompt = np.ones(rng.integers(200, 700), dtype=np.int64)
        scheduler.add(i, prompt, SamplingParams(max_tokens=int(rng.integers(50, 200)), ignore_eos=True))
    return scheduler


def step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    scheduler.commit(plan, np.ones(plan.sampled.size, dtype=np.int64))


def test_last_page_waste_of_a_full_pool(benchmark: Any) -> None:
    scheduler = full_pool()
    waste, occupancy, lengths = [], [], []

    def serve() -> None:
        while scheduler.num_waiting:
            step(scheduler)
            if scheduler.pool.num_referenced > 0.9 * NUM_BLOCKS:
                waste.append(scheduler.last_page_waste())
                occupancy.append(scheduler.pool.num_referenced / NUM_BLOCKS)
                lengths.append(scheduler.table.known[scheduler.running].mean())

    benchmark.pedantic(serve, rounds=1)
    benchmark.extra_info.update(
        block_size=BLOCK_SIZE,
        num_full_steps=len(waste),
        mean_length_tokens=float(np.mean(lengths)),
        mean_occupancy=float(np.mean(occupancy)),
        mean_last_page_waste=float(np.mean(waste)),
        max_last_page_waste=float(np.max(waste)),
        num_preemptions=scheduler.counters.num_preemptions,
    )
    print(benchmark.extra_info)
    assert len(waste) > 100
    assert np.mean(lengths) == pytest.approx(500, rel=0.1)
    assert 0 < np.max(waste) < 0.05


@pytest.mark.parametrize("num_seqs", [32, 256])
def test_schedule_and_commit_of_a_decode_step(benchmark: Any, num_seqs: int) -> None:
    scheduler = build_scheduler(
        num_blocks=num_seqs * 128, block_size=16, max_num_seqs=num_seqs, max_num_batched_tokens=4096, max_model_len=2048
    )
    for i in range(num_seqs):
        scheduler.add(i, [1] * 8, SamplingParams(max_tokens=None, ignore_eos=True))
    step(scheduler)
    benchmark.pedantic(step, args=(scheduler,), rounds=500, warmup_rounds=10)
    benchmark.extra_info.update(num_seqs=num_seqs)
    assert scheduler.num_running == num_seqs
