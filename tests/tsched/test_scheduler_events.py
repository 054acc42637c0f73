"""Requests, groups, forks, replaced tokens and aborts at any moment, plans committed at once or one late: everybody
gets the tokens that they get alone, and every block is accounted for after each event.
"""

from __future__ import annotations

import random
from collections import Counter, deque

import numpy as np
import pytest

from tests.tsched.simulated_device import VOCAB, Launch, SimulatedDevice, check_accounts, check_plan, tokens_after
from tests.tsched.test_scheduler import MAX_MODEL_LEN, drive, make_scheduler
from tsched.requests.errors import RefusedError
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.policies import ORDERS, PREEMPTIONS, PREFIX_CACHES
from tsched.scheduling.scheduler import Scheduler
from tsched.scheduling.sequence import Sequence

TEXT = [1 + (7 * i * i + i) % (VOCAB - 1) for i in range(24)]  # prompts begin alike, so that caches hit
WEIGHTS = {"schedule": 10, "commit": 9, "add": 3, "fork": 2, "replace_last": 2, "abort": 1}


def draw_scheduler(rng: random.Random) -> Scheduler:
    options: dict = {
        "num_blocks": rng.randint(4, 24),
        "block_size": rng.choice([1, 2, 4]),
        "max_num_seqs": rng.randint(1, 6),
        "max_num_batched_tokens": rng.randint(1, 16),
        "num_host_blocks": rng.choice([3, 30, 30]),
        "order": rng.choice(sorted(ORDERS)),
        "preemption": rng.choice([*PREEMPTIONS, "swap"]),
        "prefix_cache": rng.choice(sorted(PREFIX_CACHES)),
    }
    if rng.random() < 0.2:
        options |= {"chunked_prefill": False, "max_num_batched_tokens": MAX_MODEL_LEN + rng.randint(0, 8)}
    else:
        options |= {"max_chunk_tokens": rng.choice([None, 1, 3]), "decode_share": rng.choice([0.0, 0.5, 0.9])}
    return make_scheduler(**options)


def draw_params(rng: random.Random) -> SamplingParams:
    max_tokens = rng.randint(1, 20)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, max_tokens // 2]),
        ignore_eos=rng.random() < 0.7,
        stop_token_ids=[rng.randrange(1, VOCAB)] if rng.random() < 0.2 else [],
    )


def state_of(sequence: Sequence) -> str:
    if sequence.row >= 0:
        return "running"
    return "swapped" if sequence.host_blocks.size else "holding" if sequence.blocks.size else "waiting"


