"""A second kind of cache, from outside: a state for each sequence, whose hash gives another token where it is wrong.

Each test is of one class of fault that caches of such models really had, and catches it when it is planted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.tsched.planted_bugs import PlantedBug, planted
from tests.tsched.random_rules import random_states, run_world
from tests.tsched.random_schedules import EOS, MAX_MODEL_LEN, Request, Schedule, draw_schedule
from tests.tsched.schedulers import build_scheduler
from tests.tsched.schedules import serve_or_say_how_to_replay, server_factory
from tests.tsched.state_server import StateServer
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.block_pool import BlockPool
from tsched.scheduling.kv_memory import KVMemory
from tsched.scheduling.sequence import Sequence, SequenceTable
from tsched.scheduling.state_slots import StateSlots

BLOCK = 4
CACHES = ["hash", "radix"]


def make_server(lag: int = 0, **options: Any) -> StateServer:
    defaults: dict[str, Any] = {
        "num_blocks": 40,
        "block_size": BLOCK,
        "num_states": 20,
        "num_host_states": 0,
        "state_interval": 1,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": MAX_MODEL_LEN,
        "eos_token_ids": (EOS,),
    }
    return StateServer(Schedule(0, defaults | options, lag, (), (), 1.0))


def request(length: int, own: int = 0, max_tokens: int = 6) -> Request:
    """A prompt that begins with the same `length` tokens as every other, and `own` ones of its own."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return Request((*range(1, 1 + length), *range(60, 60 + own)), params)


def finish(server: StateServer) -> None:
    states = server.scheduler.states
    assert states is not None
    for _ in range(500):
        is_done = not server.scheduler.has_unfinished
        server.step()
        if is_done:
            assert states.pool.num_referenced == server.scheduler.pool.num_referenced == 0
            return
    pytest.fail("somebody is unfinished after 500 steps")


def serve(server: StateServer, number: int, wanted: Request) -> int:
    """Serve it alone, check what it gets, and say how many of its blocks were found."""
    before = server.scheduler.cache_stats().hit_blocks
    (sequence,) = server.add([number], wanted)
    finish(server)
    assert_as_alone(server, sequence, wanted)
    return server.scheduler.cache_stats().hit_blocks - before


def assert_as_alone(server: StateServer, sequence: Sequence, wanted: Request) -> None:
    assert (server.output_of(sequence), sequence.finish_reason) == server.alone(wanted, sequence.id)


def check_hits_end_at_kept_states(prefix_cache: str, lag: int) -> None:
    """With two blocks between states, 8 tokens on and at the prompt's last block one is kept; at 4 none is."""
    server = make_server(lag, prefix_cache=prefix_cache, state_interval=2)
    assert serve(server, 0, request(21, max_tokens=2)) == 0
    assert serve(server, 1, request(7, own=6)) == 0, "one block is the same, and no state is kept there"
    assert serve(server, 2, request(15, own=2)) == 2, "three blocks are the same"
    assert serve(server, 3, request(21)) == 5, "the whole prompt, all but its last token"
    assert serve(server, 4, request(22)) == 5


def check_newcomers_start_from_nothing(prefix_cache: str, lag: int) -> None:
    """Slots are lent again and again, and nobody reads what the one before has left."""
    server = make_server(lag, prefix_cache=prefix_cache, num_states=2, max_num_seqs=1)
    for number, own in enumerate((5, 9, 2, 13)):
        serve(server, number, request(0, own=own))


def check_kept_states_stay(prefix_cache: str, lag: int) -> None:
    """What was kept on the way, of prompts and of outputs, is as it was however far the sequence went on."""
    server = make_server(lag, prefix_cache=prefix_cache)
    whole = request(13, max_tokens=30)
    (sequence,) = server.add([0], whole)
    finish(server)
    # Of an output the last state alone is kept: the first leaves the one as of place 40, those after it 16, 20, 28.
    for number, (length, expected) in enumerate([(9, 2), (13, 3), (17, 4), (25, 5), (41, 10)], start=1):
        prompt = tuple(sequence.tokens[:length].tolist())
        assert serve(server, number, Request(prompt, request(0).params)) == expected


def check_chunks_keep_states(prefix_cache: str, lag: int) -> None:
    """Prompts in small pieces, several at once: a state is kept at the blocks' ends and nowhere else."""
    server = make_server(lag, prefix_cache=prefix_cache, max_num_batched_tokens=7, max_chunk_tokens=3)
    wanted = [request(length, own=2) for length in (6, 11, 17)]
    sequences = [server.add([number], one)[0] for number, one in enumerate(wanted)]
    finish(server)
    for sequence, one in zip(sequences, wanted, strict=True):
        assert_as_alone(server, sequence, one)
    assert serve(server, 9, request(18)) == 4


