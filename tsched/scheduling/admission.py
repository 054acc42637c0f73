"""Who comes to run: sequences from the queue, while rows, blocks, states and tokens last."""

from __future__ import annotations

import numpy as np

from tsched.scheduling.block_pool import BlockIds
from tsched.scheduling.kv_memory import KVMemory
from tsched.scheduling.sequence import Ints, Sequence, SequenceTable
from tsched.scheduling.step_plan import Counters
from tsched.scheduling.token_budget import TokenBudget
from tsched.scheduling.waiting_queue import WaitingQueue

_Entered = tuple[Sequence, BlockIds, int]
"""A sequence that comes to run, the blocks that it holds, and how many more it needs."""


class Admission:
    """Places sequences of `waiting` in rows of `table`, with what they need of `memory`."""

    def __init__(
        self, table: SequenceTable, memory: KVMemory, waiting: WaitingQueue, budget: TokenBudget, counters: Counters
    ) -> None:
        self._table = table
        self._memory = memory
        self._states = memory.states
        self._window = memory.window
        self._waiting = waiting
        self._budget = budget
        self._counters = counters
        # Who was not admitted for want of room, and how many blocks (past those kept back to grow into) and states
        # there were then.
        self._blocked: tuple[Sequence, int, int] | None = None

    def note_inserted(self) -> None:
        """Blocks have become matchable: who found no room may need less of it now."""
        self._blocked = None

    def admit(self, running: Ints, left: int, room: int) -> tuple[list[int], list[int]]:
        """Admit from the queue beside the `running` rows [n] while rows, blocks, `left` tokens and `room` for prefill
        tokens last; returns their rows and counts, [a] each.
        """
        table, budget, waiting = self._table, self._budget, self._waiting
        is_simple = self._states is None and self._window is None
        entered: list[_Entered] = []
        rows: list[int] = []
        counts: list[int] = []
        num_free_rows, spared = table.num_free_rows, self._count_spared(running)
        while left > 0 and len(counts) < num_free_rows:
            sequence = waiting.head()
            if sequence is None:
                break
            wanted = sequence.tokens.size - sequence.num_computed
            if wanted > 1 and (room < 1 or (wanted > room and not budget.chunked)):
                break
            found = self._find_blocks(sequence, running.size + len(counts), spared)
            if found is None:
                break
            waiting.remove(sequence)
            if is_simple:  # all get their blocks and rows at once: until then the blocks are spared for them
                entered.append((sequence, *found))
                wanted, num_blocks = sequence.tokens.size - sequence.num_computed, found[0].size + found[1]
                spared += found[1] + (num_blocks * table.block_size < sequence.max_length - 1)  # as table.can_grow
            else:
                rows += self._place([(sequence, *found)])
                wanted, grows = self._enter_row(rows[-1], sequence)
                spared += grows
            counts.append(1 if wanted == 1 else min(wanted, budget.chunk, room))
            left -= counts[-1]
            room = min(left, room if wanted == 1 else room - counts[-1])
        return rows + self._place(entered), counts

    def _place(self, entered: list[_Entered]) -> list[int]:
        """Give those who have `entered` the blocks that they lack, and a row each; returns the rows."""
        if not entered:
            return []
        table, rows, begin = self._table, [], 0
        added = self._memory.cache.allocate(sum(missing for _, _, missing in entered))
        for sequence, held, missing in entered:
            blocks = added[begin : begin + missing]
            begin += missing
            if sequence.num_cached is None:
                sequence.num_cached = sequence.num_computed
            rows.append(table.place(sequence, np.concatenate((held, blocks)) if held.size else blocks))
        return rows

    def _enter_row(self, row: int, sequence: Sequence) -> tuple[int, int]:
        """The tokens that `sequence`, which was just placed in `row`, may compute at once; the blocks that newcomers
        after it leave to it.
        """
        table, window, wanted = self._table, self._window, sequence.tokens.size - sequence.num_computed
        if self._states is not None:
            self._states.place(row, sequence)
            if self._budget.chunked:
                wanted = int(self._states.cut_at_checkpoints(row, sequence.num_computed, wanted))
        if window is None:
            return wanted, bool(table.can_grow(row))
        # Its blocks may be for a part of its tokens alone.
        wanted = min(wanted, int(table.capacity[row]) - sequence.num_computed)
        return wanted, window.count_spared(table, np.array([row]))

    def _count_spared(self, rows: Ints) -> int:
        """Blocks that newcomers leave to the running `rows` [n]: one for each that may need one more."""
        if self._window is not None:
            return self._window.count_spared(self._table, rows)
        return int(np.count_nonzero(self._table.can_grow(rows)))

    def _find_blocks(self, sequence: Sequence, num_running: int, num_spared: int) -> tuple[BlockIds, int] | None:
        """What `sequence` holds, and how many more blocks it gets: for all its tokens, or for as many as a window lets
        it have. None where there are not enough beside the `num_spared` that are for those who run, or else the
        newcomer would be preempted at once.
        """
        memory = self._memory
        if num_running and self._blocked is not None and self._is_blocked(sequence, num_spared):
            return None
        while (found := memory.enter(sequence, num_spared)) is None:
            if num_running:
                self._blocked = (sequence, *self._count_room(num_spared))
                return None
            if memory.give_up(but=sequence) is None and memory.give_up() is None:
                raise RuntimeError("a sequence found too few blocks in an idle pool: the pool's accounts are wrong")
            self._counters.num_given_up += 1
        self._blocked = None
        return found

    def _is_blocked(self, sequence: Sequence, num_spared: int) -> bool:
        """Whether `sequence` found no room when there was as much as now."""
        if self._blocked is None or self._blocked[0] is not sequence:
            return False
        spared, num_states = self._count_room(num_spared)
        return spared <= self._blocked[1] and num_states <= self._blocked[2]

    def _count_room(self, num_spared: int) -> tuple[int, int]:
        """The blocks beside the `num_spared`, and the states, that newcomers can get."""
        num_states = 0 if self._states is None else self._states.num_available
        return self._memory.cache.num_available - num_spared, num_states
