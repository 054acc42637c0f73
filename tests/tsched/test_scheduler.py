"""The scheduler against a simulated device: everybody gets exactly the tokens that they get alone."""

from __future__ import annotations

import subprocess
import sys
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.tsched.schedulers import build_scheduler
from tests.tsched.simulated_device import EOS, VOCAB, Launch, SimulatedDevice, check_accounts, check_plan, tokens_alone
from tsched.requests.errors import RefusedError
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.scheduler import Scheduler
from tsched.scheduling.sequence import Sequence

MAX_MODEL_LEN = 40


def make_scheduler(**changes: object) -> Scheduler:
    arguments: dict = {
        "num_blocks": 8,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": MAX_MODEL_LEN,
        "eos_token_ids": (EOS,),
    }
    return build_scheduler(**arguments | changes)


def drive(scheduler: Scheduler, device: SimulatedDevice, max_steps: int, lag: int = 0) -> int:
    """Step until nobody is left, committing `lag` plans late; returns the number of steps."""
    under_way: deque[tuple[Launch, np.ndarray]] = deque()
    for step in range(max_steps):
        if not scheduler.has_unfinished and not under_way:
            return step
        plan = scheduler.schedule()
        check_plan(scheduler, plan)
        check_accounts(scheduler)
        launch = device.build(plan)
        under_way.append((launch, device.run(launch)))
        while len(under_way) > (0 if plan.is_empty else lag):
            done, tokens = under_way.popleft()
            scheduler.commit(done.plan, tokens)
            check_accounts(scheduler)
    pytest.fail(f"{len(scheduler._unfinished)} sequences are unfinished after {max_steps} steps")


def params_strategy() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        lambda max_tokens, min_share, ignore_eos, stop_ids: SamplingParams(
            max_tokens=max_tokens,
            min_tokens=max_tokens * min_share // 2,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_ids,
        ),
        st.integers(1, 20),
        st.integers(0, 2),
        st.booleans(),
        st.lists(st.integers(1, VOCAB - 1), max_size=2),
    )


