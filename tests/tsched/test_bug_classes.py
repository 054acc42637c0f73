"""Faults that schedulers and caches of this field really had, each by its number in the list of bug classes.

A page of the device knows which token of whom it holds (see hash_server), so the tokens tell what was really read.
Those that random worlds alone once noticed are checks here, each with faults of its class that it catches by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.tsched.hash_server import HashServer
from tests.tsched.planted_bugs import PlantedBug, planted
from tests.tsched.random_schedules import EOS, MAX_MODEL_LEN, Request, Schedule
from tests.tsched.window_server import WindowServer
from tsched.requests.errors import RefusedError
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.departures import Departures
from tsched.scheduling.kv_memory import KVMemory
from tsched.scheduling.policies import PREEMPTIONS, PREFIX_CACHES
from tsched.scheduling.policies.hash_prefix_cache import BlockDigests, HashPrefixCache
from tsched.scheduling.policies.priority import Priority
from tsched.scheduling.policies.radix_prefix_cache import RadixPrefixCache
from tsched.scheduling.policies.run_cache import RunCache
from tsched.scheduling.policies.windowed_prefix_caches import (
    WindowedHashCache,
    WindowedPrefixCache,
    WindowedRadixCache,
)
from tsched.scheduling.scheduler import Scheduler
from tsched.scheduling.sequence import Sequence, SequenceTable

CACHES = sorted(set(PREFIX_CACHES) - {"none"})
KINDS: dict[str, dict[str, Any]] = {name: {"prefix_cache": name} for name in CACHES}
KINDS |= {f"windowed {name}": {"prefix_cache": name, "window": 10} for name in CACHES}
"""Every cache that the scheduler knows."""
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
    kind = WindowServer if "window" in options else HashServer
    return kind(Schedule(0, defaults | options, lag, (), (), 1.0))


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


def count_found(server: HashServer, number: int, wanted: Request) -> int:
    """The tokens of a request that comes now which it finds in the cache; it is served to its end."""
    sequence = add(server, number, wanted)
    for _ in range(50):
        if sequence.num_cached is not None:
            break
        server.step()
    finish(server)
    assert_as_alone(server, sequence, wanted)
    assert sequence.num_cached is not None
    return sequence.num_cached


def check_whole_computed_blocks_alone_are_found(options: dict[str, Any], lag: int) -> None:
    """A prompt that comes in chunks is looked up after each step, while it goes on and when it was aborted there: what
    is found are the whole blocks that committed plans have computed. With a `stem`, another one with the same first
    block was here before, so that the blocks join what is kept.
    """
    prompt = request(17)
    for chunk in (3, BLOCK):
        for stem in (0, BLOCK):
            for num_steps in range(1 + lag, 17 // chunk + lag + 1):
                for is_aborted in (False, True):
                    server = make_server(lag, **options, max_num_batched_tokens=64, max_chunk_tokens=chunk)
                    if stem:
                        other = Request((*prompt.prompt[:stem], *range(60, 69)), prompt.params)
                        assert count_found(server, 0, other) == 0
                    first = add(server, 1, prompt)
                    for _ in range(num_steps):
                        server.step()
                    computed = min(stem + chunk * (num_steps - lag), 16)
                    if is_aborted:
                        server.abort(1)
                    found = count_found(server, 2, prompt)
                    assert found == computed // BLOCK * BLOCK, (chunk, stem, num_steps, is_aborted)
                    if not is_aborted:
                        assert_as_alone(server, first, prompt)


def check_an_abort_keeps_what_was_computed(options: dict[str, Any], lag: int) -> None:
    """Aborted before its first step, in a queue, or amid its output: who asks for all its tokens finds the whole blocks
    of those whose keys and values were computed, none of the rest.
    """
    prompt = request(10, max_tokens=9)
    (tokens, _) = make_server(**options).alone(prompt, 1)
    everything = Request((*prompt.prompt, *tokens), request(1).params)
    for num_steps in range(9 + lag):
        server = make_server(lag, **options)
        add(server, 1, prompt)
        for _ in range(num_steps):
            server.step()
        server.abort(1)
        computed = 0 if num_steps <= lag else 10 + num_steps - lag - 1
        assert count_found(server, 2, everything) == computed // BLOCK * BLOCK, num_steps
    server = make_server(lag, **options, max_num_seqs=1)
    parent = add(server, 0, prompt)
    while len(server.output_of(parent)) < 2:
        server.step()
    server.fork(0, 1, prompt.params, 12)  # it waits with its parent's blocks, and they lack its last token
    add(server, 2, prompt)
    for number in range(3):
        server.abort(number)
    assert count_found(server, 3, everything) <= 2 * BLOCK


def check_tenants_share_nothing(options: dict[str, Any], lag: int) -> None:
    """Two tenants know the same first block, and one of them what follows: the other finds its own block alone."""
    prompt, begins = request(13), (*request(13).prompt[:BLOCK], *range(80, 86))
    for one, other in ((b"", b"a"), (b"a", b""), (b"a", b"ab"), (b"ab", b"b"), (b"\0", b"\0\0")):
        server = make_server(lag, **options)
        assert count_found(server, 0, Request(prompt.prompt, prompt.params, salt=one)) == 0
        assert count_found(server, 1, Request(begins, prompt.params, salt=other)) == 0
        assert count_found(server, 2, Request(prompt.prompt, prompt.params, salt=other)) == BLOCK
        assert count_found(server, 3, Request(begins, prompt.params, salt=one)) == BLOCK
        assert count_found(server, 4, Request(prompt.prompt, prompt.params, salt=one)) == 3 * BLOCK


def check_the_order_holds_for_ever(options: dict[str, Any], lag: int) -> None:
    """Where a number of 8, 15, 16, 31 or 32 bits would wrap, who came first is still admitted first, and who came last
    gives way; so for priorities, of which one is worth 256 arrivals.
    """
    for bits in (8, 15, 16, 31, 32):
        for order in ("fcfs", "priority"):
            server = make_server(lag, **options, order=order, max_num_seqs=1)
            server.scheduler._num_arrived = 2**bits - 2
            wanted = [add(server, number, request(3, max_tokens=1)) for number in range(4)]
            assert finished_in_order(server) == [one.id for one in wanted]
            server = make_server(lag, **options, order=order, num_blocks=7, max_num_seqs=2)
            server.scheduler._num_arrived = 2**bits - 1
            first, last = (add(server, number, request(5, max_tokens=16)) for number in range(2))
            finish(server)
            assert (first.num_preemptions, last.num_preemptions > 0) == (0, True)
        server = make_server(lag, **options, order="priority", max_num_seqs=1)
        level = 2 ** (bits - 8)
        params = request(3, max_tokens=1).params
        for number, priority in enumerate((level, level - 1, 1 - level, -level)):
            server.device.tenants[number] = 0
            server.scheduler.add(number, [1, 2, 3], params, priority=priority)
        assert finished_in_order(server) == sorted(range(4), key=lambda i: (level, level - 1, 1 - level, -level)[i])


def finished_in_order(server: HashServer) -> list[int]:
    waiting, done = dict(server.scheduler._unfinished), list[int]()
    for _ in range(50):
        server.step()
        done += [number for number, one in waiting.items() if one.finish_reason and number not in done]
    return done


CHECKS = (
    check_whole_computed_blocks_alone_are_found,
    check_an_abort_keeps_what_was_computed,
    check_tenants_share_nothing,
    check_the_order_holds_for_ever,
)
Check = Callable[[dict[str, Any], int], None]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_nothing_of_the_class_is_there(check: Check, kind: str, lag: int) -> None:
    check(KINDS[kind], lag)


KINDS_OF: dict[type, tuple[str, ...]] = {
    RunCache: ("hash", "radix"),
    HashPrefixCache: ("hash",),
    RadixPrefixCache: ("radix",),
    WindowedPrefixCache: ("windowed hash", "windowed radix"),
    BlockDigests: ("hash", "windowed hash"),
    WindowedHashCache: ("windowed hash",),
    WindowedRadixCache: ("windowed radix",),
}
"""The caches that a fault is in; what is not here is in all of them."""

FAULTS = (
    (check_whole_computed_blocks_alone_are_found, PlantedBug(
        "a block that is begun is kept", RunCache, "insert_each",
        "num_computed // pool.block_size for", "-(-num_computed // pool.block_size) for")),
    (check_whole_computed_blocks_alone_are_found, PlantedBug(
        "a block that is begun follows what is kept", RunCache, "insert",
        "end = num_computed // pool.block_size", "end = -(-num_computed // pool.block_size)")),
    (check_whole_computed_blocks_alone_are_found, PlantedBug(
        "a windowed block that is begun is kept", WindowedPrefixCache, "insert",
        "end = num_computed // pool.block_size", "end = -(-num_computed // pool.block_size)")),
    (check_whole_computed_blocks_alone_are_found, PlantedBug(
        "all of a prompt counts as computed after its first chunk", Scheduler, "_commit_prefills",
        "end // block_size]", "sequence.prompt_len // block_size]; end = sequence.prompt_len")),
    (check_whole_computed_blocks_alone_are_found, PlantedBug(
        "what a plan under way computes is kept", Scheduler, "_commit_prefills",
        "end // block_size]", "int(table.computed[row]) // block_size]; end = int(table.computed[row])")),
    (check_whole_computed_blocks_alone_are_found, PlantedBug(
        "a row's prefill is said to be done too early", Scheduler, "_commit_prefills",
        "table.prefilled[row] = end", "table.prefilled[row] = end + block_size - 1")),
    (check_an_abort_keeps_what_was_computed, PlantedBug(
        "who ends is kept with all known tokens", Departures, "end_rows",
        "table.num_committed(row)", "int(table.known[row])")),
    (check_an_abort_keeps_what_was_computed, PlantedBug(
        "who ends is kept with what a plan under way computes", Departures, "end_rows",
        "table.num_committed(row)", "int(table.computed[row])")),
    (check_an_abort_keeps_what_was_computed, PlantedBug(
        "who ends is kept with all its blocks", Departures, "end_rows",
        "table.num_committed(row)", "int(table.capacity[row])")),
    (check_an_abort_keeps_what_was_computed, PlantedBug(
        "the newest token counts as computed", SequenceTable, "num_committed", "known - 1 if", "known if")),
    (check_an_abort_keeps_what_was_computed, PlantedBug(
        "a prompt counts as computed when it is placed", SequenceTable, "place",
        "self.prefilled[row] = 0", "self.prefilled[row] = length")),
    (check_an_abort_keeps_what_was_computed, PlantedBug(
        "who waits is kept with all its tokens", KVMemory, "drop",
        "self.cache.release(sequence, sequence.blocks, 0)",
        "self.cache.release(sequence, sequence.blocks, sequence.tokens.size)")),
    (check_tenants_share_nothing, PlantedBug(
        "a search goes on in another's tree", RadixPrefixCache, "_find",
        "self._roots.get(sequence.cache_salt)", "next(iter(self._roots.values()), None)")),
    (check_tenants_share_nothing, PlantedBug(
        "a search goes on in the newest tree", RadixPrefixCache, "_find",
        "self._roots.get(sequence.cache_salt)", "self._roots[next(reversed(self._roots))]")),
    (check_tenants_share_nothing, PlantedBug(
        "all grow one tree", RadixPrefixCache, "_append",
        "parent = self._roots.get(sequence.cache_salt)", "parent = next(iter(self._roots.values()), None)")),
    (check_tenants_share_nothing, PlantedBug(
        "salts count up to their first byte", RadixPrefixCache, "_find",
        "self._roots.get(sequence.cache_salt)",
        "next((r for s, r in self._roots.items() if s[:1] == sequence.cache_salt[:1]), None)")),
    (check_tenants_share_nothing, PlantedBug(
        "a digest without the salt", BlockDigests, "_root", "blake2b(salt,", "blake2b(b'',")),
    (check_tenants_share_nothing, PlantedBug(
        "a salt's last zeros do not count", BlockDigests, "_root", "blake2b(salt,", "blake2b(salt.rstrip(b'\\0'),")),
    (check_tenants_share_nothing, PlantedBug(
        "windowed tenants share a tree", WindowedRadixCache, "_find",
        "self._roots.get(sequence.cache_salt)", "next(iter(self._roots.values()), None)")),
    (check_the_order_holds_for_ever, PlantedBug(
        "a priority's key wraps at 65,536", Priority, "key",
        "sequence.priority * AGEING + sequence.arrival", "(sequence.priority * AGEING + sequence.arrival) % 65_536")),
    (check_the_order_holds_for_ever, PlantedBug(
        "an arrival's age wraps at 65,536", Priority, "key", "+ sequence.arrival", "+ sequence.arrival % 65_536")),
    (check_the_order_holds_for_ever, PlantedBug(
        "a priority's key has 32 bits", Priority, "key",
        "sequence.priority * AGEING + sequence.arrival",
        "(sequence.priority * AGEING + sequence.arrival + 2**31) % 2**32 - 2**31")),
    (check_the_order_holds_for_ever, PlantedBug(
        "an arrival's number has 16 bits", Scheduler, "_enlist",
        "sequence.arrival, sequence.serial = arrival,", "sequence.arrival, sequence.serial = arrival % 65_536,")),
    (check_the_order_holds_for_ever, PlantedBug(
        "a running one's key has 16 bits", SequenceTable, "place", "= sequence.key", "= sequence.key % 65_536")),
)  # fmt: skip


@pytest.mark.parametrize(("check", "fault"), FAULTS, ids=[fault.name for _, fault in FAULTS])
def test_the_check_of_its_class_catches_a_planted_fault(check: Check, fault: PlantedBug) -> None:
    with planted(fault):
        for kind in KINDS_OF.get(fault.owner, tuple(KINDS)):
            with pytest.raises((AssertionError, RuntimeError, LookupError)):
                check_both(check, KINDS[kind])


def check_both(check: Check, options: dict[str, Any]) -> None:
    for lag in (0, 1):
        check(options, lag)
