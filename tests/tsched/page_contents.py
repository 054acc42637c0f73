"""What the pages and states of a device and of its host hold, with plans under way: a model to check a scheduler with.

A slot holds a number that stands for the keys and values of a token: a hash of the tenant's salt and of all tokens up
to this one. It is worked out from what the slot before it holds, as the table says, so one page that is stale,
misplaced or another tenant's changes everything after it.

The state of a sequence is the number of its last token, worked out from the state that the plan says is read, and where
there are states the next token follows from them alone: a state of another place or sequence gives another token.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.tsched.array_pages import ArrayPages
from tsched.scheduling.block_pool import BlockIds
from tsched.scheduling.scheduler import Scheduler, StepPlan

Values = NDArray[np.uint64]

VOCAB = 6
MAX_TOKENS = 64
POISON = 2**64 - 1  # what a step that was lost may have left anywhere that it was to write

_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)
_POWERS = np.array([pow(_BASE, i, 2**64) for i in range(1, MAX_TOKENS + 1)], dtype=np.uint64)
_INVERSES = np.array([pow(_INVERSE, i, 2**64) for i in range(1, MAX_TOKENS + 1)], dtype=np.uint64)
_TOKEN_VALUES = np.random.default_rng(0).integers(1, 2**64, VOCAB, dtype=np.uint64)


def first_value(salt: bytes) -> int:
    """What stands before the first token."""
    return zlib.crc32(salt) + 1


def values_after(before: int, tokens: NDArray[np.int64]) -> Values:
    """[n] uint64, what the slots of `tokens` [n] hold where `before` is in the slot before them: a polynomial in
    _BASE.
    """
    count = tokens.size
    terms = np.empty(count + 1, dtype=np.uint64)
    terms[0] = before
    np.multiply(_TOKEN_VALUES[tokens], _INVERSES[:count], out=terms[1:])
    return np.cumsum(terms)[1:] * _POWERS[:count]


def token_after(value: int) -> int:
    """The token that a model gives where its last slot holds `value`."""
    return (value * _INVERSE % 2**64 >> 40) % VOCAB


@dataclass(frozen=True)
class Effects:
    """A plan as its step carries it out: copies in order, then writes, of pages and of states."""

    plan: StepPlan
    slots: NDArray[np.int64]
    values: Values
    sampled: NDArray[np.int64]
    state_slots: NDArray[np.int64]
    state_values: Values


class Memory:
    """[blocks, block_size] of the device and of the host, and [states] of both."""

    def __init__(self, scheduler: Scheduler) -> None:
        pool, host, states = scheduler.pool, scheduler.host_pool, scheduler.states
        self.device = np.zeros((pool.num_blocks, pool.block_size), dtype=np.uint64)
        self.host = np.zeros((0 if host is None else host.num_blocks, pool.block_size), dtype=np.uint64)
        host_states = None if states is None else states.host_pool
        self.states = np.zeros(0 if states is None else states.pool.num_blocks, dtype=np.uint64)
        self.host_states = np.zeros(0 if host_states is None else host_states.num_blocks, dtype=np.uint64)

    def apply(self, effects: Effects) -> None:
        self.move(effects.plan)
        self.device.reshape(-1)[effects.slots] = effects.values
        self.states[effects.state_slots] = effects.state_values

    def move(self, plan: StepPlan) -> None:
        plan.move_pages(ArrayPages(self.device, self.host), ArrayPages(self.states, self.host_states))

    def poison(self, effects: Effects) -> None:
        effects.plan.move_pages(_Lost(self.device, self.host), _Lost(self.states, self.host_states))
        self.device.reshape(-1)[effects.slots] = POISON
        self.states[effects.state_slots] = POISON


class _Lost(ArrayPages):
    """Pages whose copies were lost: what they were to write may be anything."""

    def swap_out(self, pages: BlockIds) -> None:
        self.host[pages[1]] = POISON

    def swap_in(self, pages: BlockIds) -> None:
        self.device[pages[1]] = POISON

    copy = swap_in


class PageContents:
    """Two views of the pages: `issued`, once all plans under way have run, and `committed`, now that only those have
    run whose outcome the scheduler knows. The truth is somewhere between.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.issued, self.committed = Memory(scheduler), Memory(scheduler)
        self.under_way: deque[Effects] = deque()
        self._last_sampled: dict[tuple[int, int], int] = {}

    def issue(self, plan: StepPlan) -> Effects:
        """Run `plan`, which was just made."""
        scheduler, table = self._scheduler, self._scheduler.table
        block_size, issued = scheduler.pool.block_size, self.issued
        state_slots = np.empty((2, 0), dtype=np.int64)
        if plan.states is not None:
            state_slots = plan.states.slots.astype(np.int64)
            assert state_slots.shape == (2, plan.rows.size)
            assert np.unique(state_slots[1]).size == plan.rows.size, "two rows write to one state"
            others = state_slots[0] != state_slots[1]
            assert not np.isin(state_slots[0][others], state_slots[1]).any(), (
                "a row writes to a state that another reads"
            )
        nothing = np.empty(0, dtype=np.int64)
        issued.move(plan)
        states: list[int] = []
        flat = issued.device.reshape(-1)
        slots: list[NDArray[np.int64]] = []
        values: list[Values] = []
        entries = zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True)
        for entry, (row, start, count) in enumerate(entries):
            sequence = table.sequences[row]
            assert sequence is not None
            place = np.arange(max(start - 1, 0), start + count)
            slot = table.blocks[row, place // block_size] * np.int64(block_size) + place % block_size
            tokens = table.tokens[row, start : min(start + count, table.known[row])]
            if tokens.size < count:  # the last one is what the plan before this one samples
                assert tokens.size == count - 1
                tokens = np.append(tokens, self._last_sampled[row, int(table.epoch[row])])
            before = int(flat[slot[0]]) if start else first_value(sequence.cache_salt)
            slots.append(slot[-count:])
            values.append(values_after(before, tokens))
            flat[slot[-count:]] = values[-1]
            if plan.states is not None:
                read = int(state_slots[0, entry])
                assert (read < 0) == (start == 0), "a row begins from another's state, or from none in the middle"
                before = first_value(sequence.cache_salt) if read < 0 else int(issued.states[read])
                states.append(int(values_after(before, tokens)[-1]))
        issued.states[state_slots[1]] = states
        last = [int(each[-1]) for each in values] if plan.states is None else states
        sampled = [token_after(last[i]) for i in plan.sampled.tolist()]
        self._last_sampled = {
            (row, int(table.epoch[row])): token for row, token in zip(plan.sampled_rows.tolist(), sampled, strict=True)
        }
        effects = Effects(
            plan,
            np.concatenate([*slots, nothing]),
            np.concatenate([*values, nothing.astype(np.uint64)]),
            np.array(sampled, dtype=np.int64),
            state_slots[1],
            np.array(states, dtype=np.uint64),
        )
        assert np.unique(effects.slots).size == effects.slots.size, "two rows write to one slot"
        self.under_way.append(effects)
        return effects

    def commit(self) -> Effects:
        """The oldest plan under way has run."""
        effects = self.under_way.popleft()
        self.committed.apply(effects)
        return effects

    def run_out_of_memory(self) -> StepPlan:
        """The only plan under way has stopped anywhere: what it was to copy and to write may be there or not."""
        (effects,) = self.under_way
        self.lose()
        return effects.plan

    def lose(self) -> None:
        """The outcome of all plans under way is lost: whatever they were to write may be there or not."""
        for effects in self.under_way:
            self.issued.poison(effects)
            self.committed.poison(effects)
        self.under_way.clear()