def check_siblings_share_a_prompt(prefix_cache: str, lag: int) -> None:
    server = make_server(lag, prefix_cache=prefix_cache)
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=9, ignore_eos=True) for seed in range(3)]
    wanted = Request(request(14).prompt, params[0], siblings=tuple(params[1:]))
    sequences = server.add([0, 1, 2], wanted)
    finish(server)
    for sequence, member in zip(sequences, wanted.members, strict=True):
        assert_as_alone(server, sequence, member)
    counters = server.scheduler.counters
    assert counters.num_forks == 2
    # The last token is computed by each; whether as a prefill or a decode depends on what else there is.
    computed = counters.num_prefill_tokens + counters.num_decode_tokens
    assert computed == 14 + 2 + 3 * 8, "the prompt is computed once"


def check_forks_part_from_their_parents(prefix_cache: str, lag: int) -> None:
    """Parent and children go on from one state, each to its own end."""
    server = make_server(lag, prefix_cache=prefix_cache)
    wanted = request(6, max_tokens=20)
    (parent,) = server.add([0], wanted)
    for _ in range(5):
        server.step()
    tokens = server.scheduler.output_of(parent)
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True) for seed in range(2)]
    children = [server.fork(0, number, own, 6 + len(tokens)) for number, own in enumerate(params, start=1)]
    finish(server)
    assert_as_alone(server, parent, wanted)
    for child, own in zip(children, params, strict=True):
        assert_as_alone(server, child, Request(wanted.prompt, own, given=tuple(tokens)))


def check_swapped_states_come_back(prefix_cache: str, lag: int) -> None:
    server = make_server(
        lag, prefix_cache=prefix_cache, preemption="swap", num_blocks=11, num_host_blocks=20, num_host_states=4
    )
    wanted = [request(0, own=9 + i, max_tokens=20) for i in range(3)]
    sequences = [server.add([i], one)[0] for i, one in enumerate(wanted)]
    finish(server)
    assert server.scheduler.counters.num_swapped_in > 0
    for sequence, one in zip(sequences, wanted, strict=True):
        assert_as_alone(server, sequence, one)


