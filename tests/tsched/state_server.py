"""A scheduler with a device whose layers keep a state for each sequence: a kind of cache that the tree does not have.

A state is the hash of all tokens up to a place, of the tenant, and the place. The next token follows from it alone, so
whoever goes on from a state of another place or sequence gets another token at once. Pages are there and are not read.
"""

from __future__ import annotations

import random
import zlib

import numpy as np

from tests.tsched.array_pages import ArrayPages
from tests.tsched.hash_server import EMPTY, HashServer, PagedDevice, next_token
from tests.tsched.random_schedules import Schedule
from tests.tsched.schedulers import build_scheduler
from tsched.scheduling.scheduler import Scheduler, StepPlan
from tsched.scheduling.sequence import Ints


def hash_after(before: int, tokens: Ints) -> int:
    """The hash of all tokens up to the last of `tokens` [n] int64, `before` being that of those before them."""
    return zlib.crc32(np.ascontiguousarray(tokens, dtype=np.int64).tobytes(), before)


def token_after(place: int, state: int, tenant: int, draw: int) -> int:
    return next_token(np.array([[place, state]]), tenant, draw)


class StateDevice(PagedDevice):
    """Slots [num_states, 3]: the place that a state is as of, the hash of the tokens before it, and the tenant."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        assert scheduler.states is not None
        host_pool = scheduler.states.host_pool
        self.states = np.full((scheduler.states.pool.num_blocks, 3), EMPTY, dtype=np.int64)
        host_states = np.full((0 if host_pool is None else host_pool.num_blocks, 3), EMPTY, dtype=np.int64)
        self.state_pages = ArrayPages(self.states, host_states)
        self._written: dict[int, int] = {}  # row -> the slot that the last plan wrote for it

    def _write(self, plan: StepPlan) -> None:
        super()._write(plan)
        step, table = plan.states, self.scheduler.table
        assert step is not None
        assert step.slots.shape == (2, plan.rows.size)
        assert np.unique(step.slots[1]).size == plan.rows.size, "two rows write to one state"
        foreign = step.slots[0][step.slots[0] != step.slots[1]]
        assert not np.isin(foreign, step.slots[1]).any(), "a row writes to a state that another reads"
        before = self.states.copy()
        for entry, (row, start, end) in enumerate(
            zip(plan.rows.tolist(), plan.starts.tolist(), plan.ends.tolist(), strict=True)
        ):
            read, written = step.slots[:, entry].tolist()
            place, value, tenant = (0, 0, self._tenant(row)) if read < 0 else before[read].tolist()
            tokens = table.tokens[row, start : min(end, int(table.known[row]))]
            if tokens.size < end - start:  # the last one is known to the device alone
                tokens = np.append(tokens, self._under_way[row, int(table.epoch[row])])
            self.states[written] = place + tokens.size, hash_after(value, tokens), tenant
            self._written[row] = written

    def token_of(self, row: int, length: int, draw: int) -> int:
        place, value, tenant = self.states[self._written[row]].tolist()
        return token_after(place, value, tenant, draw)


class StateServer(HashServer):
    """A HashServer of such a device, with a few slots more than may be in use at once, or fewer."""

    def make_scheduler(self, schedule: Schedule) -> Scheduler:
        rng, rows = random.Random(schedule.seed), schedule.options["max_num_seqs"]
        drawn = {
            "num_states": rng.randint(2, 4 * rows),
            "num_host_states": rng.choice((0, 1, rows, 4 * rows)),
            "state_interval": rng.choice((1, 1, 2, 5)),
        }
        return build_scheduler(**drawn | schedule.options)

    def make_device(self) -> PagedDevice:
        return StateDevice(self.scheduler)

    def token_alone(self, tokens: list[int], tenant: int, draw: int) -> int:
        return token_after(len(tokens), hash_after(0, np.array(tokens)), tenant, draw)
