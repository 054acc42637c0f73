"""A step's inputs: kept between steps by difference, made by the host or by the device, padded for graphs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

import tkernels
from tests.tsched.schedulers import build_scheduler
from tests.tsched.simulated_device import VOCAB
from tkernels.runtime import HostRuntime, Runtime
from tmodel.batch import Batch
from tsched.execution.batch_builder import ArrangedPlan, BatchBuilder
from tsched.execution.cuda_graphs import batch_buckets, context_bounds
from tsched.execution.device_state import DeviceState
from tsched.execution.step_kernels import StepKernels
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.scheduler import Scheduler
from tsched.scheduling.step_plan import StepPlan

BLOCK_SIZE = 4


class Launching(HostRuntime):
    """A device whose inputs are made by launches, in the host's memory."""

    is_host = False


def make_scheduler(**changes: object) -> Scheduler:
    arguments: dict = {
        "num_blocks": 40,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 16,
        "max_model_len": 60,
    }
    return build_scheduler(**(arguments | changes))


def add(scheduler: Scheduler, sequence_id: int, prompt_len: int, max_tokens: int = 30) -> None:
    prompt = [(7 * sequence_id + i) % VOCAB for i in range(prompt_len)]
    scheduler.add(sequence_id, prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))


def tokens_for(plan: StepPlan) -> np.ndarray:
    """[m] int64, other tokens for each row and length."""
    return (5 * plan.sampled_rows + 3 * plan.lengths) % VOCAB


def keep(state: DeviceState, step: ArrangedPlan, plan: StepPlan) -> np.ndarray:
    """What an engine does between a step's forward and its commit; returns the tokens in the plan's order."""
    tokens = tokens_for(plan)
    ordered = tokens if step.order is None else tokens[step.order]
    state.keep_tokens(step.sampled_rows, step.lengths, step.sampled_epochs, torch.from_numpy(ordered.copy()))
    return tokens


