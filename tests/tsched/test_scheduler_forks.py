"""Forks, groups and copies on write, one at a time."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tsched.simulated_device import SimulatedDevice, check_accounts, tokens_after, tokens_alone
from tests.tsched.test_scheduler import MAX_MODEL_LEN, drive, make_scheduler
from tsched.requests.errors import RefusedError
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.scheduler import Scheduler
from tsched.scheduling.step_plan import StepPlan

ENDLESS = SamplingParams(max_tokens=30, ignore_eos=True)


def step(scheduler: Scheduler, device: SimulatedDevice) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.commit(plan, device.run(device.build(plan)))
    check_accounts(scheduler)
    return plan


def test_a_group_computes_its_prompt_once() -> None:
    scheduler = make_scheduler(num_blocks=40)
    device = SimulatedDevice(scheduler)
    prompt = [3, 1, 4, 1, 5, 9, 2]
    params = [SamplingParams(max_tokens=6, ignore_eos=True, min_tokens=i) for i in range(4)]
    group = scheduler.add_group([10, 11, 12, 13], prompt, params, priority=2, cache_salt=b"salt")
    assert (scheduler.num_waiting, scheduler.num_running) == (4, 0)
    assert step(scheduler, device).counts.tolist() == [7]
    assert [s.blocks.size for s in group] == [0, 2, 2, 2], "they hold the prompt's blocks"
    second = step(scheduler, device)
    assert (second.counts.tolist(), second.starts.tolist()) == ([1] * 4, [7, 6, 6, 6]), "and compute its last token"
    assert second.copies.shape == (2, 3), "four of them write to one block: three copy it"
    assert len({*second.copies[0].tolist()}) == 1
    drive(scheduler, device, max_steps=20)
    expected = tokens_alone(prompt, params[0], MAX_MODEL_LEN)
    assert [(s.output_token_ids, s.finish_reason) for s in group] == [expected] * 4
    assert [(s.priority, s.cache_salt, s.arrival) for s in group] == [(2, b"salt", 0)] * 4
    assert scheduler.counters.num_forks == 3
    assert scheduler.counters.num_prefill_tokens == 7


def test_a_group_whose_prompt_ends_with_a_block_copies_the_last_one() -> None:
    """The last token runs again, in a copy: the block it was in first is the parent's."""
    scheduler = make_scheduler(num_blocks=40)
    device = SimulatedDevice(scheduler)
    scheduler.add_group([0, 1], [3, 1, 4, 1, 5, 9, 2, 6], [ENDLESS] * 2)
    step(scheduler, device)
    plan = step(scheduler, device)
    assert (plan.starts.tolist(), plan.copies.shape[1], plan.grown.size) == ([8, 7], 1, 1)


@pytest.mark.parametrize("gone", [[0], [0, 1], [1], [0, 2], [2, 1, 0]])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_any_of_a_group_may_go_at_any_moment(gone: list[int], lag: int, num_steps: int) -> None:
    scheduler = make_scheduler(num_blocks=12, max_num_batched_tokens=4)
    device = SimulatedDevice(scheduler)
    prompt = [3, 1, 4, 1, 5, 9, 2]
    group = scheduler.add_group([0, 1, 2], prompt, [ENDLESS] * 3)
    under_way = []
    for _ in range(num_steps):
        plan = scheduler.schedule()
        under_way.append((plan, device.run(device.build(plan))))
        while len(under_way) > lag:
            scheduler.commit(*under_way.pop(0))
    for number in gone:
        assert scheduler.abort(number) is group[number]
        check_accounts(scheduler)
    for plan, tokens in under_way:
        scheduler.commit(plan, tokens)
    drive(scheduler, device, max_steps=100, lag=lag)
    for number in {0, 1, 2} - {*gone}:
        assert group[number].output_token_ids == tokens_alone(prompt, ENDLESS, MAX_MODEL_LEN)[0]
    assert scheduler.pool.num_referenced == 0


