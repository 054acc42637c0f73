"""Layers that all have a window: blocks wholly before it are given back, neither too early nor too late.

The full size: python -m tests.tsched.schedules --count 1000 --model window, and --model windowed with a real model.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from tests.tsched.hash_server import next_token, tenant_of
from tests.tsched.planted_bugs import PlantedBug, first_failure, planted
from tests.tsched.random_rules import random_window, run_world
from tests.tsched.random_schedules import EOS, Request, Schedule, draw_schedule
from tests.tsched.schedulers import build_scheduler
from tests.tsched.schedules import check_nothing_is_left, serve_or_say_how_to_replay, server_factory
from tests.tsched.test_beam_search import Levels, by_brute_force, make_engine, search
from tests.tsched.window_server import WindowServer, hashes_after, most_held
from tsched.execution.beam_search import BeamSearchParams
from tsched.requests.errors import RefusedError
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.kv_memory import KVMemory
from tsched.scheduling.policies.windowed_prefix_caches import (
    WindowedHashCache,
    WindowedPrefixCache,
    WindowedRadixCache,
)
from tsched.scheduling.scheduler import Scheduler
from tsched.scheduling.sequence import Sequence
from tsched.scheduling.window import Window

BLOCK, WINDOW = 4, 8
CACHES = ["hash", "radix"]


def make_server(lag: int = 0, **options: Any) -> WindowServer:
    defaults: dict[str, Any] = {
        "num_blocks": 40,
        "block_size": BLOCK,
        "window": WINDOW,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 72,
        "eos_token_ids": (EOS,),
    }
    return WindowServer(Schedule(0, defaults | options, lag, (), (), 1.0))


def request(length: int, own: int = 0, max_tokens: int = 6) -> Request:
    """A prompt that begins with the same `length` tokens as every other, and `own` ones of its own."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return Request((*range(1, 1 + length), *range(100, 100 + own)), params)


def finish(server: WindowServer) -> None:
    for _ in range(10_000):
        is_done = not server.scheduler.has_unfinished
        server.step()
        if is_done:
            check_nothing_is_left(server.scheduler)
            return
    pytest.fail("somebody is unfinished after 10,000 steps")


def serve(server: WindowServer, number: int, wanted: Request) -> tuple[Sequence, int]:
    """Serve it alone, check what it gets, and say how many of its blocks need not be computed."""
    before = server.scheduler.cache_stats().hit_blocks
    (sequence,) = server.add([number], wanted)
    finish(server)
    assert_as_alone(server, sequence, wanted)
    return sequence, server.scheduler.cache_stats().hit_blocks - before


def assert_as_alone(server: WindowServer, sequence: Sequence, wanted: Request) -> None:
    assert (server.output_of(sequence), sequence.finish_reason) == server.alone(wanted, sequence.id)


def assert_follows(server: WindowServer, sequence: Sequence, wanted: Request) -> None:
    """Each token of the output, however long, is the one that follows those before it."""
    tokens, size = sequence.tokens, server.device.size
    facts = np.stack((tokens, np.arange(tokens.size), hashes_after(0, tokens.tolist())), axis=1)
    tenant = tenant_of(wanted.salt)
    for length in range(sequence.prompt_len, tokens.size):
        assert tokens[length] == next_token(facts[max(0, length - size) : length], tenant, 0.0)


@pytest.mark.parametrize(("prompt_len", "chunk", "lag"), [(10, 32, 1), (3_400, 48, 0)])
def test_eight_sequences_of_4000_tokens_end_in_40_blocks_without_a_preemption(
    prompt_len: int, chunk: int, lag: int
) -> None:
    """A window of 64 takes 5 blocks of 16 at most: with short prompts all eight run side by side."""
    server = make_server(
        lag, block_size=16, window=64, max_num_seqs=8, max_num_batched_tokens=chunk + 8, max_chunk_tokens=chunk,
        max_model_len=4_096, prefix_cache="hash",
    )  # fmt: skip
    assert server.scheduler.window is not None
    assert server.scheduler.window.most_blocks == most_held(64, chunk, 16)
    params = SamplingParams(temperature=0, max_tokens=4_000 - prompt_len, ignore_eos=True)
    wanted = [Request(tuple(range(9_000 * i + 1, 9_000 * i + 1 + prompt_len)), params) for i in range(8)]
    sequences = [server.add([i], one)[0] for i, one in enumerate(wanted)]
    most_running = 0
    while server.scheduler.has_unfinished:
        server.step()
        most_running = max(most_running, server.scheduler.num_running)
    finish(server)
    assert server.scheduler.counters.num_preemptions == 0
    assert most_running == 8 if prompt_len == 10 else most_running > 3
    for sequence, one in zip(sequences, wanted, strict=True):
        assert (sequence.tokens.size, sequence.finish_reason) == (4_000, "length")
        assert_follows(server, sequence, one)


