"""What a prefix cache costs: digests at arrival, a long prompt's lookup, and a scheduler's steps without one hit."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import numpy as np
import pytest

from tests.tsched.schedulers import build_scheduler
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.block_pool import BlockPool
from tsched.scheduling.policies import PREFIX_CACHES
from tsched.scheduling.policies.base import PrefixCache
from tsched.scheduling.sequence import Sequence

BLOCK_SIZE = 16
PROMPT_LEN = 8192
NAMES = [name for name in PREFIX_CACHES if name != "none"]


def sequence_of(tokens: np.ndarray) -> Sequence:
    return Sequence(0, tokens, SamplingParams(), 10**6)


def prompt(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 150_000, PROMPT_LEN)


def warm_cache(name: str, pieces: int = 1) -> PrefixCache:
    """A cache that holds `prompt(0)`; in a tree as that many nodes, because as many prompts left it on the way."""
    pool = BlockPool(4 * PROMPT_LEN // BLOCK_SIZE, BLOCK_SIZE)
    cache = PREFIX_CACHES[name](pool)
    step = PROMPT_LEN // pieces
    for i in range(pieces):
        tokens = prompt(0)[: PROMPT_LEN - i * step]
        tokens[PROMPT_LEN - i * step - BLOCK_SIZE :] += i > 0
        sequence = sequence_of(tokens)
        cache.prepare(sequence)
        hits = cache.match(sequence)
        blocks = np.concatenate((hits, cache.allocate(pool.blocks_for(tokens.size) - hits.size)))
        cache.release(sequence, cache.insert(sequence, blocks, tokens.size), tokens.size)
    return cache


@pytest.mark.parametrize("name", NAMES)
def test_digests_of_a_long_prompt(benchmark: Any, name: str) -> None:
    """A lookup then works nothing out, and finds all of the prompt but its last page, whose last token has to run."""
    cache = warm_cache(name)
    prepared: list[Sequence] = []

    def arrive() -> tuple[tuple[Sequence], dict[str, Any]]:
        prepared.append(sequence_of(prompt(0)))
        return (prepared[-1],), {}

    benchmark.pedantic(cache.prepare, setup=arrive, rounds=100)
    benchmark.extra_info.update(num_tokens=PROMPT_LEN, block_size=BLOCK_SIZE)
    last = prepared[-1]
    made = last.prefix
    hits = cache.match(last)
    assert hits.size == PROMPT_LEN // BLOCK_SIZE - 1
    assert last.prefix is made
    cache.release(last, hits, 0)


@pytest.mark.parametrize("case", ["full hit", "full hit, 64 nodes", "no hit"])
@pytest.mark.parametrize("name", NAMES)
def test_lookup_of_a_long_prompt_whose_digests_are_ready(benchmark: Any, name: str, case: str) -> None:
    cache = warm_cache(name, 64 if "64" in case else 1)
    sequence = sequence_of(prompt(1) if case == "no hit" else prompt(0))
    cache.prepare(sequence)
    found: list[np.ndarray] = []

    def give_back() -> None:
        while found:
            cache.release(sequence, found.pop(), 0)

    benchmark.pedantic(lambda: found.append(cache.match(sequence)), setup=give_back, rounds=300, warmup_rounds=5)
    benchmark.extra_info.update(num_tokens=PROMPT_LEN, block_size=BLOCK_SIZE, hit_blocks=found[-1].size)
    assert found[-1].size == (0 if case == "no hit" else PROMPT_LEN // BLOCK_SIZE - 1)


@pytest.mark.parametrize("name", PREFIX_CACHES)
def test_schedule_and_commit_of_256_sequences_without_a_hit(benchmark: Any, name: str) -> None:
    """Each step a sequence of 512 + 256 tokens ends and a new one comes; the pool is full, so `hash` and `radix`
    evict as much as they keep. The digests, made as a request arrives, are timed apart.
    """
    num_seqs, prompt_len, output_len = 256, 512, 256
    scheduler = build_scheduler(
        num_blocks=num_seqs * 48,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=1024,
        prefix_cache=name,
    )
    rng, numbers = np.random.default_rng(0), count()
    arrival_seconds: list[float] = []

    def arrive() -> None:
        tokens = rng.integers(0, 150_000, prompt_len)
        began = time.perf_counter()
        scheduler.add(next(numbers), tokens, SamplingParams(max_tokens=output_len, ignore_eos=True))
        arrival_seconds.append(time.perf_counter() - began)

    def step() -> None:
        plan = scheduler.schedule()
        scheduler.commit(plan, np.ones(plan.sampled.size, dtype=np.int64))

    for _ in range(2 * output_len):
        arrive()
        step()
    arrival_seconds.clear()
    benchmark.pedantic(step, setup=arrive, rounds=1000)
    stats = scheduler.cache_stats()
    assert stats.hit_blocks == 0
    assert scheduler.num_running > 240
    assert (stats.num_evictions > 0) == (name != "none")
    benchmark.extra_info.update(
        num_evictions=stats.num_evictions, mean_arrival_us=1e6 * float(np.mean(arrival_seconds))
    )