prompts = st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=24)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(prompts, params_strategy()), min_size=1, max_size=8),
    block_size=st.sampled_from([1, 2, 4, 16]),
    spare_blocks=st.integers(0, 12),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 24),
    lag=st.integers(0, 1),
)
def test_everybody_gets_the_tokens_they_get_alone(
    requests: list[tuple[list[int], SamplingParams]],
    block_size: int,
    spare_blocks: int,
    max_num_seqs: int,
    budget: int,
    lag: int,
) -> None:
    lengths = [min(len(prompt) + (params.max_tokens or 0), MAX_MODEL_LEN) for prompt, params in requests]
    scheduler = make_scheduler(
        num_blocks=max(-(-(length - 1) // block_size) for length in lengths) + spare_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )
    sequences = [scheduler.add(i, prompt, params) for i, (prompt, params) in enumerate(requests)]
    # The oldest advances by a token a step, and nobody's progress is needed for that.
    drive(scheduler, SimulatedDevice(scheduler), max_steps=2 * sum(lengths) + 10, lag=lag)
    assert scheduler.pool.num_referenced == 0
    for sequence, (prompt, params) in zip(sequences, requests, strict=True):
        assert (sequence.output_token_ids, sequence.finish_reason) == tokens_alone(prompt, params, MAX_MODEL_LEN)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come and go at any moment, plans are committed at once or one late."""

    @initialize(
        num_blocks=st.integers(2, 12),
        block_size=st.sampled_from([1, 4]),
        seqs=st.integers(1, 4),
        budget=st.integers(1, 12),
    )
    def start(self, num_blocks: int, block_size: int, seqs: int, budget: int) -> None:
        self.scheduler = make_scheduler(
            num_blocks=num_blocks, block_size=block_size, max_num_seqs=seqs, max_num_batched_tokens=budget
        )
        self.device = SimulatedDevice(self.scheduler)
        self.under_way: deque[tuple[Launch, np.ndarray]] = deque()
        self.alive: dict[int, Sequence] = {}
        self.requests: list[tuple[list[int], SamplingParams]] = []

    @rule(prompt=prompts, params=params_strategy())
    def add(self, prompt: list[int], params: SamplingParams) -> None:
        number = len(self.requests)
        needed = -(-(min(len(prompt) + (params.max_tokens or 0), MAX_MODEL_LEN) - 1) // self.scheduler.pool.block_size)
        if needed > self.scheduler.pool.num_blocks:
            with pytest.raises(RefusedError, match=f"need {needed} blocks"):
                self.scheduler.add(number, prompt, params)
            return
        self.alive[number] = self.scheduler.add(number, prompt, params)
        self.requests.append((prompt, params))

    @precondition(lambda self: len(self.under_way) < 2)
    @rule()
    def schedule(self) -> None:
        plan = self.scheduler.schedule()
        check_plan(self.scheduler, plan)
        launch = self.device.build(plan)
        self.under_way.append((launch, self.device.run(launch)))

    @precondition(lambda self: self.under_way)
    @rule()
    def commit(self) -> None:
        launch, tokens = self.under_way.popleft()
        for sequence in self.scheduler.commit(launch.plan, tokens):
            expected = tokens_alone(*self.requests[sequence.id], MAX_MODEL_LEN)
            assert (sequence.output_token_ids, sequence.finish_reason) == expected
            del self.alive[sequence.id]

    @precondition(lambda self: self.alive)
    @rule(choice=st.integers(0, 100))
    def abort(self, choice: int) -> None:
        number = sorted(self.alive)[choice % len(self.alive)]
        sequence = self.alive.pop(number)
        so_far = self.scheduler.output_of(sequence)
        assert self.scheduler.abort(number) is sequence
        assert (sequence.finish_reason, sequence.output_token_ids) == ("abort", so_far)
        expected, _ = tokens_alone(*self.requests[number], MAX_MODEL_LEN)
        assert so_far == expected[: len(so_far)]
        assert self.scheduler.abort(number) is None

    @invariant()
    def accounts_balance(self) -> None:
        if hasattr(self, "scheduler"):
            check_accounts(self.scheduler)
            assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.alive)

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            while self.under_way:
                self.commit()
            drive(self.scheduler, self.device, max_steps=2 * MAX_MODEL_LEN * len(self.requests) + 10)
            for number, sequence in self.alive.items():
                expected = tokens_alone(*self.requests[number], MAX_MODEL_LEN)
                assert (sequence.output_token_ids, sequence.finish_reason) == expected


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


def test_pressure_preempts_and_loses_no_token() -> None:
    scheduler = make_scheduler(num_blocks=9)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    sequences = [scheduler.add(i, [i + 1, 2, 3], params) for i in range(4)]
    drive(scheduler, SimulatedDevice(scheduler), max_steps=200)
    assert scheduler.counters.num_preemptions > 0
    assert sum(s.num_preemptions for s in sequences) == scheduler.counters.num_preemptions
    assert sequences[0].num_preemptions == 0, "the oldest never gives way"
    for i, sequence in enumerate(sequences):
        assert sequence.output_token_ids == tokens_alone([i + 1, 2, 3], params, MAX_MODEL_LEN)[0]


def test_the_newest_gives_way_first_and_comes_back_in_its_old_place() -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=1, max_num_batched_tokens=32)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    sequences = [scheduler.add(i, [1, 2], params) for i in range(3)]
    device = SimulatedDevice(scheduler)
    victims, finished = [], []
    while scheduler.has_unfinished:
        before = [s.num_preemptions for s in sequences]
        running = [i for i, s in enumerate(sequences) if s.row >= 0]
        plan = scheduler.schedule()
        gave_way = [i for i, s in enumerate(sequences) if s.num_preemptions > before[i]]
        assert len(gave_way) == plan.num_preempted
        assert gave_way == running[len(running) - len(gave_way) :], "the newest of the running"
        victims += gave_way
        finished += [s.id for s in scheduler.commit(plan, device.run(device.build(plan)))]
    assert victims
    assert finished == [0, 1, 2]


def test_a_long_prompt_is_split_while_decodes_go_on() -> None:
    scheduler = make_scheduler(num_blocks=40, max_num_batched_tokens=6)
    device = SimulatedDevice(scheduler)
    scheduler.add(0, [1], SamplingParams(max_tokens=12, ignore_eos=True))
    first = scheduler.schedule()
    scheduler.commit(first, device.run(device.build(first)))
    scheduler.add(1, list(range(1, 18)), SamplingParams(max_tokens=2, ignore_eos=True))
    seen = []
    for _ in range(5):
        plan = scheduler.schedule()
        seen.append((plan.num_decodes, plan.counts.tolist(), plan.sampled.tolist()))
        scheduler.commit(plan, device.run(device.build(plan)))
    assert seen[:4] == [(1, [1, 5], [0]), (1, [1, 5], [0]), (1, [1, 5], [0]), (1, [1, 2], [0, 1])]
    assert seen[4] == (2, [1, 1], [0, 1])


def test_a_late_commit_drops_what_comes_after_a_stop() -> None:
    scheduler = make_scheduler()
    device = SimulatedDevice(scheduler)
    prompt = [1, 2, 3]
    stop = tokens_alone(prompt, SamplingParams(max_tokens=1, ignore_eos=True), MAX_MODEL_LEN)[0][0]
    sequence = scheduler.add(0, prompt, SamplingParams(max_tokens=9, stop_token_ids=[stop]))
    first = scheduler.schedule()
    first_tokens = device.run(device.build(first))
    second = scheduler.schedule()
    second_tokens = device.run(device.build(second))
    assert scheduler.commit(first, first_tokens) == [sequence]
    other = scheduler.add(1, [4], SamplingParams(max_tokens=1, ignore_eos=True))
    third = scheduler.schedule()  # the row is taken over before the second plan comes in
    assert third.rows.tolist() == second.rows.tolist()
    assert scheduler.commit(second, second_tokens) == []
    assert sequence.output_token_ids == [stop]
    assert scheduler.commit(third, device.run(device.build(third))) == [other]
    assert len(other.output_token_ids) == 1


def test_nothing_is_computed_past_a_last_token_that_is_under_way() -> None:
    scheduler = make_scheduler(num_blocks=1)
    device = SimulatedDevice(scheduler)
    scheduler.add(0, [1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
    launches = []
    for expected in ([2], [1], [1], []):
        plan = scheduler.schedule()
        assert plan.counts.tolist() == expected
        launch = device.build(plan)
        launches.append((plan, device.run(launch)))
        if len(launches) == 2:
            scheduler.commit(*launches.pop(0))
    assert launches[0][0].is_empty
    assert not scheduler.has_unfinished


def test_commit_takes_plans_once_and_in_order() -> None:
    scheduler = make_scheduler()
    device = SimulatedDevice(scheduler)
    scheduler.add(0, [1], SamplingParams(max_tokens=9, ignore_eos=True))
    first = scheduler.schedule()
    tokens = device.run(device.build(first))
    second = scheduler.schedule()
    with pytest.raises(RuntimeError, match="order"):
        scheduler.commit(second, tokens)
    with pytest.raises(RuntimeError, match="two plans"):
        scheduler.schedule()
    with pytest.raises(ValueError, match="samples 1 tokens"):
        scheduler.commit(first, np.array([1, 2]))
    scheduler.commit(first, tokens)
    with pytest.raises(RuntimeError, match="once"):
        scheduler.commit(first, tokens)


def test_requests_that_can_never_fit_are_refused_at_the_door() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    with pytest.raises(RefusedError, match="empty"):
        scheduler.add(0, [], SamplingParams())
    with pytest.raises(RefusedError, match="max_model_len is 40"):
        scheduler.add(0, [1] * 40, SamplingParams())
    with pytest.raises(RefusedError, match="need 5 blocks of 4 tokens, the pool has 4"):
        scheduler.add(0, [1] * 10, SamplingParams(max_tokens=8))
    with pytest.raises(RefusedError, match="the pool has 4"):
        scheduler.add(0, [1] * 17, SamplingParams(max_tokens=None))
    fits = scheduler.add(0, [1] * 10, SamplingParams(max_tokens=7, ignore_eos=True))  # the 17th is never fed back
    whole = scheduler.add(1, [2] * 10, SamplingParams(max_tokens=None, ignore_eos=True))
    drive(scheduler, SimulatedDevice(scheduler), max_steps=60)
    assert [len(s.output_token_ids) for s in (fits, whole)] == [7, 7]
    scheduler.add(5, [1], SamplingParams())
    with pytest.raises(ValueError, match="already"):
        scheduler.add(5, [1], SamplingParams())


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([1.5], {}, RefusedError, "integers below 2\\*\\*63, got float64"),
        ([2**63], {}, RefusedError, "integers below 2\\*\\*63, got uint64"),
        ([2**70], {}, RefusedError, "integers below 2\\*\\*63"),
        (["1"], {}, RefusedError, "integers below 2\\*\\*63"),
        ([True], {}, RefusedError, "got bool"),
        ([[1, 2]], {}, RefusedError, r"got int64 of \[1, 2\]"),
        ([1], {"priority": 1.5}, TypeError, "priority must be an integer, got 1.5"),
        ([1], {"priority": True}, TypeError, "priority must be an integer, got True"),
        ([1], {"priority": -(2**31) - 1}, ValueError, "priority must be from"),
    ],
)
def test_what_is_no_prompt_or_priority_is_refused(
    prompt: list, options: dict, error: type[Exception], message: str
) -> None:
    scheduler = make_scheduler()
    with pytest.raises(error, match=message):
        scheduler.add(0, prompt, SamplingParams(), **options)
    assert not scheduler.has_unfinished
    taken = scheduler.add(0, np.array([1, 2], dtype=np.uint64), SamplingParams(), priority=np.int32(3))
    assert (taken.tokens.tolist(), taken.priority) == ([1, 2], 3)


def test_an_outsider_can_end_a_sequence_anywhere() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    device = SimulatedDevice(scheduler)
    running = scheduler.add(0, [1, 2], SamplingParams(max_tokens=9, ignore_eos=True))
    waiting = scheduler.add(1, [3], SamplingParams(max_tokens=9, ignore_eos=True))
    plan = scheduler.schedule()
    scheduler.commit(plan, device.run(device.build(plan)))
    assert scheduler.finish(1, "stop") is waiting
    assert scheduler.finish(0, "stop") is running
    assert len(running.output_token_ids) == 1
    assert (waiting.output_token_ids, waiting.finish_reason) == ([], "stop")
    assert scheduler.pool.num_referenced == 0
    assert scheduler.schedule().is_empty


def test_abort_all_leaves_a_scheduler_that_works() -> None:
    scheduler = make_scheduler()
    device = SimulatedDevice(scheduler)
    doomed = [scheduler.add(i, [1, 2], SamplingParams(max_tokens=9)) for i in range(6)]
    scheduler.schedule()
    scheduler.abort_all()
    assert [s.finish_reason for s in doomed] == ["abort"] * 6
    check_accounts(scheduler)
    again = scheduler.add(9, [1, 2], SamplingParams(max_tokens=9, ignore_eos=True))
    drive(scheduler, device, max_steps=20)
    assert len(again.output_token_ids) == 9


def test_the_scheduler_loads_neither_torch_nor_the_model() -> None:
    code = (
        "import sys, tsched, tsched.scheduling.scheduler; "
        "print([m for m in ('torch', 'tmodel', 'tkernels', 'triton', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