def test_a_fork_of_fewer_tokens_goes_on_from_there() -> None:
    scheduler = make_scheduler(num_blocks=40)
    device = SimulatedDevice(scheduler)
    parent = scheduler.add(0, [5, 6, 7], ENDLESS)
    for _ in range(8):
        step(scheduler, device)
    tokens = [5, 6, 7, *scheduler.output_of(parent)]
    child = scheduler.fork(0, 1, SamplingParams(max_tokens=9, ignore_eos=True), num_tokens=7)
    assert (child.prompt_len, child.num_computed, child.blocks.size) == (3, 6, 2)
    short = scheduler.fork(0, 2, SamplingParams(max_tokens=4, ignore_eos=True), num_tokens=2)
    assert (short.prompt_len, short.num_computed) == (2, 1)
    drive(scheduler, device, max_steps=60)
    assert child.output_token_ids == tokens_after(tokens[:7], 3, child.params, MAX_MODEL_LEN)[0]
    assert short.output_token_ids == tokens_alone([5, 6], short.params, MAX_MODEL_LEN)[0]
    assert len(child.output_token_ids) == 9, "max_tokens counts from the end of the parent's prompt"


def test_a_forked_row_that_must_wait_for_tokens_copies_when_its_turn_comes() -> None:
    scheduler = make_scheduler(num_blocks=30, max_num_batched_tokens=4, max_chunk_tokens=2, decode_share=0.9)
    device = SimulatedDevice(scheduler)
    scheduler.add(0, [1], ENDLESS)
    prompts = [list(range(1, 11)), list(range(11, 21))]
    scheduler.add(1, prompts[0], ENDLESS)
    parent = scheduler.add(2, prompts[1], ENDLESS)
    assert step(scheduler, device).counts.tolist() == [1, 1, 2]
    child = scheduler.fork(2, 3, ENDLESS)
    assert (child.num_computed, child.blocks.size) == (1, 1)
    copies = 0
    while (plan := step(scheduler, device)).rows.size == 2:
        assert parent.row not in plan.rows, "decodes have their share, the older prompt has the rest"
        copies += plan.copies.shape[1]
    assert (copies, plan.copies.shape[1], scheduler.table.computed[parent.row]) == (0, 1, 2)
    drive(scheduler, device, max_steps=200)
    expected = tokens_alone(prompts[1], ENDLESS, MAX_MODEL_LEN)[0]
    assert (parent.output_token_ids, child.output_token_ids) == (expected, expected)


def test_a_block_that_the_cache_keeps_is_copied_even_for_its_only_holder() -> None:
    """The fork ends within a prompt block that is matchable, and its parent is gone."""
    scheduler = make_scheduler(num_blocks=3, block_size=4, prefix_cache="hash", max_num_seqs=1)
    device = SimulatedDevice(scheduler)
    scheduler.add(0, [1, 2, 3, 4, 5, 6, 7, 8], SamplingParams(max_tokens=5, ignore_eos=True))
    step(scheduler, device)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    child = scheduler.fork(0, 1, params, num_tokens=7)
    whole = scheduler.fork(0, 2, SamplingParams(max_tokens=5, ignore_eos=True), num_tokens=8)
    scheduler.abort(0)
    scheduler.abort(2)
    assert whole.finish_reason == "abort"
    assert (child.num_computed, child.blocks.size) == (6, 2)
    plan = step(scheduler, device)
    assert plan.copies.shape[1] == 1
    drive(scheduler, device, max_steps=20)
    assert child.output_token_ids == tokens_alone([1, 2, 3, 4, 5, 6, 7], params, MAX_MODEL_LEN)[0]


def test_a_fork_whose_parent_ends_has_the_whole_pool() -> None:
    scheduler = make_scheduler(num_blocks=2, block_size=4, prefix_cache="hash", max_num_seqs=1)
    device = SimulatedDevice(scheduler)
    scheduler.add(0, [1, 2, 3, 4, 5, 6, 7, 8], SamplingParams(max_tokens=1, ignore_eos=True))
    other = scheduler.add(1, [1, 2, 3, 4, 5, 6, 7, 8], SamplingParams(max_tokens=1, ignore_eos=True))
    plan = scheduler.schedule()
    tokens = device.run(device.build(plan))
    child = scheduler.fork(0, 2, SamplingParams(max_tokens=2, ignore_eos=True), num_tokens=7)
    scheduler.abort(1)
    assert other.finish_reason == "abort"
    scheduler.commit(plan, tokens)  # the parent ends, and the child holds their blocks alone
    check_accounts(scheduler)
    assert child.blocks.size == 2
    drive(scheduler, device, max_steps=20)
    assert child.output_token_ids == tokens_alone([1, 2, 3, 4, 5, 6, 7], child.params, MAX_MODEL_LEN)[0]


