"""A device that runs plans without a model: its cache holds token ids, its next token is a hash of all that it reads
back.

One wrong slot, table entry, position or stale page changes every later token of that sequence.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from tsched.sampling_params import SamplingParams
from tsched.scheduler import Scheduler, StepPlan

VOCAB = 29
EOS = 0


def next_token(history: np.ndarray) -> int:
    """The token that follows `history` [n] int64."""
    return zlib.crc32(np.ascontiguousarray(history, dtype=np.int64).tobytes()) % VOCAB


def tokens_alone(prompt: list[int], params: SamplingParams, max_model_len: int) -> tuple[list[int], str]:
    """The output of a request with nobody else around, and why it ended."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(np.array(tokens)))
        output = tokens[len(prompt) :]
        ends = {*params.stop_ids} | (set() if params.ignore_eos else {EOS})
        if output[-1] in ends and len(output) > params.min_tokens:
            return output, "stop"
        if len(output) == params.max_tokens or len(tokens) == max_model_len:
            return output, "length"


@dataclass(frozen=True)
class Launch:
    """A plan with the host's state as it was when the plan was built."""

    plan: StepPlan
    tables: np.ndarray  # [B, N]
    tokens: list[np.ndarray]  # per row, the known ones among the plan's tokens
    epochs: np.ndarray


class SimulatedDevice:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        slots = scheduler.pool.num_blocks * scheduler.pool.block_size
        self.cached_token = np.full(slots, -1)
        self.cached_position = np.full(slots, -1)
        self.last_sampled: dict[tuple[int, int], int] = {}

    def build(self, plan: StepPlan) -> Launch:
        table = self.scheduler.table
        known = [
            table.tokens[row, start : min(start + count, table.known[row])].copy()
            for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True)
        ]
        return Launch(plan, table.blocks[plan.rows].copy(), known, table.epoch[plan.rows].copy())

    def run(self, launch: Launch) -> np.ndarray:
        """[m] int64, the sampled tokens."""
        plan, block_size = launch.plan, self.scheduler.pool.block_size
        slots_of = [
            launch.tables[i][np.arange(end) // block_size] * block_size + np.arange(end) % block_size
            for i, end in enumerate((plan.starts + plan.counts).tolist())
        ]
        for i, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.counts, strict=True)):
            tokens = launch.tokens[i]
            if tokens.size < count:  # at most the last one, which the plan before this one sampled
                assert tokens.size == count - 1
                tokens = np.append(tokens, self.last_sampled[int(row), int(launch.epochs[i])])
            self.cached_token[slots_of[i][start:]] = tokens
            self.cached_position[slots_of[i][start:]] = np.arange(start, start + count)
        sampled = []
        for i in plan.sampled.tolist():
            assert (self.cached_position[slots_of[i]] == np.arange(slots_of[i].size)).all()
            sampled.append(next_token(self.cached_token[slots_of[i]]))
        self.last_sampled = {
            (int(plan.rows[i]), int(launch.epochs[i])): token
            for i, token in zip(plan.sampled.tolist(), sampled, strict=True)
        }
        return np.array(sampled, dtype=np.int64)


def check_accounts(scheduler: Scheduler) -> None:
    """Every block is free or one running sequence's, and every sequence has the blocks that its tokens need."""
    table, pool, rows = scheduler.table, scheduler.pool, scheduler.running
    held = np.concatenate([table.blocks[row, : table.num_blocks[row]] for row in rows] or [np.empty(0, np.int32)])
    assert np.unique(held).size == held.size
    assert pool.num_referenced == held.size
    assert pool.num_free + pool.num_cached + pool.num_referenced == pool.num_blocks
    assert (table.capacity[rows] == table.num_blocks[rows] * pool.block_size).all()
    assert (table.computed[rows] <= table.capacity[rows]).all()
    assert rows.size + table.num_free_rows == table.num_rows


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    assert np.unique(plan.rows).size == plan.rows.size <= scheduler.table.num_rows
    assert (plan.counts >= 1).all()
    assert (plan.counts[: plan.num_decodes] == 1).all()
    assert (plan.counts[plan.num_decodes :] > 1).all()
    assert plan.num_tokens == plan.counts.sum() <= scheduler.max_num_batched_tokens
    assert (scheduler.table.capacity[plan.rows] >= plan.starts + plan.counts).all()
