"""What a step's arrays cost the host: from the scheduler's plan to the model's batch, over page crossings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.tsched.schedulers import build_scheduler
from tkernels.runtime import HostRuntime
from tmodel.batch import Batch
from tsched.execution.batch_builder import BatchBuilder
from tsched.execution.device_state import DeviceState
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.step_plan import StepPlan

NUM_SEQS, BLOCK_SIZE = 256, 16


@pytest.mark.parametrize("churn", [0, 1], ids=["steady", "churn"])
@pytest.mark.parametrize("context", [1024, 32768])
def test_building_a_decode_step(benchmark: Any, context: int, churn: int) -> None:
    """256 sequences whose pages end at different steps, 16 of them at each. With churn one leaves before each step and
    another takes its row, whose prompt of 64 tokens is a part of the step.
    """
    longest = context + 2048
    scheduler = build_scheduler(
        num_blocks=NUM_SEQS * (longest // BLOCK_SIZE + 1),
        block_size=BLOCK_SIZE,
        max_num_seqs=NUM_SEQS,
        max_num_batched_tokens=NUM_SEQS * context,
        max_model_len=longest,
    )
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for i in range(NUM_SEQS):
        scheduler.add(i, np.ones(context - i % BLOCK_SIZE, dtype=np.int64), params)
    state = DeviceState(scheduler.table, HostRuntime())
    builder = BatchBuilder(scheduler.table, state)
    next_id = NUM_SEQS

    def plan() -> tuple[tuple[StepPlan], dict[str, Any]]:
        nonlocal next_id
        if churn:
            leaving = scheduler.table.sequences[int(scheduler.running[next_id % NUM_SEQS // 2])]
            assert leaving is not None
            scheduler.abort(leaving.id)
            scheduler.add(next_id, np.ones(64, dtype=np.int64), params)
            next_id += 1
        return (scheduler.schedule(),), {}

    def build(step: StepPlan) -> Batch:
        return builder.build(builder.arrange(step))

    def finish(step: StepPlan) -> None:
        tokens = np.ones(step.sampled.size, dtype=np.int64)
        arranged = builder.arrange(step)
        state.keep_tokens(arranged.sampled_rows, arranged.lengths, arranged.sampled_epochs, torch.from_numpy(tokens))
        scheduler.commit(step, tokens)

    first = scheduler.schedule()
    build(first)
    finish(first)
    benchmark.pedantic(build, setup=plan, teardown=finish, rounds=400, warmup_rounds=10)
    benchmark.extra_info.update(num_seqs=NUM_SEQS, context=context, churn=churn)
    assert scheduler.num_running == NUM_SEQS
