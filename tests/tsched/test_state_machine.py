"""Pool, tables, caches, forks, swaps and aborts under every interleaving, with a model of what each page holds.

hypothesis looks for a short failure; a random driver fires the same rules many times more. A million steps:

    python -m tests.tsched.random_rules --steps 1000000
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.tsched.page_contents import VOCAB
from tests.tsched.random_rules import run_world
from tests.tsched.serving_world import MAX_MODEL_LEN, SALTS, ServingWorld

numbers = st.integers(0, 60)
own_tokens = st.lists(st.integers(1, VOCAB - 1), max_size=3)
options_strategy = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(10, 30),
        "block_size": st.sampled_from([1, 2, 4]),
        "num_host_blocks": st.sampled_from([0, 3, 30]),
        "max_num_seqs": st.integers(1, 5),
        "order": st.sampled_from(["fcfs", "priority"]),
        "preemption": st.sampled_from(["swap", "recompute"]),
        "prefix_cache": st.sampled_from(["hash", "radix", "none"]),
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
    *("prefix hit (blocks)", "evict (blocks)", "adopt an equal block", "finish: stop", "finish: length", "wind up"),
    *("order: fcfs", "order: priority", "preemption: recompute", "preemption: swap"),
    *("prefix_cache: none", "prefix_cache: hash", "prefix_cache: radix"),
}


def test_twenty_thousand_random_steps_and_every_rule_fired() -> None:
    fired: ClassVar[Counter[str]] = Counter()
    num_steps = sum(run_world(seed, fired) for seed in range(80))
    print(num_steps, fired)
    assert num_steps > 20_000
    assert {name for name, times in fired.items() if times} == EVENTS