def test_forks_are_refused_for_a_reason() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    with pytest.raises(ValueError, match="no sequence 7 is unfinished"):
        scheduler.fork(7, 8, ENDLESS)
    scheduler.add(0, [1] * 6, SamplingParams(max_tokens=4))
    with pytest.raises(ValueError, match="already here"):
        scheduler.fork(0, 0, ENDLESS)
    for count in (0, 7):
        with pytest.raises(ValueError, match=f"has 6 tokens, a fork of {count}"):
            scheduler.fork(0, 1, ENDLESS, num_tokens=count)
    with pytest.raises(RefusedError, match="need 9 blocks of 4 tokens, the pool has 4"):
        scheduler.fork(0, 1, ENDLESS)
    device = SimulatedDevice(scheduler)
    step(scheduler, device)
    with pytest.raises(RefusedError, match="reached its end already: 7 tokens"):
        scheduler.fork(0, 1, SamplingParams(max_tokens=1))
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)


def test_groups_are_refused_whole() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    for ids in ([], [1, 1], [1]):
        with pytest.raises(ValueError, match="distinct ids and as many parameters"):
            scheduler.add_group(ids, [1, 2], [ENDLESS] * 2)
    with pytest.raises(RefusedError, match="need 8 blocks"):
        scheduler.add_group([1, 2], [1, 2], [SamplingParams(max_tokens=2), ENDLESS])
    with pytest.raises(ValueError, match="priority must be from"):
        scheduler.add(1, [1, 2], SamplingParams(), priority=2**40)
    assert not scheduler.has_unfinished


def test_the_last_token_is_replaced_only_between_plans() -> None:
    scheduler = make_scheduler(num_blocks=40)
    device = SimulatedDevice(scheduler)
    sequence = scheduler.add(0, [5, 6, 7], ENDLESS)
    with pytest.raises(ValueError, match="no sequence 3"):
        scheduler.replace_last(3, 1)
    with pytest.raises(ValueError, match="no output token"):
        scheduler.replace_last(0, 1)
    step(scheduler, device)
    plan = scheduler.schedule()
    with pytest.raises(RuntimeError, match="under way"):
        scheduler.replace_last(0, 1)
    scheduler.commit(plan, device.run(device.build(plan)))
    child = scheduler.fork(0, 1, ENDLESS)
    before = scheduler.output_of(sequence)
    scheduler.replace_last(0, 11)
    scheduler.replace_last(1, 12)
    assert sequence.row in scheduler.schedule().placed, "whoever keeps the row's tokens elsewhere reads them anew"
    scheduler.abort_all()
    assert sequence.output_token_ids == [before[0], 11]
    assert child.output_token_ids == [before[0], 12]


def test_a_running_one_takes_what_a_waiting_one_holds_before_anybody_gives_way() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=2, max_num_seqs=1)
    device = SimulatedDevice(scheduler)
    parent = scheduler.add(0, [1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
    step(scheduler, device)
    child = scheduler.fork(0, 1, SamplingParams(max_tokens=3, ignore_eos=True))
    assert child.blocks.size == 2
    drive(scheduler, device, max_steps=30)
    assert (scheduler.counters.num_given_up, scheduler.counters.num_preemptions) == (1, 0)
    assert parent.output_token_ids == tokens_alone([1, 2, 3], parent.params, MAX_MODEL_LEN)[0]
    assert child.output_token_ids == tokens_alone([1, 2, 3], child.params, MAX_MODEL_LEN)[0]


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_bug_class_10_nothing_of_a_plan_under_way_becomes_matchable(prefix_cache: str) -> None:
    scheduler = make_scheduler(num_blocks=20, prefix_cache=prefix_cache)
    prompt = list(range(1, 14))
    scheduler.add(0, prompt, ENDLESS)
    plan = scheduler.schedule()
    scheduler.abort(0)  # its blocks come back before the plan that computes them has run
    scheduler.add(1, prompt, ENDLESS)
    second = scheduler.schedule()
    assert second.starts.tolist() == [0]
    scheduler.commit(plan, np.zeros(1, dtype=np.int64))
    scheduler.add(2, prompt, ENDLESS)
    assert scheduler.cache_stats().hit_blocks == 0
    scheduler.commit(second, np.ones(1, dtype=np.int64))
    assert scheduler.schedule().starts.tolist() == [13, 12], "its prompt is matchable at its commit"
    assert scheduler.cache_stats().hit_blocks == 3
