"""Faults that schedulers and caches of this field really had, each by its number in the list of bug classes.

A page of the device knows which token of whom it holds (see hash_server), so the tokens tell what was really read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.tsched.hash_server import HashServer
from tests.tsched.random_schedules import EOS, MAX_MODEL_LEN, Request, Schedule
from tsched.requests.errors import RefusedError
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.policies import PREEMPTIONS, PREFIX_CACHES
from tsched.scheduling.sequence import Sequence

CACHES = sorted(set(PREFIX_CACHES) - {"none"})
BLOCK = 4


def make_server(lag: int = 0, **options: Any) -> HashServer:
    defaults: dict[str, Any] = {
        "num_blocks": 40,
        "block_size": BLOCK,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": MAX_MODEL_LEN,
        "eos_token_ids": (EOS,),
    }
    return HashServer(Schedule(0, defaults | options, lag, (), (), 1.0))


def request(length: int, max_tokens: int = 6, first: int = 1) -> Request:
    """A prompt of the tokens from `first` on, and so many greedy ones after it."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return Request(tuple(range(first, first + length)), params)


def add(server: HashServer, number: int, wanted: Request) -> Sequence:
    return server.add([number], wanted)[0]


def finish(server: HashServer) -> None:
    for _ in range(500):
        if not server.scheduler.has_unfinished:
            server.step()
            assert server.scheduler.pool.num_referenced == 0
            return
        server.step()
    pytest.fail("somebody is unfinished after 500 steps")


def assert_as_alone(server: HashServer, sequence: Sequence, wanted: Request) -> None:
    assert (server.output_of(sequence), sequence.finish_reason) == server.alone(wanted, sequence.id)


@pytest.mark.parametrize("prefix_cache", CACHES)
@pytest.mark.parametrize("lag", [0, 1])
def test_10_no_prefix_hit_before_its_keys_and_values_were_computed(prefix_cache: str, lag: int) -> None:
    server = make_server(lag, prefix_cache=prefix_cache)
    scheduler, prompt = server.scheduler, request(12)
    pair = [add(server, i, prompt) for i in range(2)]
    server.step()  # both are admitted in one step, and the second finds nothing yet
    tables, rows = scheduler.table.blocks, [sequence.row for sequence in pair]
    assert min(rows) >= 0
    if lag:  # the plan that computes the prompt is under way: a third finds nothing either
        pair.append(add(server, 2, prompt))
        server.step()
        rows.append(pair[2].row)
        assert rows[2] >= 0
        assert not set(tables[rows[2], :3]) & {*tables[rows[0], :3], *tables[rows[1], :3]}
    finish(server)
    late = add(server, 3, prompt)
    hits = scheduler.cache_stats().hit_blocks
    server.step()
    assert late.row >= 0
    assert scheduler.cache_stats().hit_blocks > hits, "what was computed and committed is found"
    finish(server)
    for sequence in (*pair, late):
        assert_as_alone(server, sequence, prompt)


@pytest.mark.parametrize("prefix_cache", CACHES)
@pytest.mark.parametrize("preemption", sorted(PREEMPTIONS))
@pytest.mark.parametrize("lag", [0, 1])
def test_11_preemption_and_a_prefix_hit_leave_no_stale_counts(prefix_cache: str, preemption: str, lag: int) -> None:
    server = make_server(lag, prefix_cache=prefix_cache, preemption=preemption, num_blocks=9, num_host_blocks=9)
    wanted = [request(9, max_tokens=20) for _ in range(3)]  # alike, so the second half of them hits
    sequences = [add(server, i, one) for i, one in enumerate(wanted)]
    finish(server)
    assert sum(sequence.num_preemptions for sequence in sequences) > 0
    assert server.scheduler.cache_stats().hit_blocks > 0
    for sequence, one in zip(sequences, wanted, strict=True):
        assert_as_alone(server, sequence, one)


@pytest.mark.parametrize("prefix_cache", CACHES)
@pytest.mark.parametrize("length", [BLOCK, 3 * BLOCK])
def test_11_a_full_hit_still_runs_the_last_token(prefix_cache: str, length: int) -> None:
    server = make_server(prefix_cache=prefix_cache)
    wanted = request(length)
    add(server, 0, wanted)
    finish(server)
    again = add(server, 1, wanted)
    server.step()
    assert server.scheduler.output_of(again) == server.alone(wanted, 1)[0][:1], "one step, one token"
    finish(server)
    assert_as_alone(server, again, wanted)


@pytest.mark.parametrize("prefix_cache", sorted(PREFIX_CACHES))
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
@pytest.mark.parametrize("lag", [0, 1])
def test_12_an_abort_leaks_no_block(prefix_cache: str, num_steps: int, lag: int) -> None:
    server = make_server(lag, prefix_cache=prefix_cache, max_num_batched_tokens=8)
    for i in range(3):
        add(server, i, request(10, first=1 + i % 2))
    for _ in range(num_steps):
        server.step()
    aborted = [server.scheduler.abort(i) for i in range(3)]
    assert None not in aborted
    finish(server)


@pytest.mark.parametrize("prefix_cache", CACHES)
def test_12_a_cached_block_is_not_evicted_between_lookup_and_use(prefix_cache: str) -> None:
    """The second request's missing blocks can only come from evictions, and its own hits are the oldest there are."""
    server = make_server(prefix_cache=prefix_cache, num_blocks=8, max_num_seqs=1)
    short, other, longer = request(12, max_tokens=1), request(16, max_tokens=1, first=100), request(28, max_tokens=2)
    add(server, 0, short)
    finish(server)
    add(server, 1, other)
    finish(server)
    again = add(server, 2, longer)
    server.step()
    assert server.scheduler.cache_stats().hit_blocks == 3
    assert np.unique(server.scheduler.table.blocks[again.row, :7]).size == 7
    finish(server)
    assert_as_alone(server, again, longer)


@pytest.mark.parametrize("count", [2, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1])
@pytest.mark.parametrize("lag", [0, 1])
def test_13_several_tokens_of_one_step_have_blocks_for_all_of_them(count: int, lag: int) -> None:
    """There is no speculative decoding here yet; a chunk is the nearest thing: several tokens of a sequence in a step,
    from any place in a block, over the edges of blocks.
    """
    for already in range(1, 2 * BLOCK):
        wanted = request(already + count, max_tokens=2 * BLOCK)
        for budget in (count, already + count):
            server = make_server(lag, max_num_batched_tokens=budget)
            sequence = add(server, 0, wanted)
            finish(server)
            assert_as_alone(server, sequence, wanted)


def test_14_a_request_that_can_never_fit_blocks_nobody() -> None:
    server = make_server(num_blocks=4)
    with pytest.raises(RefusedError, match="the pool has 4"):
        add(server, 0, request(10, max_tokens=10))
    wanted = request(10)
    sequence = add(server, 1, wanted)
    finish(server)
    assert_as_alone(server, sequence, wanted)
