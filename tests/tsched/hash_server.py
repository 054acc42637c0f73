"""A scheduler with a device whose pages hold plain facts: which token of whom, at which place.

The next token is a hash of all that a sequence reads back through its block table, of its tenant, and, where it is
sampled, of the seed and the place in the output: one wrong slot, stale page, copy that came late or foreign block
changes every token from there on, and text that collapses into repetition hides nothing.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.tsched.array_pages import ArrayPages
from tests.tsched.random_schedules import EOS, MAX_MODEL_LEN, VOCAB_SIZE, Request, Schedule
from tests.tsched.schedulers import build_scheduler
from tests.tsched.simulated_device import check_plan
from tsched.execution.random_numbers import SeedTable, find_seed
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.scheduler import Scheduler, StepPlan
from tsched.scheduling.sequence import Ints, Sequence

Floats = NDArray[np.float64]

EMPTY = -1


def next_token(history: Ints, tenant: int, draw: int) -> int:
    """What follows `history` [n, 2], each a token and its place; every 23rd is the end."""
    facts = zlib.crc32(np.ascontiguousarray(history, dtype=np.int64).tobytes())
    value = zlib.crc32(np.array([facts, tenant, draw], dtype=np.int64).tobytes())
    return EOS if value % 23 == 0 else 1 + value % (VOCAB_SIZE - 1)


def draw_of(seed: int, index: int) -> int:
    """A random number of an output, by its request's seed."""
    # The 0 makes other numbers: with these a hundred schedules meet every event that their test asks for.
    return zlib.crc32(np.array([seed, index, 0], dtype=np.int64).tobytes())


def tenant_of(salt: bytes) -> int:
    return zlib.crc32(salt)


@dataclass(frozen=True)
class Launch:
    """A plan with all that is the host's as it was when the plan was made, and what it sampled."""

    plan: StepPlan
    tokens: Ints