@pytest.mark.slow
def test_a_request_of_32000_tokens_ends_in_a_pool_of_as_many_blocks_as_it_holds() -> None:
    most = most_held(64, 512, 16)
    server = make_server(
        1, num_blocks=most, block_size=16, window=64, max_num_seqs=1, max_num_batched_tokens=512, max_model_len=32_768
    )
    wanted = request(0, own=28_000, max_tokens=4_000)
    (sequence,) = server.add([0], wanted)
    while server.scheduler.has_unfinished:
        server.step()
    finish(server)
    assert sequence.tokens.size == 32_000
    assert_follows(server, sequence, wanted)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("prefix_cache", CACHES)
def test_a_hit_needs_the_last_windows_blocks_and_none_before_them(prefix_cache: str, lag: int) -> None:
    """Ten whole blocks in a pool of eight: the first ones are gone, and the whole prompt is a hit all the same."""
    server = make_server(lag, prefix_cache=prefix_cache, num_blocks=8, max_num_batched_tokens=8)
    wanted = request(0, own=41)
    assert serve(server, 0, wanted)[1] == 0
    assert serve(server, 1, wanted)[1] == 10
    assert serve(server, 2, Request(wanted.prompt[:9], wanted.params))[1] == 0, "what these tokens see is gone"


@pytest.mark.parametrize("prefix_cache", CACHES)
def test_a_conversation_comes_back_after_a_long_output(prefix_cache: str) -> None:
    """The first blocks of the output were given back before they could be kept: a hole, and a hit behind it."""
    server = make_server(prefix_cache=prefix_cache)
    sequence, _ = serve(server, 0, request(9, max_tokens=30))
    tokens = tuple(sequence.tokens.tolist())
    assert serve(server, 1, Request(tokens, request(0).params))[1] == 9
    assert serve(server, 2, Request(tokens[:21], request(0).params))[1] == 2, "of the output the end alone was kept"


@pytest.mark.parametrize("prefix_cache", CACHES)
def test_only_one_tenants_blocks_are_found(prefix_cache: str) -> None:
    server = make_server(prefix_cache=prefix_cache)
    wanted = request(0, own=41)
    serve(server, 0, wanted)
    other = Request(wanted.prompt, wanted.params, salt=b"other")
    assert serve(server, 1, other)[1] == 0
    assert serve(server, 2, other)[1] == serve(server, 3, wanted)[1] == 10


@pytest.mark.parametrize("lag", [0, 1])
def test_a_fork_at_a_place_whose_window_is_gone_computes_its_tokens_itself(lag: int) -> None:
    server = make_server(lag, prefix_cache="none")
    wanted = request(6, max_tokens=40)
    (parent,) = server.add([0], wanted)
    for _ in range(25):
        server.step()
    tokens = server.scheduler.output_of(parent)
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True) for seed in range(2)]
    late = server.fork(0, 1, params[0], 6 + len(tokens))
    early = server.fork(0, 2, params[1], 12)
    assert late.num_computed >= 6 + len(tokens) - 1
    assert late.first_block > 0
    assert (early.num_computed, early.blocks.size, early.first_block) == (0, 0, 0)
    finish(server)
    assert_as_alone(server, parent, wanted)
    assert_as_alone(server, late, Request(wanted.prompt, params[0], given=tuple(tokens)))
    assert_as_alone(server, early, Request(wanted.prompt, params[1], given=tuple(tokens[:6])))


class WindowedLevels(Levels):
    window = 6

    def logprobs_after(self, tokens: list[int]) -> torch.Tensor:
        return super().logprobs_after(tokens[-self.window :])


@pytest.mark.parametrize("prefix_cache", ["none", *CACHES])
def test_the_beams_of_a_windowed_model_are_those_of_brute_force(prefix_cache: str) -> None:
    """Beams fork from each other while their first blocks are given back, in a pool that is short of blocks."""
    rng = random.Random(3)
    params = BeamSearchParams(beam_width=3, max_tokens=14)
    for seed in range(4):
        model = WindowedLevels(6, 50, seed)
        engine = make_engine(model, 13, prefix_cache=prefix_cache, window=model.window)
        prompts = [[rng.randrange(6) for _ in range(rng.randint(1, 30))] for _ in range(2)]
        for prompt, one in zip(prompts, search(engine, prompts, params, {2}), strict=True):
            expected = by_brute_force(model.logprobs_after, prompt, params, {2})
            assert one.error is None
            assert [h.token_ids for h in one.finished] == [h.token_ids for h in expected]
        check_nothing_is_left(engine.scheduler)
        assert engine._runner._pages.num_copied > 0


