"""Which sequence advances by how many tokens: continuous batching under a token budget, as pure bookkeeping.

Plain Python and numpy; no torch, no model. Why nothing waits for ever:
- a request whose longest form needs more blocks than the pool has is refused at the door, so any one sequence, alone,
  can run to its end;
- when the blocks run out the newest sequences give way until the rest fit, so the oldest always goes on;
- a preempted sequence takes its old place in the queue, so no later one overtakes it for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tsched.block_pool import BlockPool
from tsched.policies import ORDERS, PREEMPTIONS, PREFIX_CACHES, find_policy
from tsched.policies.base import CacheStats
from tsched.sampling_params import SamplingParams
from tsched.sequence import Ints, Sequence, SequenceTable
from tsched.step_plan import NO_PAIRS, NO_ROWS, StepPlan


class RefusedError(ValueError):
    """A request that could never run to its end here."""


@dataclass(slots=True)
class Counters:
    """Plain sums since the scheduler was made."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0


class Scheduler:
    """Makes plans and takes in their outcome. `commit` may lag `schedule` by one plan.

    num_blocks, block_size   the KV cache: blocks, and tokens a block
    max_num_seqs             sequences running at once
    max_num_batched_tokens   tokens a plan
    max_model_len            tokens a sequence, prompt and output together
    eos_token_ids            end a sequence unless its parameters say ignore_eos
    order, preemption, prefix_cache   policies by name, see tsched.policies
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...] = (),
        order: str = "fcfs",
        preemption: str = "recompute",
        prefix_cache: str = "none",
    ) -> None:
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
        }
        for name, value in limits.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.pool = BlockPool(num_blocks, block_size)
        self.table = SequenceTable(max_num_seqs, max_model_len, block_size)
        self.counters = Counters()
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._order = find_policy("order", order, ORDERS)()
        self._preemption = find_policy("preemption", preemption, PREEMPTIONS)()
        self._cache = find_policy("prefix_cache", prefix_cache, PREFIX_CACHES)(self.pool)
        self._unfinished: dict[int, Sequence] = {}
        self._running: Ints = np.empty(0, dtype=np.int64)  # rows in the order of admission
        self._in_flight: deque[StepPlan] = deque()
        self._num_arrived = 0
        self._placed: list[int] = []  # rows that changed hands in the plan being made
        # The last plan, where every running row got a token by it and nobody has come or gone since.
        self._repeatable: StepPlan | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._order)

    @property
    def num_running(self) -> int:
        return int(self._running.size)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    @property
    def running(self) -> Ints:
        """[n] int64, the running rows in the order of admission."""
        return self._running.copy()

    def cache_stats(self) -> CacheStats:
        """What the prefix cache has found and evicted."""
        return self._cache.stats()

    def last_page_waste(self) -> float:
        """Of the slots lent to running sequences, the fraction past their known tokens."""
        capacity, known = self.table.capacity[self._running], self.table.known[self._running]
        lent = int(capacity.sum())
        return 1.0 - int(np.minimum(known, capacity).sum()) / lent if lent else 0.0

    def add(
        self,
        sequence_id: int,
        prompt: Items[int] | NDArray[Any],
        params: SamplingParams,
        *,
        cache_salt: bytes = b"",
    ) -> Sequence:
        """Queue a new sequence of `prompt` [n] int, n >= 1, and return it. Only sequences of one `cache_salt` share
        cached prefixes.

        Raises RefusedError, and nothing changes, where it could never run to its end here. Without a max_tokens it
        may run to what max_model_len and the whole pool allow.
        """
        if sequence_id in self._unfinished:
            raise ValueError(f"a sequence {sequence_id} is already here")
        if len(prompt) < 1:
            raise RefusedError("the prompt is empty: there is no token to go on from")
        if len(prompt) >= self.max_model_len:
            raise RefusedError(
                f"the prompt has {len(prompt)} tokens, max_model_len is {self.max_model_len} for prompt and output "
                f"together: a prompt may have {self.max_model_len - 1} at most"
            )
        pool = self.pool
        if params.max_tokens is None:
            max_length = max(len(prompt), pool.num_blocks * pool.block_size) + 1
        else:
            max_length = len(prompt) + params.max_tokens
        max_length = min(max_length, self.max_model_len)
        needed = pool.blocks_for(max_length - 1)  # the last token is never fed back
        if needed > pool.num_blocks:
            raise RefusedError(
                f"a prompt of {len(prompt)} tokens and an output up to {max_length} in all need {needed} blocks of "
                f"{pool.block_size} tokens, the pool has {pool.num_blocks}"
            )
        sequence = Sequence.create(sequence_id, prompt, params, max_length, cache_salt)
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self._cache.prepare(sequence)
        self._unfinished[sequence_id] = sequence
        self._order.add(sequence)
        self._repeatable = None
        return sequence

    def output_of(self, sequence: Sequence) -> list[int]:
        """The output's token ids so far, whether the sequence waits, runs or has finished."""
        if sequence.row < 0:
            return sequence.output_token_ids
        table = self.table
        ids: list[int] = table.tokens[sequence.row, sequence.prompt_len : table.known[sequence.row]].tolist()
        return ids

    def schedule(self) -> StepPlan:
        """The next step. Empty where nobody can advance: nobody is here, or all wait for the outcome of plans under
        way.
        """
        if len(self._in_flight) > 1:
            raise RuntimeError("two plans are under way; commit the older one before making a third")
        plan = self._repeat() if self._repeatable is not None and not self._in_flight else None
        if plan is None:
            self._placed.clear()
            counts, num_preempted, grown = self._advance_running()
            budget = self.max_num_batched_tokens - int(counts.sum())
            if num_preempted == 0 and budget > 0 and len(self._order):
                counts = self._admit(counts, budget)
            plan = self._plan(self._running, counts, num_preempted, grown)
        all_got_a_token = plan.num_decodes == plan.sampled.size == self._running.size
        self._repeatable = plan if all_got_a_token and plan.num_preempted == 0 else None
        self._in_flight.append(plan)
        counters = self.counters
        counters.num_steps += not plan.is_empty
        counters.num_decode_tokens += plan.num_decodes
        counters.num_prefill_tokens += plan.num_tokens - plan.num_decodes
        return plan

    def commit(self, plan: StepPlan, tokens: Ints) -> list[Sequence]:
        """Take in the `tokens` [m] that were sampled for `plan.sampled`, in that order; `plan` is the oldest under way.

        Tokens of sequences that have stopped or given way since the plan was made are dropped. Returns the sequences
        that finished, which have left the table.
        """
        if not self._in_flight or self._in_flight[0] is not plan:
            raise RuntimeError("plans are committed once each, in the order in which they were made")
        rows = plan.sampled_rows
        if tokens.shape != rows.shape:
            raise ValueError(f"the plan samples {rows.size} tokens, got an array of shape {tokens.shape}")
        self._in_flight.popleft()
        table, places = self.table, plan.lengths
        if table.num_departures != plan.num_departures:
            live = table.epoch[rows] == plan.sampled_epochs
            rows, tokens, places = rows[live], tokens[live], places[live]
        table.tokens[rows, places] = tokens
        lengths = places + 1
        table.known[rows] = lengths
        self.counters.num_output_tokens += rows.size
        stopped = self._stopped(rows, tokens, lengths)
        ended = stopped | (lengths >= table.max_length[rows])
        if not ended.any():
            return []
        reasons = np.where(stopped[ended], "stop", "length")
        return [
            self._finish_row(row, reason) for row, reason in zip(rows[ended].tolist(), reasons.tolist(), strict=True)
        ]

    def finish(self, sequence_id: int, reason: str) -> Sequence | None:
        """End a sequence from outside, wherever it is, and free its blocks; None where no such sequence is
        unfinished.
        """
        sequence = self._unfinished.get(sequence_id)
        if sequence is None:
            return None
        if sequence.row >= 0:
            return self._finish_row(sequence.row, reason)
        self._order.remove(sequence)
        return self._mark_finished(sequence, reason)

    def abort(self, sequence_id: int) -> Sequence | None:
        """`finish` with the reason "abort"."""
        return self.finish(sequence_id, "abort")

    def abort_all(self) -> None:
        """Abort every sequence and forget the plans under way: the outcome of a step is lost."""
        self._in_flight.clear()
        for sequence_id in list(self._unfinished):
            self.abort(sequence_id)

    def _advance_running(self) -> tuple[Ints, int, Ints]:
        """Tokens [num_running] for each running row, with blocks allocated for them, how many rows had to give way,
        and the rows that got a block.
        """
        table, num_preempted = self.table, 0
        while True:
            rows = self._running
            length = table.length[rows]
            if self._in_flight:  # a sequence whose last token is under way has nothing left to compute
                length = np.minimum(length, table.max_length[rows] - 1)
            computed = table.computed[rows]
            counts = _share(length - computed, self.max_num_batched_tokens)
            # Blocks for all known tokens were allocated at admission, so a row grows by one block at most.
            growing = rows[computed + counts > table.capacity[rows]]
            if growing.size == 0:
                return counts, num_preempted, growing
            if growing.size <= self._cache.num_available:
                table.extend_each(growing, self._cache.allocate(growing.size))
                return counts, num_preempted, growing
            if rows.size < 2:
                raise RuntimeError("a sequence that runs alone found no block: the pool's accounts are wrong")
            self._preempt(self._order.victim(rows, table))
            num_preempted += 1

    def _admit(self, counts: Ints, budget: int) -> Ints:
        """Admit from the queue while rows, blocks and `budget` tokens last; returns `counts` with theirs appended."""
        table, cache = self.table, self._cache
        rows: list[int] = []
        added: list[int] = []
        while budget > 0 and table.num_free_rows:
            sequence = self._order.head()
            if sequence is None:
                break
            matched = cache.match(sequence)
            missing = self.pool.blocks_for(sequence.tokens.size) - matched.size
            # One block is kept back for each running sequence to grow into; else the newcomer would be preempted at
            # once.
            if missing + self.num_running + len(rows) > cache.num_available:
                cache.release(sequence, matched, 0)
                break
            self._order.remove(sequence)
            num_computed = matched.size * self.pool.block_size
            row = table.place(sequence, np.concatenate((matched, cache.allocate(missing))), num_computed)
            count = min(budget, sequence.tokens.size - num_computed)
            budget -= count
            rows.append(row)
            self._placed.append(row)
            added.append(count)
        if not rows:
            return counts
        self._running = np.concatenate((self._running, np.array(rows, dtype=np.int64)))
        return np.concatenate((counts, np.array(added, dtype=np.int64)))

    def _plan(self, rows: Ints, counts: Ints, num_preempted: int, grown: Ints) -> StepPlan:
        """The plan in which `rows` advance by `counts`, decode rows first, and the table's accounts of it."""
        table = self.table
        is_decode = counts == 1
        num_decodes = int(np.count_nonzero(is_decode))
        if num_decodes < counts.size:
            order = np.concatenate((np.flatnonzero(is_decode), np.flatnonzero(counts > 1)))
            rows, counts = rows[order], counts[order]
        starts = table.computed[rows]
        ends = starts + counts
        table.computed[rows] = ends
        sampled = np.flatnonzero(ends == table.length[rows])
        sampled_rows = rows[sampled]
        lengths = ends[sampled]
        table.length[sampled_rows] = lengths + 1
        return StepPlan(
            rows=rows,
            starts=starts,
            counts=counts,
            ends=ends,
            num_decodes=num_decodes,
            num_tokens=int(counts.sum()),
            sampled=sampled,
            sampled_rows=sampled_rows,
            sampled_epochs=table.epoch[sampled_rows],
            lengths=lengths,
            num_departures=table.num_departures,
            num_preempted=num_preempted,
            swap_outs=NO_PAIRS,
            swap_ins=NO_PAIRS,
            copies=NO_PAIRS,
            placed=np.array(self._placed, dtype=np.int64) if self._placed else NO_ROWS,
            rewritten=NO_ROWS,
            grown=grown,
        )

    def _repeat(self) -> StepPlan | None:
        """The last plan one token on, or None where its rows need more blocks than there are.

        Most plans are such. Nobody could be admitted then, so nobody can be now: the free blocks have only become
        fewer.
        """
        table, last = self.table, self._repeatable
        if last is None:
            return None
        rows, starts = last.rows, last.ends
        growing = rows[starts >= table.capacity[rows]]
        if growing.size:
            if growing.size > self._cache.num_available:
                return None
            table.extend_each(growing, self._cache.allocate(growing.size))
        ends = starts + 1
        table.computed[rows] = ends
        table.length[rows] = ends + 1
        return StepPlan(
            rows=rows,
            starts=starts,
            counts=last.counts,
            ends=ends,
            num_decodes=last.num_decodes,
            num_tokens=last.num_tokens,
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
        )

    def _stopped(self, rows: Ints, tokens: Ints, lengths: Ints) -> np.ndarray:
        """[m] bool, which of `rows` were ended by their new token."""
        table = self.table
        stopped = np.zeros(rows.size, dtype=np.bool_)
        for eos in self._eos_token_ids:
            stopped |= tokens == eos
        if stopped.any():
            stopped &= ~table.ignore_eos[rows]
        if table.num_with_stop_ids:
            for i in np.flatnonzero(table.has_stop_ids[rows]).tolist():
                sequence = table.sequences[int(rows[i])]
                stopped[i] |= sequence is not None and int(tokens[i]) in sequence.stop_ids
        return stopped & (lengths > table.min_length[rows]) if stopped.any() else stopped

    def _preempt(self, row: int) -> None:
        self._running = self._running[self._running != row]
        sequence = self._preemption.preempt(self.table, row, self._cache)
        self._cache.prepare(sequence)
        self._order.add(sequence)
        self.counters.num_preemptions += 1

    def _finish_row(self, row: int, reason: str) -> Sequence:
        computed = min(int(self.table.computed[row]), int(self.table.known[row]))
        sequence, blocks = self.table.remove(row)
        self._running = self._running[self._running != row]
        self._cache.release(sequence, blocks, computed)
        return self._mark_finished(sequence, reason)

    def _mark_finished(self, sequence: Sequence, reason: str) -> Sequence:
        del self._unfinished[sequence.id]
        self._repeatable = None
        sequence.finish_reason = reason
        self.counters.num_finished += 1
        return sequence


def _share(wanted: Ints, budget: int) -> Ints:
    """How many of the `wanted` [n] >= 0 tokens each row gets of `budget`, the older rows first.

    A prefill that does not fit a plan leaves no budget to admit anyone after it, so it is the newest row: no decode
    row ever waits for a prefill.
    """
    if wanted.size == 0 or (wanted.size <= budget and int(wanted.max()) <= 1):
        return wanted
    before = np.cumsum(wanted) - wanted
    return np.clip(budget - before, 0, wanted)