class Events:
    """A scheduler, its device, and what is known of everybody in it."""

    def __init__(self, seed: int, happened: Counter[str]) -> None:
        self.rng = random.Random(seed)
        self.scheduler = draw_scheduler(self.rng)
        self.device = SimulatedDevice(self.scheduler)
        self.happened = happened
        self.under_way: deque[tuple[Launch, np.ndarray]] = deque()
        self.alive: dict[int, Sequence] = {}
        self.given: dict[int, list[int]] = {}  # the tokens that each sequence goes on from
        self.num_made = 0

    def expected(self, sequence: Sequence) -> tuple[list[int], str]:
        return tokens_after(self.given[sequence.id], sequence.prompt_len, sequence.params, MAX_MODEL_LEN)

    def anybody(self) -> Sequence:
        """First a state that somebody is in, then one of those in it."""
        present: dict[str, list[Sequence]] = {}
        for sequence in self.alive.values():
            present.setdefault(state_of(sequence), []).append(sequence)
        return self.rng.choice(present[self.rng.choice(sorted(present))])

    def add(self) -> None:
        rng = self.rng
        prompt = TEXT[: rng.choice([0, rng.randint(0, 24)])] + [
            rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 6))
        ]
        params = [draw_params(rng) for _ in range(rng.choice([1, 1, 2, 4]))]
        ids = [self.num_made + i for i in range(len(params))]
        self.num_made += len(ids)
        salt = rng.choice([b"", b"", b"tenant"])
        try:
            group = self.scheduler.add_group(ids, prompt, params, priority=rng.randint(-1, 1), cache_salt=salt)
        except RefusedError:
            return
        for sequence in group:
            self.alive[sequence.id], self.given[sequence.id] = sequence, prompt

    def fork(self) -> None:
        if not self.alive:
            return
        parent = self.anybody()
        tokens = self.given[parent.id][: parent.prompt_len] + self.scheduler.output_of(parent)
        count = self.rng.choice([None, self.rng.randint(1, len(tokens))])
        number, state = self.num_made, state_of(parent)
        self.num_made += 1
        try:
            child = self.scheduler.fork(parent.id, number, draw_params(self.rng), num_tokens=count)
        except RefusedError:
            return
        self.happened[f"fork of a {state} one"] += 1
        self.alive[number], self.given[number] = child, tokens[:count]
        assert child.prompt_len == min(parent.prompt_len, len(self.given[number]))

    def replace_last(self) -> None:
        while self.under_way and self.rng.random() < 0.9:
            self.commit()
        if not self.alive:
            return
        sequence, token = self.anybody(), self.rng.randrange(1, VOCAB)
        if self.under_way:
            with pytest.raises(RuntimeError, match="under way"):
                self.scheduler.replace_last(sequence.id, token)
            return
        output = self.scheduler.output_of(sequence)
        if not output:
            with pytest.raises(ValueError, match="no output token"):
                self.scheduler.replace_last(sequence.id, token)
            return
        self.happened[f"replacement in a {state_of(sequence)} one"] += 1
        self.scheduler.replace_last(sequence.id, token)
        self.given[sequence.id] = [*self.given[sequence.id][: sequence.prompt_len], *output[:-1], token]

    def schedule(self) -> None:
        if len(self.under_way) > 1:
            return
        plan = self.scheduler.schedule()
        check_plan(self.scheduler, plan)
        assert not plan.is_empty or not (plan.swap_outs.size or plan.swap_ins.size or plan.copies.size)
        launch = self.device.build(plan)
        self.under_way.append((launch, self.device.run(launch)))

    def commit(self) -> None:
        if not self.under_way:
            return
        launch, tokens = self.under_way.popleft()
        for sequence in self.scheduler.commit(launch.plan, tokens):
            assert (sequence.output_token_ids, sequence.finish_reason) == self.expected(sequence)
            del self.alive[sequence.id]

    def abort(self) -> None:
        if not self.alive:
            return
        sequence = self.anybody()
        state, so_far = state_of(sequence), self.scheduler.output_of(sequence)
        assert self.scheduler.abort(sequence.id) is sequence
        self.happened[f"abort of a {state} one"] += 1
        assert (sequence.finish_reason, sequence.output_token_ids) == ("abort", so_far)
        assert so_far == self.expected(sequence)[0][: len(so_far)]
        assert self.scheduler.abort(sequence.id) is None
        del self.alive[sequence.id]

    def run(self, num_events: int) -> None:
        for name in self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=num_events):
            getattr(self, name)()
            check_accounts(self.scheduler)
            assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.alive)

    def end(self) -> None:
        """Everybody who is left gets to their end, and nothing stays behind."""
        while self.under_way:
            self.commit()
        scheduler = self.scheduler
        drive(scheduler, self.device, max_steps=2 * MAX_MODEL_LEN * self.num_made + 10, lag=self.rng.randint(0, 1))
        for sequence in self.alive.values():
            assert (sequence.output_token_ids, sequence.finish_reason) == self.expected(sequence)
        assert scheduler.pool.num_referenced == 0
        assert scheduler.host_pool is None or scheduler.host_pool.num_free == scheduler.host_pool.num_blocks
        for name in ("preemptions", "given_up", "swapped_out", "swapped_in", "copied", "forks"):
            self.happened[name] += getattr(scheduler.counters, f"num_{name}")
        self.happened["hits"] += scheduler.cache_stats().hit_blocks


def test_everybody_gets_the_tokens_they_get_alone_whatever_happens() -> None:
    happened: Counter[str] = Counter()
    for seed in range(200):
        try:
            events = Events(seed, happened)
            events.run(num_events=90)
            events.end()
        except BaseException as error:
            error.add_note(f"the events of seed {seed}")
            raise
    states = ("running", "swapped", "holding", "waiting")
    wanted = [f"{event} of a {state} one" for state in states for event in ("fork", "abort")]
    wanted += [f"replacement in a {state} one" for state in states]
    wanted += ["preemptions", "given_up", "swapped_out", "swapped_in", "copied", "forks", "hits"]
    print(dict(happened))
    assert not [name for name in wanted if not happened[name]], happened