def expected(scheduler: Scheduler, step: ArrangedPlan) -> dict[str, list[int]]:
    """The inputs of `step`, worked out token by token from the table, which knows them all."""
    table = scheduler.table
    token_ids, positions, slots = [], [], []
    for row, start, end in zip(step.rows.tolist(), step.starts.tolist(), step.ends.tolist(), strict=True):
        for place in range(start, end):
            token_ids.append(int(table.tokens[row, place]))
            positions.append(place)
            slots.append(int(table.blocks[row, place // BLOCK_SIZE]) * BLOCK_SIZE + place % BLOCK_SIZE)
    return {"token_ids": token_ids, "positions": positions, "slots": slots, "context_lens": step.ends.tolist()}


def check(scheduler: Scheduler, step: ArrangedPlan, batch: Batch) -> None:
    for name, values in expected(scheduler, step).items():
        assert getattr(batch, name).tolist() == values, name
    assert batch.num_decodes == step.num_decodes
    assert batch.max_context_len == step.ends.max()
    counts = step.counts[step.num_decodes :]
    assert batch.cu_seqlens_q.tolist() == [0, *np.cumsum(counts).tolist()]
    ends = np.cumsum(step.counts)
    assert batch.logit_indices.tolist() == (ends[step.sampled] - 1).tolist()
    for place, (row, end) in enumerate(zip(step.rows.tolist(), step.ends.tolist(), strict=True)):
        pages = -(-end // BLOCK_SIZE)
        assert batch.block_tables[place, :pages].tolist() == scheduler.table.blocks[row, :pages].tolist()
    dtypes = {name: getattr(batch, name).dtype for name in ("token_ids", "positions", "slots", "logit_indices")}
    assert set(dtypes.values()) == {torch.int64}
    assert {batch.block_tables.dtype, batch.context_lens.dtype, batch.cu_seqlens_q.dtype} == {torch.int32}


def check_states(plan: StepPlan, step: ArrangedPlan, batch: Batch) -> None:
    """Each row reads and writes the slots that the plan says, wherever it stands in the batch."""
    if plan.states is None:
        assert batch.state_slots is None
        return
    assert batch.state_slots is not None
    assert batch.state_slots.dtype == torch.int64
    by_row = dict(zip(plan.rows.tolist(), plan.states.slots.T.tolist(), strict=True))
    assert batch.state_slots.T.tolist() == [by_row[row] for row in step.rows.tolist()]


@pytest.mark.parametrize("runtime", [HostRuntime(), Launching()], ids=["host", "device"])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("num_blocks", "num_states"), [(16, 0), (60, 0), (16, 9)])
def test_inputs_are_the_tables_through_arrivals_aborts_and_preemptions(
    runtime: Runtime, lag: int, num_blocks: int, num_states: int
) -> None:
    rng = np.random.default_rng(num_blocks)
    scheduler = make_scheduler(num_blocks=num_blocks, num_states=num_states)
    state = DeviceState(scheduler.table, runtime)
    builder = BatchBuilder(scheduler.table, state)
    under_way: list[tuple[StepPlan, np.ndarray]] = []
    next_id = num_orders = 0
    for _ in range(250):
        if rng.random() < 0.3:
            add(scheduler, next_id, int(rng.integers(1, 20)), int(rng.integers(1, 30)))
            next_id += 1
        if rng.random() < 0.05:
            scheduler.abort(int(rng.integers(0, next_id + 1)))
        plan = scheduler.schedule()
        tokens = tokens_for(plan)
        step = builder.arrange(plan)
        assert (step is None) == plan.is_empty
        if step is not None:
            num_orders += step.order is not None
            batch = builder.build(step)
            check_states(plan, step, batch)
            # The oracle reads all tokens from the table, those too that the host does not know yet.
            for earlier, values in under_way:
                live = scheduler.table.epoch[earlier.sampled_rows] == earlier.sampled_epochs
                scheduler.table.tokens[earlier.sampled_rows[live], earlier.lengths[live]] = values[live]
            check(scheduler, step, batch)
            if step.all_decode:
                check_padded(state, step, batch)
            keep(state, step, plan)
        under_way.append((plan, tokens))
        while len(under_way) > lag:
            scheduler.commit(*under_way.pop(0))
    assert scheduler.counters.num_finished > 20
    assert num_orders > 0
    assert (scheduler.counters.num_preemptions > 0) == (num_blocks == 16)


def test_the_kernel_makes_the_same_inputs() -> None:
    scheduler = make_scheduler(num_blocks=16)
    state = DeviceState(
        scheduler.table, Launching(), StepKernels(step_inputs=tkernels.OPS["step_inputs"].variants["sequence_parts"])
    )
    builder = BatchBuilder(scheduler.table, state)
    for step_number in range(12):
        add(scheduler, step_number, 1 + 5 * step_number % 13, 4)
        plan = scheduler.schedule()
        step = builder.arrange(plan)
        assert step is not None
        batch = builder.build(step)
        scheduler.table.tokens[plan.sampled_rows, plan.lengths] = tokens_for(plan)
        check(scheduler, step, batch)
        if step.all_decode:
            check_padded(state, step, batch)
        scheduler.commit(plan, keep(state, step, plan))


def check_padded(state: DeviceState, step: ArrangedPlan, batch: Batch) -> None:
    """The same decode step padded by three: the same inputs, and padding that touches nothing."""
    num = step.rows.size
    if num + 3 > state.last_tokens.shape[0]:
        return
    tokens = torch.from_numpy(-1 - np.concatenate((step.rows, [0, 0, 0])))
    starts = torch.from_numpy(np.concatenate((step.starts, [-1, -1, -1])))
    padded = state.make_decode_batch(tokens, starts, 60)
    for name in ("token_ids", "positions", "slots", "context_lens", "logit_indices"):
        assert getattr(padded, name)[:num].tolist() == getattr(batch, name).tolist(), name
    assert padded.slots[num:].tolist() == [-1, -1, -1]
    assert padded.context_lens[num:].tolist() == [0, 0, 0]
    assert (padded.num_decodes, padded.max_context_len) == (num + 3, 60)


def settled(num_seqs: int) -> tuple[Scheduler, DeviceState, BatchBuilder]:
    """All of `num_seqs` sequences decode, and the device has their tables."""
    scheduler = make_scheduler()
    for i in range(num_seqs):
        add(scheduler, i, 1)
    state = DeviceState(scheduler.table, HostRuntime())
    builder = BatchBuilder(scheduler.table, state)
    advance(scheduler, state, builder)
    return scheduler, state, builder


def advance(scheduler: Scheduler, state: DeviceState, builder: BatchBuilder) -> ArrangedPlan:
    plan = scheduler.schedule()
    step = builder.arrange(plan)
    assert step is not None
    scheduler.commit(plan, keep(state, step, plan))
    return step


def test_a_step_sends_what_changed_alone() -> None:
    scheduler, state, builder = settled(3)
    state.block_tables.fill_(-9)  # whatever is sent shows
    for length in range(2, 12):
        step = advance(scheduler, state, builder)
        column = (length - 1) // BLOCK_SIZE
        sent = torch.nonzero(state.block_tables != -9).tolist()
        if length % BLOCK_SIZE == 1:
            assert sent == [[place, column] for place in range(3)]
            assert state.block_tables[:3, column].tolist() == scheduler.table.blocks[step.rows, column].tolist()
        else:
            assert sent == []
        state.block_tables.fill_(-9)


def test_a_departure_moves_one_row_and_an_arrival_takes_the_next_place() -> None:
    scheduler, state, builder = settled(5)
    before = advance(scheduler, state, builder).rows.tolist()
    scheduler.abort(1)
    state.block_tables.fill_(-9)
    after = advance(scheduler, state, builder).rows.tolist()
    assert after == [before[0], before[4], *before[2:4]]
    assert torch.unique(torch.nonzero(state.block_tables != -9)[:, 0]).tolist() == [1]
    add(scheduler, 9, 1)
    state.block_tables.fill_(-9)
    assert advance(scheduler, state, builder).rows.tolist() == [*after, before[1]]
    assert torch.unique(torch.nonzero(state.block_tables != -9)[:, 0]).tolist() == [4]


def test_rewritten_tables_are_sent_anew() -> None:
    scheduler, state, builder = settled(3)
    for _ in range(6):
        advance(scheduler, state, builder)
    plan = scheduler.schedule()
    scheduler.table.blocks[plan.rows[1], 0] = 37
    step = builder.arrange(replace(plan, rewritten=plan.rows[1:2]))
    assert step is not None
    assert state.block_tables[1, 0] == 37
    scheduler.commit(plan, keep(state, step, plan))


def test_a_replaced_token_is_the_one_that_is_read() -> None:
    scheduler, state, builder = settled(3)
    advance(scheduler, state, builder)
    scheduler.replace_last(1, 23)
    step = builder.arrange(scheduler.schedule())
    assert step is not None
    batch = builder.build(step)
    replaced = [scheduler.table.sequences[row].id == 1 for row in step.rows.tolist()]  # type: ignore[union-attr]
    assert (batch.token_ids == 23).tolist() == replaced


def test_a_plan_may_not_read_a_token_that_nobody_knows() -> None:
    scheduler, _, builder = settled(1)
    plan = scheduler.schedule()
    builder.arrange(plan)
    after = scheduler.schedule()  # reads what `plan` samples, and no step has kept it
    with pytest.raises(RuntimeError, match="neither on the host nor on the device"):
        builder.arrange(after)


def test_buckets_and_bounds_reach_their_limits() -> None:
    for rows in (1, 2, 3, 7, 32, 200, 256, 300, 1000):
        buckets = batch_buckets(rows)
        assert buckets == sorted(set(buckets))
        assert buckets[-1] == rows
        assert all(high <= max(2 * low, low + 8, 1.25 * low) for low, high in pairwise(buckets))
    assert context_bounds(1000) == [1000]
    assert context_bounds(1024) == [1024]
    assert context_bounds(4096) == [1024, 4096]
    assert context_bounds(40960) == [1024, 2560, 10240, 40960]
