"""Schedules as a function of a seed: requests that arrive over time and share prefixes, forks, aborts, and a pool that
is too small for them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.policies import ORDERS, PREEMPTIONS, PREFIX_CACHES
from tsched.scheduling.policies.priority import AGEING

MAX_MODEL_LEN = 72
VOCAB_SIZE = 300
EOS = 0


@dataclass(frozen=True)
class Request:
    """What it gets alone depends on the tokens that it begins with, the parameters and the salt; not on when and how
    it is served.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    salt: bytes = b""
    given: tuple[int, ...] = ()  # output that a fork takes over from its parent
    siblings: tuple[SamplingParams, ...] = ()  # more samples of the prompt, with parameters of their own
    arrival: int = 0  # the step before which it comes
    priority: int = 0

    @property
    def max_length(self) -> int:
        return min(len(self.prompt) + (self.params.max_tokens or MAX_MODEL_LEN), MAX_MODEL_LEN)

    @property
    def members(self) -> tuple[Request, ...]:
        """The request itself and its siblings, each as a request of its own."""
        alone = replace(self, siblings=())
        return (alone, *(replace(alone, params=params) for params in self.siblings))


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
        members = [member for request in requests for member in request.members]
        needs = sorted((-(-(member.max_length - 1) // block_size) for member in members), reverse=True)
        demand = sum(needs[:max_num_seqs])
        num_blocks = max(needs[0], int(demand / rng.uniform(1.1, 4.0)))
        if 1.1 <= demand / num_blocks <= 4.0:
            break
    options: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "num_host_blocks": rng.choice((0, num_blocks // 3, num_blocks, 4 * num_blocks)),
        "max_num_seqs": max_num_seqs,
        "max_model_len": MAX_MODEL_LEN,
        "eos_token_ids": (EOS,),
        "order": rng.choice(sorted(ORDERS)),
        "preemption": rng.choice(sorted(PREEMPTIONS)),
        "prefix_cache": rng.choice(sorted(PREFIX_CACHES)),
    }
    if rng.random() < 0.15:
        options |= {"chunked_prefill": False, "max_num_batched_tokens": MAX_MODEL_LEN + rng.randint(0, 16)}
    else:
        options |= {
            "max_num_batched_tokens": rng.choice((1, 3, 8, 16, 33, 64)),
            "max_chunk_tokens": rng.choice((None, None, 1, rng.randint(2, 16))),
            "decode_share": rng.choice((0.0, 0.0, 0.25, 0.9)),
        }
    last = max(request.arrival for request in requests) + 40
    num_events = rng.choice((0, 1, 2, 4)) if num_aborts is None else num_aborts
    events = [Event(rng.randint(0, last), rng.random()) for _ in range(num_events)]
    events += [
        Event(rng.randint(0, last), rng.random(), _draw_params(rng), rng.choice((1.0, 1.0, rng.random())))
        for _ in range(rng.choice((0, 0, 1, 4)))
    ]
    return Schedule(
        seed=seed,
        options=options | fixed,
        lag=rng.randint(0, 1),
        requests=requests,
        events=tuple(sorted(events, key=lambda event: event.step)),
        pressure=demand / num_blocks,
    )


def stream_of_urgent_requests() -> Schedule:
    """A request of a lower priority, and more urgent ones after it than one level is worth: it must have its turn."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    requests = (Request((7,), params, priority=1), *(Request((8,), params) for _ in range(AGEING + 40)))
    options = {
        "num_blocks": 2,
        "block_size": 4,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 8,
        "max_model_len": MAX_MODEL_LEN,
        "order": "priority",
    }
    return Schedule(seed=-1, options=options, lag=0, requests=requests, events=(), pressure=1.0)


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
            siblings=tuple(_draw_params(rng) for _ in range(rng.choice((0, 0, 0, 0, 1, 3)))),
            salt=rng.choice(salts),
            arrival=rng.randint(0, spread),
            priority=rng.choice((0, 0, 1, 2)),
        )


def _draw_params(rng: random.Random) -> SamplingParams:
    """What a model of plain facts does not look at (penalties, filters) is for those that have logits."""
    max_tokens = rng.choice((1, rng.randint(1, 32), rng.randint(16, 32)))
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7}
    filters = {"top_k": 7, "top_p": 0.8, "min_p": 0.05}
    extras: dict[str, Any] = {name: value for name, value in (penalties | filters).items() if rng.random() < 0.15}
    return SamplingParams(
        temperature=rng.choice((0.0, 1.0)),
        seed=rng.randrange(2**32),
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, max_tokens // 2)),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=[rng.randrange(1, VOCAB_SIZE) for _ in range(rng.choice((0, 0, 5)))],
        **extras,
    )
