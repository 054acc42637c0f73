"""Who gets how many tokens, who goes first, who gives way, and how they come back."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tsched.simulated_device import SimulatedDevice, check_accounts, tokens_alone
from tests.tsched.test_scheduler import MAX_MODEL_LEN, drive, make_scheduler
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.policies.priority import AGEING
from tsched.scheduling.scheduler import Scheduler
from tsched.scheduling.step_plan import StepPlan
from tsched.scheduling.token_budget import TokenBudget

ENDLESS = SamplingParams(max_tokens=30, ignore_eos=True)


def step(scheduler: Scheduler, device: SimulatedDevice) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.commit(plan, device.run(device.build(plan)))
    check_accounts(scheduler)
    return plan


@pytest.mark.parametrize(
    ("budget", "wanted", "counts", "left"),
    [
        ((8, None, 0.0), [1, 1, 0], [1, 1, 0], (6, 6)),
        ((8, None, 0.0), [5, 1, 9], [5, 1, 2], (0, 0)),
        ((8, 3, 0.0), [5, 1, 9], [3, 1, 3], (1, 1)),
        ((8, None, 0.5), [5, 1, 9], [4, 1, 0], (3, 0)),
        ((8, None, 0.5), [3, 1], [3, 1], (4, 1)),
        ((8, None, 0.5), [5, 9], [5, 3], (0, 0)),
        ((8, None, 0.25), [1] * 5 + [9], [1] * 5 + [3], (0, 0)),
        ((3, None, 0.0), [1, 9, 1, 1, 1], [1, 0, 1, 1, 0], (0, 0)),
        ((2, None, 0.0), [1, 1, 1], [1, 1, 0], (0, 0)),
        ((5, None, 0.0), [], [], (5, 5)),
    ],
)
def test_decodes_come_first_and_prefills_share_the_rest(
    budget: tuple[int, int | None, float], wanted: list[int], counts: list[int], left: tuple[int, int]
) -> None:
    got, *rest = TokenBudget(*budget, chunked=True).share(np.array(wanted, dtype=np.int64))
    assert (got.tolist(), tuple(rest)) == (counts, left)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunked_prefill": False}, "max_num_batched_tokens must be at least max_model_len, 40, got 16"),
        ({"chunked_prefill": False, "max_chunk_tokens": 4}, "they need chunked_prefill"),
        ({"chunked_prefill": False, "decode_share": 0.5}, "they need chunked_prefill"),
        ({"num_host_blocks": -1}, "num_blocks >= 1 and block_size >= 1, got -1 and 4"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_scheduler(**options)


def test_a_long_prompt_comes_in_chunks_while_decodes_go_on() -> None:
    scheduler = make_scheduler(num_blocks=40, max_chunk_tokens=4, max_num_batched_tokens=16)
    device = SimulatedDevice(scheduler)
    scheduler.add(0, [1], ENDLESS)
    step(scheduler, device)
    scheduler.add(1, list(range(1, 11)), ENDLESS)
    scheduler.add(2, list(range(3, 10)), ENDLESS)
    assert [step(scheduler, device).counts.tolist() for _ in range(3)] == [[1, 4, 4], [1, 4, 3], [1, 1, 2]]


@pytest.mark.parametrize("num_decoding", [1, 3])
def test_whole_prompts_that_fill_every_step_do_not_starve_the_decodes(num_decoding: int) -> None:
    """Prompts come faster than they can be computed: they and the running decodes take turns."""
    scheduler = make_scheduler(
        num_blocks=100, max_num_seqs=8, chunked_prefill=False, max_num_batched_tokens=MAX_MODEL_LEN, eos_token_ids=()
    )
    params = SamplingParams(max_tokens=30)
    decoding = [scheduler.add(i, [1 + i], params) for i in range(num_decoding)]
    device = SimulatedDevice(scheduler)
    step(scheduler, device)
    num_prompts = num_steps = 0
    while any(one.finish_reason is None for one in decoding):
        for _ in range(2):
            scheduler.add(100 + num_prompts, [2] * (MAX_MODEL_LEN // 2), SamplingParams(max_tokens=1))
            num_prompts += 1
        before = [len(scheduler.output_of(one)) for one in decoding]
        step(scheduler, device)
        step(scheduler, device)
        num_steps += 2
        after = [len(scheduler.output_of(one)) for one in decoding]
        assert all(new > old or one.finish_reason for one, old, new in zip(decoding, before, after, strict=True))
    assert num_steps <= 60
    assert scheduler.counters.num_finished - num_decoding >= num_steps - 2, "prompts fill every other step"


def test_whole_prompts_and_decodes_take_turns_where_nobody_else_comes() -> None:
    scheduler = make_scheduler(
        num_blocks=100, max_num_seqs=8, chunked_prefill=False, max_num_batched_tokens=MAX_MODEL_LEN, eos_token_ids=()
    )
    device = SimulatedDevice(scheduler)
    for number in range(2):
        scheduler.add(number, [1 + number], ENDLESS)
    step(scheduler, device)
    for number in range(2, 5):
        scheduler.add(number, [2] * (MAX_MODEL_LEN - 1), SamplingParams(max_tokens=1))
    plans = [step(scheduler, device).counts.tolist() for _ in range(7)]
    assert plans == [[1, 39], [1, 1], [1, 39], [1, 1], [1, 39], [1, 1], [1, 1]]


def test_a_whole_prompt_pauses_the_decodes_that_it_leaves_no_room() -> None:
    scheduler = make_scheduler(num_blocks=60, chunked_prefill=False, max_num_batched_tokens=MAX_MODEL_LEN)
    device = SimulatedDevice(scheduler)
    for number in range(2):
        scheduler.add(number, [1 + number], ENDLESS)
    step(scheduler, device)
    scheduler.add(2, [5] * 39, ENDLESS)
    scheduler.add(3, [6] * 20, ENDLESS)
    seen = [step(scheduler, device) for _ in range(3)]
    assert [plan.counts.tolist() for plan in seen] == [[1, 39], [1, 1, 20], [1, 1, 1]]
    assert seen[0].rows[0] == seen[1].rows[0], "the older decode has what room there is"
    drive(scheduler, device, max_steps=60)


def test_lower_priorities_go_first_and_age() -> None:
    scheduler = make_scheduler(num_blocks=40, max_num_seqs=1, order="priority")
    device = SimulatedDevice(scheduler)
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    for number, priority in enumerate([0, 1, 0, -1, 1]):
        scheduler.add(number, [number + 1], one, priority=priority)
    finished = []
    for number in range(5, 5 + AGEING):  # one more urgent request each time that one is served
        plan = scheduler.schedule()
        finished += [s.id for s in scheduler.commit(plan, device.run(device.build(plan)))]
        scheduler.add(number, [1], one, priority=0)
    assert finished[:3] == [3, 0, 2]
    assert finished[3:] == [*range(5, 1 + AGEING), 1], "a level is worth 256 later arrivals, and no more"


def test_the_least_urgent_gives_way() -> None:
    scheduler = make_scheduler(num_blocks=10, block_size=2, order="priority", max_num_seqs=3)
    device = SimulatedDevice(scheduler)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    sequences = [scheduler.add(i, [i + 1, 2], params, priority=priority) for i, priority in enumerate([1, 2, 0])]
    drive(scheduler, device, max_steps=80)
    assert [s.num_preemptions > 0 for s in sequences] == [False, True, False]
    for i, sequence in enumerate(sequences):
        assert sequence.output_token_ids == tokens_alone([i + 1, 2], params, MAX_MODEL_LEN)[0]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_swapped_one_computes_nothing_twice_and_comes_back_before_newcomers(lag: int) -> None:
    scheduler = make_scheduler(
        num_blocks=9, block_size=2, preemption="swap", num_host_blocks=20, max_num_seqs=2, order="priority"
    )
    device = SimulatedDevice(scheduler)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first, second = (scheduler.add(i, [i + 1, 2, 3, 4], params) for i in range(2))
    under_way: list = []
    while not second.num_preemptions:
        plan = scheduler.schedule()
        under_way.append((plan, device.run(device.build(plan))))
        while len(under_way) > lag:
            scheduler.commit(*under_way.pop(0))
    assert (plan.swap_outs.shape[1], plan.num_preempted) == (second.host_blocks.size, 1)
    urgent = scheduler.add(2, [9, 9], SamplingParams(max_tokens=1, ignore_eos=True), priority=-5)
    assert scheduler.host_pool is not None
    for late in under_way:
        scheduler.commit(*late)
    order: list[int] = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        order += [s.id for row in plan.placed.tolist() if (s := scheduler.table.sequences[row]) is not None]
        if plan.swap_ins.size:
            assert scheduler.host_pool.num_referenced == plan.swap_ins.shape[1], "free at the commit, not before"
        scheduler.commit(plan, device.run(device.build(plan)))
        check_accounts(scheduler)
    assert order == [second.id, urgent.id]
    assert scheduler.counters.num_swapped_out == scheduler.counters.num_swapped_in > 0
    assert scheduler.host_pool.num_free == 20
    assert scheduler.counters.num_prefill_tokens == 4 + 4 + 2
    for sequence, prompt in ((first, [1, 2, 3, 4]), (second, [2, 2, 3, 4]), (urgent, [9, 9])):
        assert sequence.output_token_ids == tokens_alone(prompt, sequence.params, MAX_MODEL_LEN)[0]


def test_a_fork_of_a_swapped_one_has_its_blocks_on_the_host() -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=2, preemption="swap", num_host_blocks=20, max_num_seqs=2)
    device = SimulatedDevice(scheduler)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    _, victim = (scheduler.add(i, [i + 1, 2, 3, 4], params) for i in range(2))
    while not victim.host_blocks.size:
        plan = scheduler.schedule()
        scheduler.commit(plan, device.run(device.build(plan)))
    child = scheduler.fork(1, 2, params)
    assert scheduler.host_pool is not None
    assert child.host_blocks.size
    assert set(child.host_blocks.tolist()) <= set(victim.host_blocks.tolist())
    assert set(scheduler.host_pool.refs(child.host_blocks)) == {2}
    drive(scheduler, device, max_steps=80)
    assert child.output_token_ids == victim.output_token_ids == tokens_alone([2, 2, 3, 4], params, MAX_MODEL_LEN)[0]
    assert scheduler.counters.num_prefill_tokens == 4 + 4, "nothing is computed twice"
    assert scheduler.host_pool.num_free == 20


def test_without_room_on_the_host_the_victim_is_computed_again() -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=2, preemption="swap", num_host_blocks=1, max_num_seqs=2)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    sequences = [scheduler.add(i, [i + 1, 2, 3, 4], params) for i in range(2)]
    drive(scheduler, SimulatedDevice(scheduler), max_steps=80)
    assert (scheduler.counters.num_swapped_out, scheduler.counters.num_preemptions) == (0, 1)
    for i, sequence in enumerate(sequences):
        assert sequence.output_token_ids == tokens_alone([i + 1, 2, 3, 4], params, MAX_MODEL_LEN)[0]
