"""Schedules as a function of a seed: requests that arrive over time and share prefixes, forks, aborts, and a pool that
is too small for them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tsched.policies import ORDERS, PREEMPTIONS, PREFIX_CACHES
from tsched.sampling_params import SamplingParams

MAX_MODEL_LEN = 72
VOCAB_SIZE = 300
EOS = 0


@dataclass(frozen=True)
class Request:
    """What it gets alone depends on the prompt, the parameters and the salt; not on when and how it is served."""

    prompt: tuple[int, ...]
    params: SamplingParams
    salt: bytes = b""
    arrival: int = 0  # the step before which it comes
    priority: int = 0

    @property
    def max_length(self) -> int:
        return min(len(self.prompt) + (self.params.max_tokens or MAX_MODEL_LEN), MAX_MODEL_LEN)


@dataclass(frozen=True)
class Event:
    """Before `step`, one of those present is aborted, or forked where `fork` has the child's parameters.

    Who it is follows from `pick` in [0, 1): first a state is chosen, then one in that state, so that rare states have
    their share. A child takes over the share `kept` of its parent's tokens, all of them where it is 1.
    """

    step: int
    pick: float
    fork: SamplingParams | None = None
    kept: float = 1.0


@dataclass(frozen=True)
class Schedule:
    seed: int
    options: dict[str, Any]  # of the Scheduler
    lag: int  # plans that commit is behind
    requests: tuple[Request, ...]
    events: tuple[Event, ...]
    pressure: float  # blocks that max_num_seqs of the requests need at their longest, over those of the pool


def draw_schedule(seed: int, num_requests: int | None = None, num_aborts: int | None = None, **fixed: Any) -> Schedule:
    """The schedule of `seed`: its pressure lies between 110% and 400%. `fixed` options are not drawn."""
    rng = random.Random(seed)
    while True:
        block_size = rng.choice((1, 2, 4, 8, 16))
        max_num_seqs = rng.randint(2, 8)
        requests = tuple(_draw_requests(rng, num_requests or rng.randint(max_num_seqs, 14), block_size))
        needs = sorted((-(-(request.max_length - 1) // block_size) for request in requests), reverse=True)
        demand = sum(needs[:max_num_seqs])
        num_blocks = max(needs[0], int(demand / rng.uniform(1.1, 4.0)))
        if 1.1 <= demand / num_blocks <= 4.0:
            break
    whole = rng.random() < 0.1
    preemption = rng.choice(sorted(PREEMPTIONS))
    options: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": MAX_MODEL_LEN + rng.randint(0, 16) if whole else rng.choice((1, 3, 8, 16, 33, 64)),
        "max_model_len": MAX_MODEL_LEN,
        "eos_token_ids": (EOS,),
        "order": rng.choice(sorted(ORDERS)),
        "preemption": preemption,
        "prefix_cache": rng.choice(sorted(PREFIX_CACHES)),
    }
    last = max(request.arrival for request in requests) + 40
    num_events = rng.choice((0, 1, 2, 4)) if num_aborts is None else num_aborts
    events = [Event(rng.randint(0, last), rng.random()) for _ in range(num_events)]
    return Schedule(
        seed=seed,
        options=options | fixed,
        lag=rng.randint(0, 1),
        requests=requests,
        events=tuple(sorted(events, key=lambda event: event.step)),
        pressure=demand / num_blocks,
    )


def _draw_requests(rng: random.Random, count: int, block_size: int) -> Iterator[Request]:
    """Prompts that begin alike: often at a block's edge, now and then the whole of one that came before."""
    texts = [[rng.randrange(1, VOCAB_SIZE) for _ in range(40)] for _ in range(rng.randint(1, 3))]
    spread = rng.choice((0, 10, 60)) * max(1, count // 14)
    salts = rng.choice(((b"",), (b"", b"tenant"), (b"one", b"other")))
    for _ in range(count):
        shared = rng.choice((0, rng.randint(0, 40), rng.randint(0, 40 // block_size) * block_size))
        own = rng.choice((0, 1, rng.randint(1, 8))) if shared else rng.randint(1, 24)
        prompt = rng.choice(texts)[:shared] + [rng.randrange(1, VOCAB_SIZE) for _ in range(own)]
        yield Request(
            prompt=tuple(prompt),
            params=_draw_params(rng),
            salt=rng.choice(salts),
            arrival=rng.randint(0, spread),
            priority=rng.choice((0, 0, 1, 2)),
        )


def _draw_params(rng: random.Random) -> SamplingParams:
    max_tokens = rng.choice((1, rng.randint(1, 32), rng.randint(16, 32)))
    return SamplingParams(
        temperature=rng.choice((0.0, 1.0)),
        seed=rng.randrange(2**32),
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, max_tokens // 2)),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=[rng.randrange(1, VOCAB_SIZE) for _ in range(rng.choice((0, 0, 5)))],
    )