class PagedDevice:
    """Pages [num_blocks, block_size, 3]: token, place and tenant. It carries plans out in the order it gets them.

    Its block tables are its own, kept up by what a plan says has changed.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        pool, table, host_pool = scheduler.pool, scheduler.table, scheduler.host_pool
        num_host_blocks = 0 if host_pool is None else host_pool.num_blocks
        self.scheduler = scheduler
        self.pages = np.full((pool.num_blocks, pool.block_size, 3), EMPTY, dtype=np.int64)
        self.host_pages = np.full((num_host_blocks, pool.block_size, 3), EMPTY, dtype=np.int64)
        self.state_pages: ArrayPages | None = None
        self.tables = np.full_like(table.blocks, EMPTY)
        self._num_known = np.zeros(table.num_rows, dtype=np.int64)  # entries of each table that plans have named
        self.tenants: dict[int, int] = {}  # of the sequences, by number
        self._seeds = SeedTable(table, 0)
        self._under_way: dict[tuple[int, int], int] = {}  # (row, epoch) -> the token that the last plan sampled

    def carry_out(self, plan: StepPlan) -> Ints:
        """[m] int64, the tokens for plan.sampled."""
        self._follow(plan)
        plan.move_pages(ArrayPages(self.pages, self.host_pages), self.state_pages)
        self._write(plan)
        return self._sample(plan)

    def _follow(self, plan: StepPlan) -> None:
        table = self.scheduler.table
        for row in (*plan.placed.tolist(), *plan.rewritten.tolist()):
            count = int(table.num_blocks[row])
            self.tables[row] = EMPTY
            self.tables[row, :count] = table.blocks[row, :count]
            self._num_known[row] = count
        for row in plan.grown.tolist():
            known, count = int(self._num_known[row]), int(table.num_blocks[row])
            self.tables[row, known:count] = table.blocks[row, known:count]
            self._num_known[row] = count

    def _slots(self, row: int, places: Ints) -> tuple[Ints, Ints]:
        block_size = self.scheduler.pool.block_size
        blocks = self.tables[row][places // block_size].astype(np.int64)
        assert (blocks >= 0).all(), "a token has no block"
        return blocks, places % block_size

    def _write(self, plan: StepPlan) -> None:
        table = self.scheduler.table
        written: list[Ints] = []
        for row, start, end in zip(plan.rows.tolist(), plan.starts.tolist(), plan.ends.tolist(), strict=True):
            tokens = table.tokens[row, start : min(end, int(table.known[row]))]
            if tokens.size < end - start:  # the last one is known to the device alone
                assert tokens.size == end - start - 1, "a plan computes tokens that nobody knows"
                tokens = np.append(tokens, self._under_way[row, int(table.epoch[row])])
            places = np.arange(start, end)
            blocks, offsets = self._slots(row, places)
            self.pages[blocks, offsets, 0] = tokens
            self.pages[blocks, offsets, 1] = places
            self.pages[blocks, offsets, 2] = self._tenant(row)
            written.append(blocks * self.pages.shape[1] + offsets)
        slots = np.concatenate(written) if written else np.empty(0, dtype=np.int64)
        assert np.unique(slots).size == slots.size, "two rows write to one slot"

    def _sample(self, plan: StepPlan) -> Ints:
        table, rows = self.scheduler.table, plan.sampled_rows
        seeds, indices = self._seeds.find_seeds(rows), plan.lengths - table.prompt_len[rows]
        tokens = np.empty(rows.size, dtype=np.int64)
        for i, (row, length) in enumerate(zip(rows.tolist(), plan.lengths.tolist(), strict=True)):
            draw = draw_of(int(seeds[i]), int(indices[i])) if table.temperature[row] > 0 else 0
            tokens[i] = self.token_of(row, length, draw)
        self._under_way = {
            (row, int(table.epoch[row])): token for row, token in zip(rows.tolist(), tokens.tolist(), strict=True)
        }
        return tokens

    def token_of(self, row: int, length: int, draw: int) -> int:
        """What follows the first `length` tokens that the row reads back."""
        facts = self.pages[self._slots(row, np.arange(length))]  # [length, 3]
        tenants = np.unique(facts[:, 2])
        return next_token(facts[:, :2], int(tenants[0]) if tenants.size == 1 else EMPTY, draw)

    def _tenant(self, row: int) -> int:
        sequence = self.scheduler.table.sequences[row]
        assert sequence is not None, "a plan names an empty row"
        return self.tenants[sequence.id]


class HashServer:
    """The scheduler and such a device; `commit` comes the schedule's lag late."""

    def __init__(self, schedule: Schedule) -> None:
        self.scheduler = self.make_scheduler(schedule)
        self.device = self.make_device()
        self._lag = schedule.lag
        self._launches: deque[Launch] = deque()

    def make_scheduler(self, schedule: Schedule) -> Scheduler:
        return build_scheduler(**schedule.options)

    def make_device(self) -> PagedDevice:
        return PagedDevice(self.scheduler)

    def token_alone(self, tokens: list[int], tenant: int, draw: int) -> int:
        """What follows `tokens` in a sequence that nobody disturbs."""
        return next_token(np.stack((np.array(tokens), np.arange(len(tokens))), axis=1), tenant, draw)

    def add(self, numbers: list[int], request: Request) -> list[Sequence]:
        self.device.tenants |= dict.fromkeys(numbers, tenant_of(request.salt))
        params = [member.params for member in request.members]
        return self.scheduler.add_group(
            numbers, request.prompt, params, priority=request.priority, cache_salt=request.salt
        )

    def fork(self, parent: int, number: int, params: SamplingParams, num_tokens: int) -> Sequence:
        self.device.tenants[number] = self.device.tenants[parent]
        return self.scheduler.fork(parent, number, params, num_tokens=num_tokens)

    def abort(self, number: int) -> None:
        assert self.scheduler.abort(number) is not None

    def step(self) -> None:
        plan = self.scheduler.schedule()
        check_plan(self.scheduler, plan)
        self._launches.append(Launch(plan, self.device.carry_out(plan)))
        while len(self._launches) > (0 if plan.is_empty else self._lag):
            launch = self._launches.popleft()
            self.scheduler.commit(launch.plan, launch.tokens)

    @property
    def is_idle(self) -> bool:
        return not self._launches

    def output_of(self, sequence: Sequence) -> list[int]:
        return self.scheduler.output_of(sequence)

    def alone(self, request: Request, number: int) -> tuple[list[int], str]:
        params, length = request.params, len(request.prompt)
        tokens = [*request.prompt, *request.given]
        ends = {*params.stop_ids} | (set() if params.ignore_eos else {EOS})
        seed = find_seed(0, Sequence(number, request.prompt, params, MAX_MODEL_LEN))
        while True:
            draw = draw_of(seed, len(tokens) - length) if params.temperature > 0 else 0
            tokens.append(self.token_alone(tokens, tenant_of(request.salt), draw))
            num_output = len(tokens) - length
            if tokens[-1] in ends and num_output > params.min_tokens:
                return tokens[length:], "stop"
            if num_output == params.max_tokens or len(tokens) == MAX_MODEL_LEN:
                return tokens[length:], "length"
