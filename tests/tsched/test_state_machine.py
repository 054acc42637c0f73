"""Pool, tables, caches, forks, swaps and aborts under every interleaving, with a model of what each page holds.

hypothesis looks for a short failure; a random driver fires the same rules many times more. A million steps:

    python -m tests.tsched.random_rules --steps 1000000
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.tsched.page_contents import VOCAB
from tests.tsched.planted_bugs import PlantedBug, planted
from tests.tsched.random_rules import run_world
from tests.tsched.serving_world import MAX_MODEL_LEN, SALTS, ServingWorld
from tsched.scheduling.block_pool import BlockPool
from tsched.scheduling.departures import Departures
from tsched.scheduling.kv_memory import KVMemory
from tsched.scheduling.planner import Planner
from tsched.scheduling.policies import ORDERS, PREEMPTIONS, PREFIX_CACHES
from tsched.scheduling.policies.hash_prefix_cache import HashPrefixCache, Run
from tsched.scheduling.policies.radix_prefix_cache import RadixPrefixCache
from tsched.scheduling.policies.run_cache import RunCache
from tsched.scheduling.policies.run_queue import RunQueue

numbers = st.integers(0, 60)
own_tokens = st.lists(st.integers(1, VOCAB - 1), max_size=3)
options_strategy = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(10, 30),
        "block_size": st.sampled_from([1, 2, 4]),
        "num_host_blocks": st.sampled_from([0, 3, 30]),
        "max_num_seqs": st.integers(1, 5),
        "order": st.sampled_from(sorted(ORDERS)),
        "preemption": st.sampled_from(sorted(PREEMPTIONS)),
        "prefix_cache": st.sampled_from(sorted(PREFIX_CACHES)),
    }
)
budgets = st.one_of(
    st.fixed_dictionaries(
        {
            "max_num_batched_tokens": st.integers(1, 20),
            "max_chunk_tokens": st.sampled_from([None, 1, 3, 8]),
            "decode_share": st.sampled_from([0.0, 0.3]),
        }
    ),
    st.just({"max_num_batched_tokens": MAX_MODEL_LEN, "chunked_prefill": False}),
)


class ServingMachine(RuleBasedStateMachine):
    fired: ClassVar[Counter[str]] = Counter()
    world: ServingWorld | None = None

    @initialize(options=options_strategy, budget=budgets)
    def start(self, options: dict[str, Any], budget: dict[str, Any]) -> None:
        self.world = ServingWorld(self.fired, **options, **budget)

    @rule(
        stem=st.integers(0, 1),
        stem_len=st.integers(0, 23),
        own=own_tokens,
        salt=st.sampled_from([0, 0, 1, 2]),
        priority=st.integers(-1, 1),
        group=st.sampled_from([1, 1, 2, 3]),
        max_tokens=st.integers(1, 18),
        eos=st.booleans(),
    )
    def arrive(self, **arguments: Any) -> None:
        assert self.world is not None
        self.world.arrive(**arguments)

    @rule(
        choice=numbers, own=own_tokens, salt=st.sampled_from([0, 0, *range(len(SALTS))]), max_tokens=st.integers(1, 8)
    )
    def come_back(self, **arguments: Any) -> None:
        assert self.world is not None
        self.world.come_back(**arguments)

    @precondition(lambda self: len(self.world.pages.under_way) < 2)
    @rule()
    def schedule(self) -> None:
        assert self.world is not None
        self.world.schedule()

    @precondition(lambda self: self.world.pages.under_way)
    @rule()
    def commit(self) -> None:
        assert self.world is not None
        self.world.commit()

    @rule(num_steps=st.integers(1, 6))
    def run_on(self, num_steps: int) -> None:
        """A few steps one behind the other, so that much happens between the other rules."""
        assert self.world is not None
        for _ in range(num_steps):
            self.world.schedule()
            self.world.check()
            self.world.commit()
            self.world.check()

    @precondition(lambda self: self.world.alive)
    @rule(choice=numbers)
    def abort(self, choice: int) -> None:
        assert self.world is not None
        self.world.abort(choice)

    @precondition(lambda self: self.world.alive)
    @rule(choice=numbers, num_tokens=st.one_of(st.none(), numbers), max_tokens=st.integers(1, 18), eos=st.booleans())
    def fork(self, **arguments: Any) -> None:
        assert self.world is not None
        self.world.fork(**arguments)

    @precondition(lambda self: self.world.alive and not self.world.pages.under_way)
    @rule(choice=numbers, token=st.integers(1, VOCAB - 1))
    def replace_last(self, choice: int, token: int) -> None:
        assert self.world is not None
        self.world.replace_last(choice, token)

    @precondition(lambda self: self.world.pages.under_way)
    @rule()
    def lose_a_step(self) -> None:
        assert self.world is not None
        self.world.lose_a_step()

    @precondition(lambda self: self.world.pages.under_way)
    @rule()
    def run_out_of_memory(self) -> None:
        assert self.world is not None
        self.world.run_out_of_memory()

    @precondition(lambda self: self.world.pages.under_way)
    @rule()
    def lose_the_tokens(self) -> None:
        assert self.world is not None
        self.world.lose_the_tokens()

    @invariant()
    def holds(self) -> None:
        if self.world is not None:
            self.world.check()

    def teardown(self) -> None:
        if self.world is not None:
            self.world.wind_up()


TestServingMachine = ServingMachine.TestCase
TestServingMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)

# All that the rules can come to; what never fired is not tested.
EVENTS = {
    *("arrive", "arrive as a group", "refuse", "schedule", "schedule ahead", "commit", "commit late"),
    *("fork a group", "fork running", "fork waiting", "fork swapped out", "refuse a fork", "replace the last token"),
    *("abort running", "abort while a plan runs it", "abort waiting", "abort waiting with blocks", "abort swapped out"),
    *("preempt", "swap out", "swap in", "copy on write", "give up a waiting one's blocks", "lose a step"),
    *("run out of memory", "run out of memory, others stay", "lose what was held"),
    *("lose the tokens", "lose the tokens while a plan runs"),
    *("prefix hit (blocks)", "evict (blocks)", "adopt an equal block", "finish: stop", "finish: length", "wind up"),
    *("order: fcfs", "order: priority", "preemption: recompute", "preemption: swap"),
    *("prefix_cache: none", "prefix_cache: hash", "prefix_cache: radix"),
}


def _run_worlds(count: int) -> tuple[int, Counter[str]]:
    fired: Counter[str] = Counter()
    return sum(run_world(seed, fired) for seed in range(count)), fired


def test_twenty_thousand_random_steps_and_every_rule_fired() -> None:
    fired: ClassVar[Counter[str]] = Counter()
    num_steps = sum(run_world(seed, fired) for seed in range(80))
    print(num_steps, fired)
    assert num_steps > 20_000
    assert {name for name, times in fired.items() if times} == EVENTS


FAULTS = (
    # In the caches
    PlantedBug("a digest without the past", HashPrefixCache, "_chain", "last + data", "data"),
    PlantedBug("a digest without the salt", HashPrefixCache, "_root", "blake2b(salt,", "blake2b(b'',"),
    PlantedBug("another salt's tree", RadixPrefixCache, "_find", "self._roots.get(sequence.cache_salt)",
               "next(iter(self._roots.values()), None)"),
    PlantedBug("a full hit leaves no token", RunCache, "match", "(sequence.tokens.size - 1)", "sequence.tokens.size"),
    PlantedBug("a hit takes no reference", RunCache, "match", "self._pool.share(blocks)", "pass"),
    PlantedBug("an unfinished block is matchable", RunCache, "insert_each", "num_computed // pool.block_size",
               "-(-num_computed // pool.block_size)"),
    PlantedBug("what others have too is kept anew", RunCache, "_add_unknown", "self._has_first_of(sequence)", "False"),
    PlantedBug("an output goes on a run that another's follow", RunCache, "_ends_at", "and self._is_leaf(run)", ""),
    PlantedBug("a run goes on with the wrong tokens", HashPrefixCache, "_extend", "start = leaf.first + size",
               "start = leaf.first"),
    PlantedBug("an evicted block's tokens stay in a run", HashPrefixCache, "_extend",
               "leaf.pending[: num_pending * block_size * 8]", "leaf.pending"),
    PlantedBug("an evicted block's digest stays in a run", HashPrefixCache, "_extend",
               "leaf.digests[: size * DIGEST_SIZE]", "leaf.digests"),
    PlantedBug("a node goes on with the wrong tokens", RadixPrefixCache, "_extend", "leaf.tokens[: size * self._width]",
               "leaf.tokens"),
    PlantedBug("a whole run in use is evicted", RunQueue, "_drop_unused",
               "not runs or np.count_nonzero(self._pool.refs(np.concatenate(blocks)))", "not runs"),
    PlantedBug("an evicted block can be matched", HashPrefixCache, "_cut",
               "leaf.blocks = leaf.blocks[:size]", "pass"),
    PlantedBug("an evicted run can be matched", HashPrefixCache, "_remove",
               "del self._run_at[leaf.digests[:DIGEST_SIZE]]", "pass"),
    PlantedBug("runs that differ at their ends are equal", Run, "count_same", "places[-1]", "places[0]"),
    PlantedBug("a block in use is evicted", RunQueue, "_evict", "end = end[: is_used.argmax()]", "pass"),
    PlantedBug("the prefix goes before its leaves", RunQueue, "touch", "unused.move_to_end(above)",
               "unused.move_to_end(above, last=False)"),
    PlantedBug("the digests of an output begin too late", HashPrefixCache, "_append", "tokens[num_digests *",
               "tokens[(num_digests + 1) *"),
    PlantedBug("a split hash run takes the wrong blocks", HashPrefixCache, "_split", "run.blocks[:count]",
               "run.blocks[1 : count + 1]"),
    PlantedBug("a split takes the wrong blocks", RadixPrefixCache, "_split", "node.blocks[:count]",
               "node.blocks[1 : count + 1]"),
    PlantedBug("a block that differs at its end is a hit", RadixPrefixCache, "_count_same", "same * 8 // width",
               "-(-same * 8 // width)"),
    # Around them
    PlantedBug("cached blocks are free", BlockPool, "release", "is_unused & self._kept[index]", "is_unused & False"),
    PlantedBug("matchable while its plan is under way", Departures, "end_rows",
               "= table.num_committed(row)", "= int(table.computed[row])"),
    PlantedBug("a block that two give back at once", BlockPool, "release_each", "take(joint) != 1", "take(joint) > 9"),
    PlantedBug("a preempted one's too", Planner, "_preempt", "blocks, num_committed)", "blocks, num_computed)"),
    PlantedBug("a fork writes to its parent's block", KVMemory, "enter",
               "num_computed % self.pool.block_size != 0 and self._is_read_by_others(held[-1:])", "False"),
    PlantedBug("a parent writes to its fork's block", Planner, "_writers_to_shared",
               "int(pool.refs(table.blocks[row, place : place + 1])[0]) > 1", "False"),
    PlantedBug("host blocks are free while they are read", KVMemory, "_restore",
               "sequence.host_blocks, sequence.host_state = NO_BLOCKS, NO_STATE",
               "sequence.host_blocks = NO_BLOCKS; self.host_pool.release(host)"),
    PlantedBug("swapped in elsewhere", KVMemory, "_restore", "np.stack((host,", "np.stack((host[::-1],"),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(fault: PlantedBug) -> None:
    with planted(fault), pytest.raises((AssertionError, LookupError, RuntimeError, ValueError)) as caught:
        _run_worlds(40)
    assert "in the world of seed" in "".join(caught.value.__notes__)