@pytest.mark.parametrize("lag", [0, 1])
def test_who_gives_way_is_swapped_out_and_in_with_its_windows_blocks(lag: int) -> None:
    server = make_server(lag, preemption="swap", num_blocks=9, num_host_blocks=20, max_num_batched_tokens=6)
    wanted = [request(0, own=2 + i, max_tokens=40) for i in range(4)]
    sequences = [server.add([i], one)[0] for i, one in enumerate(wanted)]
    finish(server)
    counters = server.scheduler.counters
    assert 0 < counters.num_swapped_in <= 3 * counters.num_preemptions, "three blocks hold what 8 tokens see"
    for sequence, one in zip(sequences, wanted, strict=True):
        assert_as_alone(server, sequence, one)


def test_the_door_asks_for_a_windows_blocks_and_not_for_the_length() -> None:
    options: dict[str, Any] = {"block_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 8, "max_model_len": 400}
    params = SamplingParams(max_tokens=100)
    scheduler = build_scheduler(num_blocks=5, window=16, **options)
    assert scheduler.add(0, [7] * 200, params).max_length == 300
    assert scheduler.add(1, [7] * 200, SamplingParams(max_tokens=None)).max_length == 400
    scheduler = build_scheduler(num_blocks=4, window=16, **options)
    with pytest.raises(RefusedError, match="need 5 blocks of 4 tokens, the pool has 4"):
        scheduler.add(0, [7] * 200, params)
    assert scheduler.add(1, [7] * 10, SamplingParams(max_tokens=None)).max_length == 17
    whole = build_scheduler(
        num_blocks=50, window=16, **options | {"chunked_prefill": False, "max_num_batched_tokens": 400}
    )
    with pytest.raises(RefusedError, match="need 75 blocks"):  # a prompt that is computed whole
        whole.add(0, [7] * 200, params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be None or at least 1, got 0"),
        ({"window": 8, "num_states": 4}, "window must be None where there are num_states"),
    ],
)
def test_windows_that_serve_nobody_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_scheduler(
            num_blocks=4, block_size=4, max_num_seqs=1, max_num_batched_tokens=8, max_model_len=16, **options
        )


def test_random_schedules_and_worlds_with_windows() -> None:
    happened: Counter[str] = Counter()
    for model, count in (("window", 40), ("windowed", 1)):
        for seed in range(count):
            happened += serve_or_say_how_to_replay(draw_schedule(seed), server_factory(model), model).happened
    states = ("new", "prefill", "decode", "forked")
    assert min(happened[f"fork: {state}"] for state in states) > 0
    assert min(happened[f"blocks {what}"] for what in ("swapped in", "copied on write", "evicted")) > 0
    assert happened["blocks found in the cache"] > 0
    fired: Counter[str] = Counter()
    for seed in range(30):
        run_world(seed, fired, more_options=random_window)
    wanted = ("go on without the first blocks", "prefix hit (blocks)", "evict (blocks)", "adopt an equal block")
    assert min(fired[name] for name in (*wanted, "swap in", "fork running", "replace the last token")) > 0


FAULTS = (
    PlantedBug("one page too many is kept", Window, "count_passed", "// self.block_size, 0)",
               "// self.block_size - 1, 0)"),
    PlantedBug("a page goes back one token too early", Window, "count_passed", "places - self.size + 1",
               "places - self.size + 2"),
    PlantedBug("pages go back before the commit", Scheduler, "schedule", "self._in_flight.append(under_way)",
               "self._in_flight.append(under_way)\n"
               "    self.window and self._release_passed(under_way.prefills, plan.sampled_rows, plan.lengths)"),
    PlantedBug("a chunk is longer than a window's pages", Window, "cut", "np.minimum(wanted, ends - computed)",
               "wanted"),
    PlantedBug("a fork shares pages that are gone", KVMemory, "_cut_to_needed", "if first < held.first_block:",
               "if False:"),
    PlantedBug("swapped in as if from the first page on", KVMemory, "release_each", "if is_kept else 0",
               "if False else 0"),
    PlantedBug("a hit spans a hole", WindowedPrefixCache, "match", "if found[place] == NO_BLOCK:", "if False:"),
    PlantedBug("a hit has too few pages", WindowedPrefixCache, "_first_needed", "end * self._pool.block_size",
               "(end + 1) * self._pool.block_size"),
    PlantedBug("an evicted page can be hit", WindowedHashCache, "_remove",
               "del self._block_of[self._digest_of.pop(block)]", "del self._digest_of[block]"),
    PlantedBug("an evicted node can be hit", WindowedRadixCache, "_remove", "node.block = NO_BLOCK", "return"),
    PlantedBug("all tenants share one tree", WindowedRadixCache, "_find", "self._roots.get(sequence.cache_salt)",
               "next(iter(self._roots.values()), None)"),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(fault: PlantedBug) -> None:
    with planted(fault):
        assert first_failure(100, "window") is not None, f"no schedule notices that {fault.name}"
