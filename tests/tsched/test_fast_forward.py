"""Quiet steps skipped at once leave the very state that so many calls of schedule() and commit() leave."""

from dataclasses import asdict, fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tsched.schedulers import build_scheduler
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.policies import PREFIX_CACHES
from tsched.scheduling.scheduler import Scheduler
from tsched.scheduling.step_plan import StepPlan

COLUMNS = (
    "epoch", "prompt_len", "max_length", "known", "length", "computed", "prefilled", "num_blocks", "capacity",
)  # fmt: skip


def tokens_of(plan: StepPlan) -> np.ndarray:
    """Some rows share theirs, so that equal contents meet in the caches."""
    return plan.sampled_rows % 2 + 7


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.commit(plan, tokens_of(plan))
    return plan


def check_equal_state(one: Scheduler, other: Scheduler) -> None:
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(one.table, name), getattr(other.table, name), err_msg=name)
    for row in one.running.tolist():
        known, blocks = one.table.known[row], one.table.num_blocks[row]
        np.testing.assert_array_equal(one.table.tokens[row, :known], other.table.tokens[row, :known])
        np.testing.assert_array_equal(one.table.blocks[row, :blocks], other.table.blocks[row, :blocks])
    np.testing.assert_array_equal(one.running, other.running)
    pools = (one.pool, other.pool)
    every = np.arange(one.pool.num_blocks, dtype=np.int32)
    assert len({(pool.num_free, pool.num_cached, pool.num_referenced) for pool in pools}) == 1
    np.testing.assert_array_equal(one.pool.refs(every), other.pool.refs(every))
    np.testing.assert_array_equal(one.pool.is_kept(every), other.pool.is_kept(every))
    assert asdict(one.counters) == asdict(other.counters)
    assert asdict(one.cache_stats()) == asdict(other.cache_stats())


def check_equal_plans(one: StepPlan, other: StepPlan) -> None:
    for field in fields(StepPlan):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), err_msg=field.name)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), min_size=1, max_size=7),
    late=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40), st.integers(1, 60)), max_size=4),
    block_size=st.sampled_from([1, 2, 4, 64]),
    spare=st.integers(0, 12),
    policy=st.sampled_from(sorted(PREFIX_CACHES)),
    most=st.integers(1, 50),
)
def test_skipped_steps_leave_the_state_of_real_ones(
    lengths: list[tuple[int, int]],
    late: list[tuple[int, int, int]],
    block_size: int,
    spare: int,
    policy: str,
    most: int,
) -> None:
    longest = max(-(-(prompt + output) // block_size) for prompt, output, *_ in [*lengths, *late])
    stepping, skipping = (
        build_scheduler(
            num_blocks=longest + spare,
            block_size=block_size,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=64,
            eos_token_ids=(7,),
            prefix_cache=policy,
        )
        for _ in range(2)
    )

    def add(id: int, prompt: int, output: int) -> None:
        for scheduler in (stepping, skipping):
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            scheduler.add(id, (np.arange(prompt) % 3).tolist(), params)

    for id, (prompt, output) in enumerate(lengths):
        add(id, prompt, output)
    coming = sorted(((moment, prompt, output) for prompt, output, moment in late), reverse=True)
    steps = 0
    while stepping.has_unfinished or coming:
        while (coming and coming[-1][0] <= steps) or (coming and not stepping.has_unfinished):
            _, prompt, output = coming.pop()
            add(100 + len(coming), prompt, output)
        until = coming[-1][0] - steps if coming else most
        count = skipping.quiet_steps(min(most, until))
        if count:
            plans = [step(stepping) for _ in range(count)]
            taken = skipping.skip_steps(count, tokens_of(plans[-1]))
            assert taken.tolist() == [plan.grown.size for plan in plans]
            steps += count
        else:
            check_equal_plans(step(stepping), step(skipping))
            steps += 1
        check_equal_state(stepping, skipping)


def quiet(**params: object) -> Scheduler:
    scheduler = build_scheduler(
        num_blocks=100,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=200,
        eos_token_ids=(99,),
    )
    given: dict[str, object] = {"max_tokens": 50, "ignore_eos": True, **params}
    scheduler.add(0, [1, 2, 3], SamplingParams(**given))  # type: ignore[arg-type]
    step(scheduler)
    step(scheduler)
    return scheduler


def test_quiet_steps_end_before_a_sequence_does() -> None:
    scheduler = quiet()
    assert scheduler.quiet_steps(10) == 10
    assert scheduler.quiet_steps(1000) == 47  # two tokens are there, and the step that brings the fiftieth ends it
    assert scheduler.skip_steps(47, np.array([9])).sum() == 12
    assert scheduler.quiet_steps(1000) == 0
    step(scheduler)
    assert not scheduler.has_unfinished


def test_nothing_is_quiet_that_a_token_could_stop_or_that_is_under_way() -> None:
    assert quiet(ignore_eos=False).quiet_steps(10) == 0
    assert quiet(stop_token_ids=[9]).quiet_steps(10) == 0
    scheduler = quiet()
    scheduler.schedule()
    assert scheduler.quiet_steps(10) == 0
    scheduler = quiet()
    scheduler.add(1, [1], SamplingParams())
    assert scheduler.quiet_steps(10) == 0
    scheduler.abort_all()
    step(scheduler)
    assert scheduler.quiet_steps(10) == 0


def test_blocks_bound_the_quiet_steps() -> None:
    scheduler = build_scheduler(
        num_blocks=5, block_size=4, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=200
    )  # fmt: skip
    for i in range(2):
        scheduler.add(i, [1, 2, 3], SamplingParams(max_tokens=10))
    step(scheduler)
    step(scheduler)
    assert scheduler.pool.num_free == 3
    assert scheduler.quiet_steps(100) == 4  # both need a block now, and one is left when both need another


def test_more_steps_than_are_quiet_are_refused_and_change_nothing() -> None:
    scheduler = quiet()
    before = asdict(scheduler.counters)
    with pytest.raises(RuntimeError, match="the next 48 steps do not all repeat the last one"):
        scheduler.skip_steps(48, np.array([9]))
    with pytest.raises(ValueError, match="1 rows are running"):
        scheduler.skip_steps(4, np.array([9, 9]))
    assert asdict(scheduler.counters) == before
