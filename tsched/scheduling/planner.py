"""How a plan is made: who goes on and by how much, who gives way, who is admitted."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tsched.scheduling.admission import Admission
from tsched.scheduling.block_pool import BlockIds
from tsched.scheduling.kv_memory import NO_COPIES, Copies, KVMemory
from tsched.scheduling.policies.base import Preemption
from tsched.scheduling.sequence import Ints, Sequence, SequenceTable
from tsched.scheduling.state_slots import StateSlots
from tsched.scheduling.step_plan import NO_PAIRS, NO_ROWS, Counters, StateStep, StepPlan
from tsched.scheduling.token_budget import TokenBudget
from tsched.scheduling.waiting_queue import WaitingQueue

_NOTHING: list[Any] = []  # shared by the plans without prefills


@dataclass(eq=False, slots=True)
class UnderWay:
    """A plan, and what its commit needs besides: (row, epoch, end) of its prefills, and its copies."""

    plan: StepPlan
    prefills: list[tuple[int, int, int]]
    copies: Copies


class Planner:
    """Makes plans over the running rows of `table` and the sequences in `waiting`."""

    def __init__(
        self,
        table: SequenceTable,
        memory: KVMemory,
        waiting: WaitingQueue,
        budget: TokenBudget,
        preemption: Preemption,
        counters: Counters,
    ) -> None:
        self.running: Ints = NO_ROWS  # [n] rows, the first in the order first
        self._table = table
        self._memory = memory
        self._states = memory.states
        self._window = memory.window
        self._waiting = waiting
        self._budget = budget
        self._admission = Admission(table, memory, waiting, budget, counters)
        self._preemption = preemption
        self._counters = counters
        # What the next plan names: rows that are wholly new, rows with other blocks in the middle.
        self._placed: list[int] = []
        self._rewritten: list[int] = []
        # (row, epoch) of rows that were forked since they last wrote: others may refer to the block they write to next.
        self._forked: list[tuple[int, int]] = []
        # Without chunked prefill: whole prompts took the tokens of running rows in the last plan, which go first now.
        self._left_out = False
        # The last plan, where every running row got a token by it and nothing has changed since but that.
        self._repeatable: StepPlan | None = None

    @property
    def repeatable(self) -> StepPlan | None:
        """The last plan, as if it had only decoded, where the next one may be the same one token on."""
        last = self._repeatable
        if last is None or last.num_decodes == last.rows.size:
            return last
        ones = np.ones(last.rows.size, dtype=np.int64)
        return replace(last, starts=last.ends - 1, counts=ones, num_decodes=ones.size, num_tokens=ones.size)

    def go_on_from(self, plan: StepPlan) -> None:
        """`plan` has been carried out after `repeatable`, and is repeatable itself."""
        self._repeatable = plan

    def make(self, *, is_late: bool) -> UnderWay:
        """The next plan; `is_late` where another one is under way, whose tokens are not known yet."""
        under_way = self._repeat(is_late)
        if under_way is not None:
            self._repeatable = under_way.plan
            return under_way
        decodes_first = self._left_out
        under_way = self._make(is_late)
        # Where decodes went first, who waits was not asked whether the whole step's tokens would do.
        is_turn = decodes_first and len(self._waiting) > 0
        self._repeatable = under_way.plan if self._is_repeatable(under_way.plan) and not is_turn else None
        return under_way

    def disturb(self) -> None:
        """Somebody came or went, or blocks changed hands: the next plan is not the last one again."""
        self._repeatable = None

    def share_blocks(self, parent: Sequence, child: Sequence) -> None:
        """The waiting `child`, which begins with `parent`'s tokens, holds the blocks of those that are computed."""
        table, row, most = self._table, parent.row, child.tokens.size - 1
        if row >= 0:
            # What a plan under way computes is there before any later plan reads it.
            num_computed = min(int(table.computed[row]), most)
            blocks = table.blocks[row, parent.first_block : table.num_blocks[row]]
            self._memory.share_row(child, row, parent.first_block, blocks, num_computed)
            self._forked.append((row, int(table.epoch[row])))
            self._repeatable = None
        else:
            self._memory.share_waiting(child, parent, most)

    def note_replaced(self, row: int) -> None:
        """A token of `row` is another one now."""
        self._placed.append(row)
        self._repeatable = None

    def note_inserted(self, rewritten: list[int]) -> None:
        """Blocks have become matchable; some of the rows `rewritten` were exchanged for equal ones."""
        self._admission.note_inserted()
        self._rewritten += rewritten
        if rewritten or len(self._waiting):
            self._repeatable = None

    def leave(self, row: int) -> tuple[Sequence, BlockIds]:
        """The sequence in `row` stops running; returns it, with the tokens known of it, and its blocks."""
        self.stop_running(row)
        return self._table.remove(row)

    def stop_running(self, rows: Items[int] | int) -> None:
        """The `rows` run no more, and are still in the table."""
        is_running = np.ones(self._table.num_rows, dtype=np.bool_)
        is_running[rows] = False
        self.running = self.running[is_running[self.running]]
        self._repeatable = None

    def _make(self, is_late: bool) -> UnderWay:
        num_preempted = self._counters.num_preemptions
        counts, left, room, grown = self._advance_running(is_late)
        rows, num_preempted = self.running, self._counters.num_preemptions - num_preempted
        prompts_first, self._left_out = not (self._budget.chunked or self._left_out), False
        if num_preempted == 0 and len(self._waiting):
            if prompts_first:
                left = room = self._budget.num_tokens
            new_rows, new_counts = self._admission.admit(rows, left, room)
            if new_rows:
                if prompts_first:
                    wanted, counts = counts, self._budget.after_prompts(counts, sum(new_counts))
                    self._left_out = bool(np.count_nonzero(counts < wanted))
                new = np.array(new_rows, dtype=np.int64)
                self._start_running(new)
                rows, counts = np.concatenate((rows, new)), np.concatenate((counts, new_counts))
        return self._plan(rows, counts, grown, num_preempted)

    def _advance_running(self, is_late: bool) -> tuple[Ints, int, int, Ints]:
        """Tokens [num_running] for each running row, with blocks allocated for them; the tokens left of the step, and
        those of them for prefills; the rows that got a block.
        """
        table, cache = self._table, self._memory.cache
        while True:
            rows = self.running
            length = table.length[rows]
            if is_late:  # a sequence whose last token is under way has nothing left to compute
                length = np.minimum(length, table.max_length[rows] - 1)
            computed = table.computed[rows]
            counts, left, room = self._budget.share(self._cut_wanted(rows, computed, length - computed))
            ends = computed + counts
            is_short = ends > table.capacity[rows]
            growing = rows[is_short]
            # Blocks for all known tokens were allocated at admission, so a row grows by one block at most; where a
            # window let it have blocks for a part of them alone, by several.
            lacking = None if self._window is None else table.count_lacking(growing, ends[is_short])
            num_lacking = growing.size if lacking is None else int(lacking.sum())
            writers = self._writers_to_shared(rows, counts) if self._forked else _NOTHING
            if num_lacking + len(writers) <= cache.num_available:
                break
            if not self._make_room(rows, counts):
                return np.zeros_like(counts), 0, 0, NO_ROWS
        if growing.size:
            table.extend_each(growing, cache.allocate(num_lacking), lacking)
        for row, place in writers:
            self._copy_on_write(row, place)
        if self._forked:
            still = set(rows[counts == 0].tolist())
            self._forked = [(row, epoch) for row, epoch in self._forked if row in still and table.epoch[row] == epoch]
        return counts, left, room, growing

    def _cut_wanted(self, rows: Ints, computed: Ints, wanted: Ints) -> Ints:
        """`wanted` [n] tokens of `rows` from places `computed` [n] on, as far as checkpoints of states or the blocks of
        a window let each go at once.
        """
        if self._states is not None and self._budget.chunked:
            return self._states.cut_at_checkpoints(rows, computed, wanted)
        return wanted if self._window is None else self._window.cut(self._table, rows, computed, wanted)

    def _make_room(self, rows: Ints, counts: Ints) -> bool:
        """Take blocks back from who waits or, where nobody has any, from the last of the running `rows` [n], which were
        to advance by `counts` [n]. False where it need not give way: the others end with the plan under way.
        """
        if self._memory.give_up() is not None:
            self._counters.num_given_up += 1
        elif rows.size < 2:
            raise RuntimeError("a sequence that runs alone found no block: the pool's accounts are wrong")
        elif not counts[:-1].any():
            return False
        else:
            self._preempt(int(rows[-1]))
        return True

    def _writers_to_shared(self, rows: Ints, counts: Ints) -> list[tuple[int, int]]:
        """(row, place in its list of blocks) of the forked rows that must copy the block to which they write next.

        No two of them share that block: a fork that is admitted has copied it, or has it alone.
        """
        table, pool = self._table, self._memory.pool
        writing = set(rows[counts > 0].tolist())
        writers = []
        for row, epoch in dict.fromkeys(self._forked):
            place, offset = divmod(int(table.computed[row]), pool.block_size)
            if row not in writing or table.epoch[row] != epoch or offset == 0:
                continue
            if int(pool.refs(table.blocks[row, place : place + 1])[0]) > 1:
                writers.append((row, place))
        return writers

    def _copy_on_write(self, row: int, place: int) -> None:
        table = self._table
        sequence = table.sequences[row]
        if sequence is None:
            raise RuntimeError(f"row {row} of the sequence table is empty")
        shared = table.blocks[row, place : place + 1].copy()
        table.blocks[row, place : place + 1] = self._memory.copy_on_write(sequence, shared)
        self._rewritten.append(row)

    def _preempt(self, row: int) -> None:
        table, memory = self._table, self._memory
        # Tokens still in flight are dropped: the row's epoch changes first. So the last known one is run again when the
        # sequence is back, and brings the same token.
        num_computed = min(int(table.computed[row]), int(table.known[row]) - 1)
        num_committed = table.num_committed(row)
        sequence, blocks = self.leave(row)
        sequence.num_preemptions += 1
        sequence.num_computed = 0
        held = memory.find_holding(row, sequence.first_block, blocks, num_computed)
        if self._preemption.moves_to_host(held):
            memory.swap_out(sequence, held)
        memory.release(row, sequence, blocks, num_committed)
        memory.cache.prepare(sequence)
        self._waiting.add(sequence)
        self._counters.num_preemptions += 1

    def _start_running(self, new: Ints) -> None:
        """The rows `new` [a], a >= 1, run from now on, each at its place in the order."""
        table = self._table
        self._placed += new.tolist()
        running = np.concatenate((self.running, new))
        key = table.key[running[-new.size - 1 :]]  # those who ran are in order
        if np.count_nonzero(key[1:] <= key[:-1]):
            running = running[np.lexsort((table.serial[running], table.key[running]))]
        self.running = running

    def _plan(self, rows: Ints, counts: Ints, grown: Ints, num_preempted: int) -> UnderWay:
        """The plan in which `rows` advance by `counts`, decode rows first, and the table's accounts of it."""
        table, counters = self._table, self._counters
        is_decode = counts == 1
        num_decodes = int(np.count_nonzero(is_decode))
        # Mostly they are in order already, the newcomer with its prompt at the end.
        if np.count_nonzero(is_decode[:num_decodes]) < num_decodes or np.count_nonzero(counts) < counts.size:
            order = np.concatenate((is_decode.nonzero()[0], (counts > 1).nonzero()[0]))
            rows, counts = rows[order], counts[order]
        starts = table.computed[rows]
        ends = starts + counts
        table.computed[rows] = ends
        sampled, sampled_rows, lengths = (ends == table.length[rows]).nonzero()[0], rows, ends
        if sampled.size < rows.size:
            sampled_rows, lengths = rows[sampled], ends[sampled]
        table.length[sampled_rows] = lengths + 1
        copies = self._memory.take_copies()
        swap_outs = swap_ins = on_device = NO_PAIRS
        if copies is not NO_COPIES:
            swap_outs, swap_ins = _join_pairs(copies.swap_outs), _join_pairs(copies.swap_ins)
            on_device = _join_pairs(copies.on_device)
            counters.num_swapped_out += swap_outs.shape[1]
            counters.num_swapped_in += swap_ins.shape[1]
            counters.num_copied += on_device.shape[1]
        plan = StepPlan(
            rows=rows,
            starts=starts,
            counts=counts,
            ends=ends,
            num_decodes=num_decodes,
            num_tokens=num_decodes + int(counts[num_decodes:].sum()) if num_decodes < rows.size else num_decodes,
            sampled=sampled,
            sampled_rows=sampled_rows,
            sampled_epochs=table.epoch[sampled_rows],
            lengths=lengths,
            num_departures=table.num_departures,
            num_preempted=num_preempted,
            swap_outs=swap_outs,
            swap_ins=swap_ins,
            copies=on_device,
            placed=_drain_rows(self._placed),
            rewritten=_drain_rows(self._rewritten),
            grown=grown,
            states=None if self._states is None else _advance(self._states, rows, starts, copies),
        )
        filled = rows[starts < table.prefill_length[rows]]
        if filled.size == 0:
            return UnderWay(plan, _NOTHING, copies)
        filling = zip(filled.tolist(), table.epoch[filled].tolist(), table.computed[filled].tolist(), strict=True)
        return UnderWay(plan, list(filling), copies)

    def _is_repeatable(self, plan: StepPlan) -> bool:
        """Whether every running row got a token by `plan`, and so comes next with one."""
        count = self.running.size
        if plan.sampled.size < count or plan.num_preempted:
            return False
        # Who waits may do so for tokens, of which decodes leave more.
        return plan.num_decodes == count or len(self._waiting) == 0

    def _repeat(self, is_late: bool) -> UnderWay | None:
        """The last plan one token on, or None where that is not what comes next.

        Most plans are such. Nobody could be admitted then, so nobody can be now: the free blocks have only become
        fewer.
        """
        table, last = self._table, self._repeatable
        if last is None:
            return None
        rows, starts = last.rows, last.ends
        if is_late and np.count_nonzero(starts >= table.max_length[rows] - 1):
            return None
        growing = rows[starts >= table.capacity[rows]]
        if growing.size:
            if growing.size > self._memory.cache.num_available:
                return None
            table.extend_each(growing, self._memory.cache.allocate(growing.size))
        ends = starts + 1
        table.computed[rows] = ends
        table.length[rows] = ends + 1
        plan = StepPlan(
            rows=rows,
            starts=starts,
            counts=last.counts if last.num_decodes == rows.size else np.ones(rows.size, dtype=np.int64),
            ends=ends,
            num_decodes=rows.size,
            num_tokens=rows.size,
            sampled=last.sampled,
            sampled_rows=last.sampled_rows,
            sampled_epochs=last.sampled_epochs,
            lengths=ends,
            num_departures=last.num_departures,
            num_preempted=0,
            swap_outs=NO_PAIRS,
            swap_ins=NO_PAIRS,
            copies=NO_PAIRS,
            placed=NO_ROWS,
            rewritten=NO_ROWS,
            grown=growing,
            states=None if self._states is None else _advance(self._states, rows, starts, NO_COPIES),
        )
        return UnderWay(plan, _NOTHING, NO_COPIES)


def _advance(states: StateSlots, rows: Ints, starts: Ints, copies: Copies) -> StateStep:
    """What the plan in which `rows` [n] advance from `starts` [n] on does to their states."""
    slots = states.advance(rows, starts)
    return StateStep(slots, _join_pairs(copies.state_swap_outs), _join_pairs(copies.state_swap_ins))


def _join_pairs(pairs: list[BlockIds]) -> BlockIds:
    """[2, n] all of the pairs."""
    return np.concatenate(pairs, axis=1) if pairs else NO_PAIRS


def _drain_rows(rows: list[int]) -> Ints:
    """The distinct `rows` as an array; the list is empty then."""
    if not rows:
        return NO_ROWS
    taken = np.array(list(dict.fromkeys(rows)), dtype=np.int64)
    rows.clear()
    return taken
