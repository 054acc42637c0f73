"""A device that runs plans without a model: its cache holds token ids, its next token is a hash of all that it reads
back.

One wrong slot, table entry, position or stale page changes every later token of that sequence.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from tests.tsched.array_pages import ArrayPages
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.scheduler import Scheduler, StepPlan

VOCAB = 29
EOS = 0


def next_token(history: np.ndarray) -> int:
    """The token that follows `history` [n] int64."""
    return zlib.crc32(np.ascontiguousarray(history, dtype=np.int64).tobytes()) % VOCAB


def tokens_alone(prompt: list[int], params: SamplingParams, max_model_len: int) -> tuple[list[int], str]:
    """The output of a request with nobody else around, and why it ended."""
    return tokens_after(prompt, len(prompt), params, max_model_len)


def tokens_after(
    given: list[int], prompt_len: int, params: SamplingParams, max_model_len: int
) -> tuple[list[int], str]:
    """The whole output of a request of `prompt_len` prompt tokens that goes on from the `given` tokens."""
    tokens = list(given)
    while True:
        tokens.append(next_token(np.array(tokens)))
        output = tokens[prompt_len:]
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
        host_pool = scheduler.host_pool
        host_slots = host_pool.num_blocks * host_pool.block_size if host_pool is not None else 0
        self.host_token = np.full(host_slots, -1)
        self.host_position = np.full(host_slots, -1)
        self.last_sampled: dict[tuple[int, int], int] = {}
        self.tables = scheduler.table.blocks.copy()  # kept up by what the plans say has changed

    def build(self, plan: StepPlan) -> Launch:
        table = self.scheduler.table
        for row in (*plan.placed.tolist(), *plan.rewritten.tolist()):
            self.tables[row] = table.blocks[row]
        last = table.num_blocks[plan.grown] - 1
        self.tables[plan.grown, last] = table.blocks[plan.grown, last]
        for row in plan.rows.tolist():
            count = int(table.num_blocks[row])
            assert (self.tables[row, :count] == table.blocks[row, :count]).all(), "a change that the plan does not name"
        self._check_writes(plan)
        known = [
            table.tokens[row, start : min(start + count, table.known[row])].copy()
            for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True)
        ]
        return Launch(plan, table.blocks[plan.rows].copy(), known, table.epoch[plan.rows].copy())

    def run(self, launch: Launch) -> np.ndarray:
        """[m] int64, the sampled tokens."""
        plan, block_size = launch.plan, self.scheduler.pool.block_size
        self._copy_pages(plan)
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

    def _check_writes(self, plan: StepPlan) -> None:
        """Nobody writes where another one reads, or past what can still be asked of them."""
        table, pool = self.scheduler.table, self.scheduler.pool
        assert (plan.ends < table.max_length[plan.rows]).all(), "a token is computed that nobody will ask for"
        for row, start, end in zip(plan.rows.tolist(), plan.starts.tolist(), plan.ends.tolist(), strict=True):
            written = table.blocks[row, start // pool.block_size : -(-end // pool.block_size)]
            assert (pool.refs(written) == 1).all(), "a shared block is written to"
            assert not pool.is_kept(written).any(), "a cached block is written to"

    def _copy_pages(self, plan: StepPlan) -> None:
        for device, host in ((self.cached_token, self.host_token), (self.cached_position, self.host_position)):
            plan.move_pages(ArrayPages(self._by_page(device), self._by_page(host)), None)

    def _by_page(self, slots: np.ndarray) -> np.ndarray:
        return slots.reshape(-1, self.scheduler.pool.block_size)


def check_accounts(scheduler: Scheduler) -> None:
    """Every block has as many references as there are sequences, running or waiting, that hold it; and every sequence
    has the blocks that its tokens need.
    """
    table, pool, rows = scheduler.table, scheduler.pool, scheduler.running
    held = [table.blocks[row, : table.num_blocks[row]] for row in rows]
    for blocks in held:
        assert np.unique(blocks).size == blocks.size
    waiting = [sequence for sequence in scheduler._unfinished.values() if sequence.row < 0]
    refs = np.bincount(np.concatenate([*held, *(s.blocks for s in waiting), []]).astype(int), minlength=pool.num_blocks)
    everything = np.arange(pool.num_blocks, dtype=np.int32)
    assert (pool.refs(everything) == refs).all()
    kept = pool.is_kept(everything)
    assert (pool.num_referenced, pool.num_cached) == ((refs > 0).sum(), (kept & (refs == 0)).sum())
    assert pool.num_free + pool.num_cached + pool.num_referenced == pool.num_blocks
    if scheduler.host_pool is not None:
        restored = [pairs[0] for under_way in scheduler._in_flight for pairs in under_way.copies.swap_ins]
        swapped = np.concatenate([*(s.host_blocks for s in waiting), *restored, []]).astype(int)
        num_host = scheduler.host_pool.num_blocks
        assert (scheduler.host_pool.refs(np.arange(num_host)) == np.bincount(swapped, minlength=num_host)).all()
        assert scheduler.host_pool.num_cached == 0
    assert not any(s.blocks.size and s.host_blocks.size for s in waiting)
    assert (table.capacity[rows] == table.num_blocks[rows] * pool.block_size).all()
    assert (table.computed[rows] <= table.capacity[rows]).all()
    assert rows.size + table.num_free_rows == table.num_rows
    assert (np.diff(table.key[rows]) >= 0).all()


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    assert np.unique(plan.rows).size == plan.rows.size <= scheduler.table.num_rows
    assert (plan.counts >= 1).all()
    assert (plan.counts[: plan.num_decodes] == 1).all()
    assert (plan.counts[plan.num_decodes :] > 1).all()
    assert plan.num_tokens == plan.counts.sum() <= scheduler.max_num_batched_tokens
    assert (scheduler.table.capacity[plan.rows] >= plan.starts + plan.counts).all()
