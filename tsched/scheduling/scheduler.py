"""Which sequence advances by how many tokens: continuous batching under a token budget, as pure bookkeeping.

Plain Python and numpy; no torch, no model. Why nothing waits for ever:
- a request whose longest form needs more blocks than the pool has is refused at the door, so any one sequence, alone,
  can run to its end; where layers have windows, no sequence needs more than its window's;
- when the blocks run out, first those that waiting sequences hold are taken back, then the last in the order give way
  until the rest fit, so the first always goes on;
- a preempted sequence keeps its place in the order, so only finitely many ever overtake it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from typing import Any

from numpy.typing import NDArray

from tsched.requests.errors import ArgumentError, RefusedError
from tsched.requests.prompts import check_priority
from tsched.requests.sampling_params import SamplingParams
from tsched.resolved_options import ResolvedOptions
from tsched.scheduling.block_pool import BlockPool
from tsched.scheduling.departures import Departures
from tsched.scheduling.fast_forward import count_quiet_steps, skip_steps
from tsched.scheduling.kv_memory import NO_COPIES, KVMemory
from tsched.scheduling.planner import Planner, UnderWay
from tsched.scheduling.policies import ORDERS, PREEMPTIONS, make_prefix_cache
from tsched.scheduling.policies.base import CacheStats, Computed
from tsched.scheduling.refusal import as_token_ids, find_max_length
from tsched.scheduling.sequence import Ints, Sequence, SequenceTable
from tsched.scheduling.sibling_groups import SiblingGroups
from tsched.scheduling.state_slots import StateSlots
from tsched.scheduling.step_plan import Counters, StepPlan
from tsched.scheduling.token_budget import TokenBudget
from tsched.scheduling.waiting_queue import WaitingQueue
from tsched.scheduling.window import Window

__all__ = ["Counters", "Scheduler", "StepPlan"]


class Scheduler:
    """Makes plans and takes in their outcome. `commit` may lag `schedule` by one plan.

    Args:
        resolved: The engine's options, and the sizes that follow from them for one model.
        eos_token_ids: End a sequence unless its parameters say ignore_eos.

    Raises:
        ArgumentError: The options do not go together, or too few blocks or states serve nobody.
    """

    def __init__(self, resolved: ResolvedOptions, eos_token_ids: tuple[int, ...] = ()) -> None:
        options, block_size = resolved.options, resolved.block_size
        budget = TokenBudget(
            options.max_num_batched_tokens, options.max_chunk_tokens, options.decode_share, options.chunked_prefill
        )
        budget.check(resolved.max_model_len)
        self.pool = BlockPool(resolved.num_blocks, block_size)
        self.host_pool = BlockPool(resolved.num_host_blocks, block_size) if resolved.num_host_blocks else None
        self.table = SequenceTable(options.max_num_seqs, resolved.max_model_len, block_size)
        self.counters = Counters()
        self.max_num_batched_tokens = options.max_num_batched_tokens
        self.max_model_len = resolved.max_model_len
        self._eos_token_ids = eos_token_ids
        self._order = ORDERS[options.order]()
        self.window: Window | None = None
        if resolved.window is not None:
            if resolved.num_states:
                raise ArgumentError("beside states all blocks are kept: window must be None where there are num_states")
            self.window = Window.of(resolved.window, self.pool, chunk=budget.chunk, chunked=budget.chunked)
        self._cache = make_prefix_cache(options.prefix_cache, self.pool, self.window)
        self.states: StateSlots | None = None
        if resolved.num_states:
            self.states = StateSlots(
                resolved.num_states, resolved.num_host_states, resolved.state_interval, self.table, self.pool
            )
        self._memory = KVMemory(self.pool, self._cache, self.host_pool, self.states, self.window)
        self._waiting = WaitingQueue()
        preemption = PREEMPTIONS[options.preemption]()
        self._planner = Planner(self.table, self._memory, self._waiting, budget, preemption, self.counters)
        self._groups = SiblingGroups()
        self._departures = Departures(
            self.table, self._memory, self._planner, self._waiting, self._groups, self.counters, eos_token_ids
        )
        self._unfinished = self._departures.unfinished
        self._in_flight: deque[UnderWay] = deque()
        self._num_arrived = 0
        self._num_created = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._groups)

    @property
    def num_running(self) -> int:
        return int(self._planner.running.size)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    @property
    def running(self) -> Ints:
        """[n] int64, the running rows, the first in the order first."""
        return self._planner.running.copy()

    def cache_stats(self) -> CacheStats:
        """What the prefix cache has found and evicted."""
        return self._cache.stats()

    def last_page_waste(self) -> float:
        """Of the slots lent to running sequences, the fraction past their known tokens."""
        return self.table.last_page_waste(self._planner.running)

    def add(
        self,
        sequence_id: int,
        prompt: Items[int] | NDArray[Any],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: bytes = b"",
    ) -> Sequence:
        """Queue a new sequence of `prompt` [n] int, n >= 1, and return it.

        priority: lower goes first, where the order looks at it. Only sequences of one `cache_salt` share cached
        prefixes. Raises RefusedError, and nothing changes, where it could never run to its end here or the prompt is
        no list of integers; TypeError or ValueError for a priority that is no integer or too large. Without a
        max_tokens it may run to what max_model_len and the whole pool allow.
        """
        return self.add_group([sequence_id], prompt, [params], priority=priority, cache_salt=cache_salt)[0]

    def add_group(
        self,
        sequence_ids: Items[int],
        prompt: Items[int] | NDArray[Any],
        params: Items[SamplingParams],
        *,
        priority: int = 0,
        cache_salt: bytes = b"",
    ) -> list[Sequence]:
        """Queue n sequences of one prompt, which is computed once: the first one's blocks are forked to the others
        when it has been. Any of them may be aborted at any moment. Raises what `add` raises.
        """
        if not 1 <= len(set(sequence_ids)) == len(sequence_ids) == len(params):
            raise ArgumentError(f"a group is distinct ids and as many parameters, got {sequence_ids} and {len(params)}")
        self._require_new(sequence_ids)
        priority, tokens = check_priority(priority), as_token_ids(prompt)
        group = []
        for i, one in zip(sequence_ids, params, strict=True):
            length = find_max_length(tokens.size, one, self.pool, self.max_model_len, self.window)
            group.append(Sequence(i, tokens, one, length, priority=priority, cache_salt=cache_salt))
        for sequence in group:
            self._enlist(sequence, self._num_arrived)
        self._num_arrived += 1
        leader = group[0]
        self._cache.prepare(leader)
        self._waiting.add(leader)
        if len(group) > 1:
            for follower in group[1:]:
                self._cache.adopt(follower, leader)
            self._groups.form(leader, group[1:])
        return group

    def fork(self, sequence_id: int, new_id: int, params: SamplingParams, *, num_tokens: int | None = None) -> Sequence:
        """Queue a sequence `new_id` that begins with the first `num_tokens` tokens (None: all known) of an unfinished
        one, whose blocks it shares and whose place in the order it has.

        It computes its last token itself, so that its logits come from a row like any other. max_tokens counts from
        the end of the parent's prompt. ArgumentError where there is no such sequence or no such number of tokens;
        RefusedError where the fork could never run to its end, or has reached it.
        """
        parent = self._unfinished.get(sequence_id)
        if parent is None:
            raise ArgumentError(f"no sequence {sequence_id} is unfinished: there is nothing to fork")
        self._require_new([new_id])
        table, row = self.table, parent.row
        tokens = parent.tokens if row < 0 else table.tokens[row, : table.known[row]]
        count = tokens.size if num_tokens is None else num_tokens
        if not 1 <= count <= tokens.size:
            raise ArgumentError(f"sequence {sequence_id} has {tokens.size} tokens, a fork of {count} was asked for")
        prompt_len = min(parent.prompt_len, count)
        max_length = find_max_length(prompt_len, params, self.pool, self.max_model_len, self.window)
        if count >= max_length:
            raise RefusedError(f"a fork of {count} tokens has reached its end already: {max_length} tokens at most")
        child = Sequence(
            new_id,
            tokens[:count],
            params,
            max_length,
            prompt_len=prompt_len,
            priority=parent.priority,
            cache_salt=parent.cache_salt,
        )
        self._enlist(child, parent.arrival)
        self._cache.adopt(child, parent)
        self._planner.share_blocks(parent, child)
        self._waiting.add(child)
        self.counters.num_forks += 1
        return child

    def replace_last(self, sequence_id: int, token: int) -> None:
        """Put `token` in the place of the last output token of an unfinished sequence, which no plan has run yet.

        RuntimeError where a plan is under way, ArgumentError where there is no such sequence or token.
        """
        if self._in_flight:
            raise RuntimeError("a plan is under way: the last token may be running already")
        sequence = self._unfinished.get(sequence_id)
        if sequence is None:
            raise ArgumentError(f"no sequence {sequence_id} is unfinished")
        row = sequence.row
        last = (int(self.table.known[row]) if row >= 0 else sequence.tokens.size) - 1
        if last < sequence.prompt_len:
            raise ArgumentError(f"sequence {sequence_id} has no output token yet")
        sequence.num_frozen = min(sequence.num_frozen, last)
        if last < sequence.tokens.size:  # what the prefix cache has seen of it
            sequence.tokens[last] = token
            self._cache.truncate(sequence, last)
        if row >= 0:
            self.table.tokens[row, last] = token
            self._planner.note_replaced(row)

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
        under_way = self._planner.make(is_late=bool(self._in_flight))
        plan = under_way.plan
        self._in_flight.append(under_way)
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
        if not self._in_flight or self._in_flight[0].plan is not plan:
            raise RuntimeError("plans are committed once each, in the order in which they were made")
        rows = plan.sampled_rows
        if tokens.shape != rows.shape:
            raise ArgumentError(f"the plan samples {rows.size} tokens, got an array of shape {tokens.shape}")
        under_way = self._in_flight.popleft()
        table, places = self.table, plan.lengths
        if table.num_departures != plan.num_departures:
            live = table.epoch[rows] == plan.sampled_epochs
            rows, tokens, places = rows[live], tokens[live], places[live]
        table.tokens[rows, places] = tokens
        lengths = places + 1
        table.known[rows] = lengths
        self.counters.num_output_tokens += rows.size
        if under_way.copies is not NO_COPIES:
            self._memory.free_restored(under_way.copies)
        if under_way.prefills:
            self._commit_prefills(under_way.prefills)
        if self.window is not None:
            self._release_passed(under_way.prefills, rows, places)
        return self._departures.end_stopped(rows, tokens, lengths)

    def lose(self, plan: StepPlan) -> list[Sequence]:
        """End the sequences of `plan`, the oldest under way, whose outcome is lost, with the reason "error".

        None of its copies and writes need have been made. Those of its sequences that have stopped or given way since
        are left alone. What waiting sequences hold is given up where the plan was to write it: forks hold blocks of its
        rows, and sequences that it swapped out blocks of the host. Returns the sequences that ended.
        """
        if not self._in_flight or self._in_flight[0].plan is not plan:
            raise RuntimeError("plans are lost in the order in which they were made")
        under_way = self._in_flight.popleft()
        self._memory.free_restored(under_way.copies)
        while self._memory.give_up() is not None:
            self.counters.num_given_up += 1
        self.counters.num_given_up += self._memory.drop_from_host(self._unfinished.values(), plan.swap_outs[1])
        table = self.table
        planned = dict(zip(plan.sampled_rows.tolist(), plan.sampled_epochs.tolist(), strict=True))
        planned |= {row: epoch for row, epoch, _ in under_way.prefills}
        return self._departures.end_rows({row: "error" for row, epoch in planned.items() if table.epoch[row] == epoch})

    def quiet_steps(self, most: int) -> int:
        """How many of the next steps, `most` at most, only repeat the last one with the next tokens, if nobody comes or
        goes: what `skip_steps` can do at once. 0 where a plan is under way, or a token might stop a sequence.
        """
        last = self._planner.repeatable
        if last is None or self._in_flight or self.table.num_with_stop_ids:
            return 0
        if self.states is not None or self.window is not None:  # slots change at checkpoints, blocks are given back
            return 0
        if self._eos_token_ids and not self.table.ignore_eos[last.rows].all():
            return 0
        return count_quiet_steps(last, self.table, self._cache.num_available, most)

    def skip_steps(self, count: int, tokens: Ints) -> Ints:
        """The state after `count` <= quiet_steps(count) times schedule() and commit(), where running row i, in the
        order of the last plan's, gets `tokens[i]` [n] each time. Returns [count], the blocks that each step took.
        """
        last = self._planner.repeatable
        if last is None or count < 1 or self.quiet_steps(count) < count:
            raise RuntimeError(f"the next {count} steps do not all repeat the last one")
        if tokens.shape != last.rows.shape:
            raise ArgumentError(f"{last.rows.size} rows are running, got tokens of shape {tokens.shape}")
        plan, taken = skip_steps(last, self.table, self._cache, count, tokens)
        self._planner.go_on_from(plan)
        counters, num_tokens = self.counters, count * last.rows.size
        counters.num_steps += count
        counters.num_decode_tokens += num_tokens
        counters.num_output_tokens += num_tokens
        return taken

    def finish(self, sequence_id: int, reason: str) -> Sequence | None:
        """End a sequence from outside, wherever it is, and free its blocks; None where no such sequence is
        unfinished.
        """
        sequence = self._unfinished.get(sequence_id)
        return None if sequence is None else self._departures.end(sequence, reason)

    def abort(self, sequence_id: int) -> Sequence | None:
        """`finish` with the reason "abort"."""
        return self.finish(sequence_id, "abort")

    def abort_all(self) -> None:
        """Abort every sequence and forget the plans under way: the outcome of a step is lost."""
        for under_way in self._in_flight:
            self._memory.free_restored(under_way.copies)
        self._in_flight.clear()
        for sequence_id in list(self._unfinished):
            self.abort(sequence_id)

    def _require_new(self, sequence_ids: Items[int]) -> None:
        for sequence_id in sequence_ids:
            if sequence_id in self._unfinished:
                raise ArgumentError(f"a sequence {sequence_id} is already here")

    def _enlist(self, sequence: Sequence, arrival: int) -> None:
        sequence.arrival, sequence.serial = arrival, self._num_created
        sequence.key = self._order.key(sequence)
        self._num_created += 1
        self._unfinished[sequence.id] = sequence
        self._planner.disturb()

    def _commit_prefills(self, prefills: list[tuple[int, int, int]]) -> None:
        """(row, epoch, end): the row's first `end` tokens are computed now, if the row is still the same one's."""
        table, block_size = self.table, self.pool.block_size
        rows, computed, led = [], [], []
        for row, epoch, end in prefills:
            sequence = table.sequences[row]
            if sequence is None or table.epoch[row] != epoch:
                continue
            table.prefilled[row] = end
            own = table.blocks[row, sequence.first_block : end // block_size]
            if own.size:
                rows.append(row)
                computed.append((sequence, own.copy(), end))
            if end >= sequence.prompt_len:
                led.append(sequence)
        if rows:
            self._insert(rows, computed)
        for sequence in led if len(self._groups) else ():
            for follower in self._groups.disband(sequence.id):
                self._planner.share_blocks(sequence, follower)
                self._waiting.add(follower)
                self.counters.num_forks += 1

    def _insert(self, rows: list[int], computed: list[Computed]) -> None:
        """The blocks of `rows` [n] are `computed` [n]: they become matchable, or give way to equal ones that are."""
        rewritten = []
        for row, (sequence, given, _), blocks in zip(
            rows, computed, self._memory.insert_each(rows, computed), strict=True
        ):
            if blocks is not given:
                self.table.blocks[row, sequence.first_block : sequence.first_block + blocks.size] = blocks
                rewritten.append(row)
        self._planner.note_inserted(rewritten)

    def _release_passed(self, prefills: list[tuple[int, int, int]], rows: Ints, ends: Ints) -> None:
        """Give back the blocks that nobody sees any more once the plan with these `prefills` and sampled `rows` [m],
        which computed their tokens up to `ends` [m], has run.
        """
        table, window = self.table, self.window
        if window is None:
            return
        passed = {row: window.count_passed(end) for row, epoch, end in prefills if table.epoch[row] == epoch}
        counts = window.count_passed(ends)
        is_new = counts > table.first_block[rows]
        passed |= zip(rows[is_new].tolist(), counts[is_new].tolist(), strict=True)
        for row, count in passed.items():
            sequence = table.sequences[row]
            if sequence is None or count <= sequence.first_block:
                continue
            self._cache.release(sequence, table.take_before(row, int(count)), 0)
            if len(self._waiting):  # it may be admitted now
                self._planner.disturb()
