"""What a step of bookkeeping costs while requests come, cross pages and finish, at short and at long contexts.

python -m pytest -n 0 tests/bench/test_scheduler_steps.py --benchmark-only

The benchmark's own figures are those of schedule + commit, in this thread's CPU time; arrivals, whose digests are made
there, come between two rounds.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tests.tsched.schedulers import build_scheduler
from tsched.requests.sampling_params import SamplingParams

NUM_SEQS = 256
BLOCK_SIZE = 16
LONGEST_OUTPUT = 1024


class Service:
    """256 sequences run; as one finishes another comes. Prompts of about `context` tokens, no two alike."""

    def __init__(self, context: int, prefix_cache: str, lag: int) -> None:
        self.rng = np.random.default_rng(0)
        self.context, self.lag = context, lag
        blocks_each = -(-(context + LONGEST_OUTPUT) // BLOCK_SIZE)
        self.scheduler = build_scheduler(
            num_blocks=(NUM_SEQS + 8) * blocks_each,
            block_size=BLOCK_SIZE,
            max_num_seqs=NUM_SEQS,
            max_num_batched_tokens=NUM_SEQS * (context + 1),
            max_model_len=context + LONGEST_OUTPUT,
            prefix_cache=prefix_cache,
        )
        self.num_added = self.num_steps = self.num_finished = self.num_crossings = 0
        self.under_way: list[Any] = []
        self.tokens = np.ones(NUM_SEQS, dtype=np.int64)
        self.arrive()  # with outputs of any length, as if met at a random moment of their lives
        self.step()

    def add(self, num_output: int) -> None:
        prompt = self.rng.integers(0, 2**31, self.context - int(self.rng.integers(0, 256)))
        self.scheduler.add(self.num_added, prompt, SamplingParams(max_tokens=num_output, ignore_eos=True))
        self.num_added += 1

    def arrive(self) -> None:
        """As many come as have finished."""
        while self.scheduler.num_running + self.scheduler.num_waiting < NUM_SEQS:
            self.add(int(self.rng.integers(2, LONGEST_OUTPUT)))

    def step(self) -> None:
        """What is timed: one call of schedule and one of commit."""
        plan = self.scheduler.schedule()
        self.under_way.append(plan)
        if len(self.under_way) > self.lag:
            oldest = self.under_way.pop(0)
            self.num_finished += len(self.scheduler.commit(oldest, self.tokens[: oldest.sampled.size]))
        self.num_steps += 1
        self.num_crossings += plan.grown.size


@pytest.mark.benchmark(timer=time.thread_time)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("prefix_cache", ["none", "hash", "radix"])
@pytest.mark.parametrize("context", [1024, 32768])
def test_steps_with_arrivals_crossings_and_finishes(benchmark: Any, context: int, prefix_cache: str, lag: int) -> None:
    if not benchmark.enabled:
        context = min(context, 1024)
    service = Service(context, prefix_cache, lag)
    benchmark.pedantic(service.step, setup=service.arrive, rounds=4000, warmup_rounds=100)
    scheduler = service.scheduler
    assert scheduler.counters.num_preemptions == 0
    assert scheduler.num_running + scheduler.num_waiting + service.num_finished == service.num_added
    if benchmark.enabled:
        micros = np.array(benchmark.stats.stats.data) * 1e6
        assert micros.size == 4000
        benchmark.extra_info.update(
            mean_us=float(micros.mean()),
            p99_us=float(np.percentile(micros, 99)),
            finishes_per_step=service.num_finished / service.num_steps,
            crossings_per_step=service.num_crossings / service.num_steps,
        )
        # 256 sequences of 513 tokens in the mean end every other step, and cross into a page every sixteenth.
        assert 0.25 < benchmark.extra_info["finishes_per_step"] < 1.0
        assert 12 < benchmark.extra_info["crossings_per_step"] < 20