CHECKS = (
    check_hits_end_at_kept_states,
    check_newcomers_start_from_nothing,
    check_kept_states_stay,
    check_chunks_keep_states,
    check_siblings_share_a_prompt,
    check_forks_part_from_their_parents,
    check_swapped_states_come_back,
)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("prefix_cache", CACHES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_each_sequence_goes_on_from_its_own_state(
    check: Callable[[str, int], None], prefix_cache: str, lag: int
) -> None:
    check(prefix_cache, lag)


FAULTS = (
    (check_hits_end_at_kept_states, PlantedBug(
        "a hit is not clamped to a kept state", KVMemory, "_match",
        "held = self.cache.match(sequence, self._usable)\n    if held.size and self.states is not None:\n"
        "        sequence.state = self.states.share_at(held[-1])",
        "held = self.cache.match(sequence)\n    if self.states.count_usable(held):\n"
        "        sequence.state = self.states.share_at(held[self.states.count_usable(held) - 1])")),
    (check_newcomers_start_from_nothing, PlantedBug(
        "a state is read from a slot that another has left", StateSlots, "advance",
        "return np.stack((read, written))", "return np.stack((np.where(read < 0, written, read), written))")),
    (check_kept_states_stay, PlantedBug(
        "a state is kept after more tokens than it says", StateSlots, "_take_checkpoint",
        "self._written[row] = self._take()", "pass")),
    (check_kept_states_stay, PlantedBug(
        "a state is kept with the block after its own", StateSlots, "attach",
        "blocks[place // size - 1]", "blocks[place // size]")),
    (check_chunks_keep_states, PlantedBug(
        "a checkpoint says another place than its own", StateSlots, "_take_checkpoint",
        "self._read[row], place", "self._read[row], place + 1")),
    (check_siblings_share_a_prompt, PlantedBug(
        "two rows write to one working state", StateSlots, "place",
        "state if self._is_own(state) else", "state if state != NO_STATE else")),
    (check_forks_part_from_their_parents, PlantedBug(
        "a fork shares a working state", StateSlots, "fork", "self._written[row] = self._take()", "pass")),
    (check_swapped_states_come_back, PlantedBug(
        "a sequence is swapped in without its state", KVMemory, "_restore",
        "self._plan_copies().state_swap_ins.append(pair)", "pass")),
    (check_swapped_states_come_back, PlantedBug(
        "a sequence is swapped out with the state of another place", KVMemory, "find_holding",
        "Holding(blocks, *self.states.find_latest(row, most))",
        "Holding(blocks, most, int(self.states._read[row]))")),
)  # fmt: skip


@pytest.mark.parametrize(("check", "fault"), FAULTS, ids=[fault.name for _, fault in FAULTS])
def test_the_check_of_its_class_catches_a_planted_fault(check: Callable[[str, int], None], fault: PlantedBug) -> None:
    with planted(fault):
        for prefix_cache in CACHES:
            with pytest.raises((AssertionError, RuntimeError, IndexError)):
                _check_both(check, prefix_cache)


def _check_both(check: Callable[[str, int], None], prefix_cache: str) -> None:
    for lag in (0, 1):
        check(prefix_cache, lag)


def test_random_schedules_and_worlds_with_states() -> None:
    happened: Counter[str] = Counter()
    for seed in range(40):
        happened += serve_or_say_how_to_replay(draw_schedule(seed), server_factory("state"), "state").happened
    assert happened["tokens"] > 0
    fired = _run_worlds(40)
    wanted = ("swap a state in", "swap a state out", "read one state, write another", "prefix hit (blocks)", "preempt")
    assert min(fired[name] for name in (*wanted, "fork running", "fork a group", "lose a step", "evict (blocks)")) > 0


def _run_worlds(count: int) -> Counter[str]:
    fired: Counter[str] = Counter()
    for seed in range(count):
        run_world(seed, fired, more_options=random_states)
    return fired


WORLD_FAULTS = (
    PlantedBug("a state outlives its block", StateSlots, "_forget_blocks", "self._forget(slot)", "pass"),
    PlantedBug("a state that was evicted can be hit", StateSlots, "_forget",
               "self._slot_at[self._block_of[slot]] = NO_STATE", "pass"),
    PlantedBug("a host's state is never free", KVMemory, "free_restored",
               "self.states.release_on_host(int(pairs[0, 0]))", "pass"),
    PlantedBug("a waiting one's state leaks", KVMemory, "_release_state",
               "self.states.release(sequence.state)", "pass"),
    PlantedBug("who leaves keeps a checkpoint", StateSlots, "leave", "self._drop_checkpoint(row)", "pass"),
)  # fmt: skip


@pytest.mark.parametrize("fault", WORLD_FAULTS, ids=lambda fault: fault.name)
def test_random_worlds_catch_a_planted_fault(fault: PlantedBug) -> None:
    with planted(fault), pytest.raises((AssertionError, RuntimeError)) as caught:
        _run_worlds(60)
    assert "in the world of seed" in "".join(caught.value.__notes__)


def test_kept_states_are_memory_and_are_evicted() -> None:
    """Three slots: one is written, and of the others the one used last is there when it is asked for."""
    server = make_server(prefix_cache="hash", num_states=4, max_num_seqs=1)
    states = server.scheduler.states
    assert states is not None
    first, second = request(9, max_tokens=1), request(0, own=9, max_tokens=1)
    assert serve(server, 0, first) == 0
    assert states.pool.num_cached == 2
    assert serve(server, 1, first) == 2
    assert serve(server, 2, second) == 0, "its states take the place of those used before"
    assert states.pool.num_free + states.pool.num_cached == 4
    assert serve(server, 3, second) == 2
    assert serve(server, 4, Request(tuple(range(20, 50)), first.params)) == 0
    assert serve(server, 5, second) == 0, "its blocks are there, and its states are not"
    assert server.scheduler.pool.num_cached > 9


def test_slots_bound_who_is_admitted() -> None:
    server = make_server(num_states=2, max_num_seqs=4)
    wanted = [request(5, own=i) for i in range(4)]
    sequences = [server.add([i], one)[0] for i, one in enumerate(wanted)]
    server.step()
    assert server.scheduler.num_running == 2
    finish(server)
    for sequence, one in zip(sequences, wanted, strict=True):
        assert_as_alone(server, sequence, one)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_states": 1}, "num_states must be at least 2, a step reads one and writes another; got 1"),
        ({"num_states": -1}, "num_states must be at least 2, a step reads one and writes another; got -1"),
        ({"num_states": 4, "state_interval": 0}, "state_interval must be at least 1, got 0"),
        ({"num_states": 4, "num_host_states": -1}, "num_blocks >= 1 and block_size >= 1, got -1 and 1"),
    ],
)
def test_numbers_that_serve_nobody_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_scheduler(
            num_blocks=4, block_size=4, max_num_seqs=1, max_num_batched_tokens=8, max_model_len=16, **options
        )


def test_a_slot_asked_for_where_all_are_in_use() -> None:
    states = StateSlots(2, 0, 1, SequenceTable(2, 8, 4), BlockPool(4, 4))
    states.allocate()
    states.allocate()
    assert states.num_available == 0
    with pytest.raises(RuntimeError, match="a slot asked for, and all 2 are in use"):
        states.allocate()
    assert np.array_equal(states.pool.refs(np.arange(2, dtype=np.int32)), [1, 1])


def test_a_slot_of_the_host_is_free_after_the_last_that_shares_it() -> None:
    states = StateSlots(2, 2, 1, SequenceTable(2, 8, 4), BlockPool(4, 4))
    slot = states.allocate_on_host()
    states.share_on_host(slot)
    free = []
    for _ in range(2):
        states.release_on_host(slot)
        free.append(states.host_pool.num_free if states.host_pool is not None else None)
    assert free == [1, 2]
