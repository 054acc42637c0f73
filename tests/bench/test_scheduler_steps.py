"""What a step of bookkeeping costs while requests come, cross pages and finish, at short and at long contexts.

python -m pytest -n 0 tests/bench/test_scheduler_steps.py --benchmark-only -s
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tsched.sampling_params import SamplingParams
from tsched.scheduler import Scheduler

NUM_SEQS = 256
BLOCK_SIZE = 16
LONGEST_OUTPUT = 1024


class Service:
    """256 sequences run; as one finishes another comes. Prompts of about `context` tokens, no two alike."""

    def __init__(self, context: int, prefix_cache: str, lag: int) -> None:
        self.rng = np.random.default_rng(0)
        self.context, self.lag = context, lag
        blocks_each = -(-(context + LONGEST_OUTPUT) // BLOCK_SIZE)
        self.scheduler = Scheduler(
            num_blocks=(NUM_SEQS + 8) * blocks_each,
            block_size=BLOCK_SIZE,
            max_num_seqs=NUM_SEQS,
            max_num_batched_tokens=NUM_SEQS * (context + 1),
            max_model_len=context + LONGEST_OUTPUT,
            prefix_cache=prefix_cache,
        )
        self.num_added = self.num_steps = self.num_finished = self.num_crossings = 0
        self.under_way: list[Any] = []
        self.seconds: list[float] = []
        for _ in range(NUM_SEQS):
            self.add(int(self.rng.integers(2, LONGEST_OUTPUT)))  # as if met at a random moment of their lives
        self.step()

    def add(self, num_output: int) -> None:
        prompt = self.rng.integers(0, 2**31, self.context - int(self.rng.integers(0, 256)))
        self.scheduler.add(self.num_added, prompt, SamplingParams(max_tokens=num_output, ignore_eos=True))
        self.num_added += 1

    def step(self) -> None:
        """Timed: one call of schedule and one of commit. Untimed: arrivals, whose digests are made there."""
        while self.scheduler.num_running + self.scheduler.num_waiting < NUM_SEQS:
            self.add(int(self.rng.integers(2, LONGEST_OUTPUT)))
        began = time.thread_time()
        plan = self.scheduler.schedule()
        scheduled = time.thread_time()
        self.under_way.append(plan)
        tokens = None
        finished: list[Any] = []
        if len(self.under_way) > self.lag:
            oldest = self.under_way.pop(0)
            tokens = np.ones(oldest.sampled.size, dtype=np.int64)
            resumed = time.thread_time()
            finished = self.scheduler.commit(oldest, tokens)
            self.seconds.append(time.thread_time() - resumed + scheduled - began)
        self.num_steps += 1
        self.num_finished += len(finished)
        self.num_crossings += plan.grown.size


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("prefix_cache", ["none", "hash", "radix"])
@pytest.mark.parametrize("context", [1024, 32768])
def test_steps_with_arrivals_crossings_and_finishes(benchmark: Any, context: int, prefix_cache: str, lag: int) -> None:
    if not benchmark.enabled:
        context = min(context, 1024)
    service = Service(context, prefix_cache, lag)
    benchmark.pedantic(service.step, rounds=4000, warmup_rounds=100)
    micros = np.array(service.seconds[100:] or service.seconds) * 1e6
    figures = {f"p{q}_us": float(np.percentile(micros, q)) for q in (50, 99)}
    per_step = {
        "finishes_per_step": service.num_finished / service.num_steps,
        "crossings_per_step": service.num_crossings / service.num_steps,
    }
    benchmark.extra_info.update(mean_us=float(micros.mean()), **figures, **per_step)
    print({"context": context, "prefix_cache": prefix_cache, "lag": lag, **benchmark.extra_info})
    assert service.scheduler.counters.num_preemptions == 0
    assert service.scheduler.num_running + service.num_finished <= service.num_added
