"""A scheduler and all who act on it: rules for hypothesis or a random driver to fire, and what must hold after each."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.tsched.cache_contents import (
    blocks_by_digest,
    blocks_of_digests,
    contents_of_block_trees,
    contents_of_trees,
    cut_digests,
)
from tests.tsched.page_contents import (
    MAX_TOKENS,
    POISON,
    VOCAB,
    PageContents,
    first_value,
    token_after,
    values_after,
)
from tests.tsched.schedulers import build_scheduler
from tests.tsched.window_server import count_passed
from tsched.requests.errors import RefusedError
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.block_pool import NO_BLOCK, BlockIds, BlockPool
from tsched.scheduling.policies.hash_prefix_cache import HashPrefixCache
from tsched.scheduling.policies.radix_prefix_cache import RadixPrefixCache
from tsched.scheduling.policies.windowed_prefix_caches import WindowedHashCache, WindowedRadixCache
from tsched.scheduling.sequence import NO_STATE, Sequence
from tsched.scheduling.state_slots import StateSlots
from tsched.scheduling.step_plan import StepPlan

MAX_MODEL_LEN = 40
EOS = 0
SALTS = (b"", b"a", b"b")
# Prompts begin alike: each is the start of one of these, and a few tokens of its own.
_STEMS = [np.random.default_rng(seed).integers(1, VOCAB, MAX_TOKENS) for seed in range(2)]
assert MAX_MODEL_LEN <= MAX_TOKENS


@dataclass
class Life:
    """What is known of a sequence beside the scheduler."""

    sequence: Sequence
    params: SamplingParams
    num_given: int  # tokens that it came with
    replaced: set[int] = field(default_factory=set)  # places of tokens that are nobody's sample


class ServingWorld:
    """`fired` counts rules and what came of them."""

    def __init__(self, fired: Counter[str], **options: Any) -> None:
        self.fired = fired
        self.scheduler = build_scheduler(max_model_len=MAX_MODEL_LEN, eos_token_ids=(EOS,), **options)
        self.pages = PageContents(self.scheduler)
        self.alive: dict[int, Life] = {}
        self.finished: list[NDArray[np.int64]] = []
        self.num_created = self.num_checks = 0
        # Of each plan under way: (row, epoch) -> where the row's tokens begin and end.
        self._spans: deque[dict[tuple[int, int], tuple[int, int]]] = deque()
        self._lives: list[Life] = []  # all that ever were
        self._values_of_digest: dict[bytes, bytes] = {}
        self._num_digested: dict[int, int] = {}  # tokens, by sequence
        for name in ("order", "preemption", "prefix_cache"):
            fired[f"{name}: {options[name]}"] += 1

    # Rules

    def arrive(
        self, stem: int, stem_len: int, own: list[int], salt: int, priority: int, group: int, max_tokens: int, eos: bool
    ) -> None:
        prompt = np.append(_STEMS[stem][:stem_len], np.array(own, dtype=np.int64))
        self._add(prompt, salt, priority, group, max_tokens, eos)

    def come_back(self, choice: int, own: list[int], salt: int, max_tokens: int) -> None:
        """A conversation goes on: what has finished is the next prompt's beginning."""
        if self.finished:
            prompt = np.append(self.finished[choice % len(self.finished)], np.array(own, dtype=np.int64))
            self._add(prompt, salt, 0, 1, max_tokens, False)

    def schedule(self) -> None:
        if len(self.pages.under_way) > 1:
            return
        before = self._counts()
        plan = self.scheduler.schedule()
        assert not (plan.is_empty and self.alive and not self.pages.under_way), "nobody advances, and nothing will come"
        self._spans.append(self._spans_of(plan))
        effects = self.pages.issue(plan)
        pool, block_size = self.scheduler.pool, self.scheduler.pool.block_size
        written = np.unique(effects.slots // block_size).astype(np.int32)
        assert (pool.refs(written) == 1).all(), "a block is written to that somebody else refers to"
        self.fired["schedule"] += 1
        self.fired["schedule ahead"] += len(self.pages.under_way) > 1
        self.fired["adopt an equal block"] += plan.rewritten.size
        for name, pairs in (("swap out", plan.swap_outs), ("swap in", plan.swap_ins), ("copy on write", plan.copies)):
            self.fired[name] += pairs.shape[1]
        if plan.states is not None:
            self.fired["swap a state out"] += plan.states.swap_outs.shape[1]
            self.fired["swap a state in"] += plan.states.swap_ins.shape[1]
            self.fired["read one state, write another"] += int(
                ((plan.states.slots[0] != plan.states.slots[1]) & (plan.states.slots[0] >= 0)).sum()
            )
        self._count_since(before)

    def commit(self) -> None:
        if not self.pages.under_way:
            return
        before = self._counts()
        effects = self.pages.commit()
        for sequence in self.scheduler.commit(effects.plan, effects.sampled):
            self._finish(sequence)
        self._check_given_back(self._spans.popleft())
        self.fired["commit"] += 1
        self.fired["commit late"] += len(self.pages.under_way) > 0
        self._count_since(before)

    def abort(self, choice: int) -> None:
        if not self.alive:
            return
        life = self._one_of(choice)
        sequence = life.sequence
        if sequence.row >= 0:
            state = "while a plan runs it" if self._is_under_way(sequence) else "running"
        elif sequence.host_blocks.size:
            state = "swapped out"
        else:
            state = "waiting with blocks" if sequence.blocks.size else "waiting"
        self.fired[f"abort {state}"] += 1
        del self.alive[sequence.id]
        assert self.scheduler.abort(sequence.id) is sequence
        assert sequence.finish_reason == "abort"
        self._check_tokens(life)

    def fork(self, choice: int, num_tokens: int | None, max_tokens: int, eos: bool) -> None:
        if not self.alive:
            return
        parent = self._one_of(choice)
        tokens = self._tokens(parent.sequence)
        count = tokens.size if num_tokens is None else 1 + num_tokens % tokens.size
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=not eos)
        prompt_len = min(parent.sequence.prompt_len, count)
        longest = min(prompt_len + max_tokens, MAX_MODEL_LEN)
        pool = self.scheduler.pool
        state = "running" if parent.sequence.row >= 0 else "waiting"
        if parent.sequence.host_blocks.size:
            state = "swapped out"
        try:
            child = self.scheduler.fork(
                parent.sequence.id, self.num_created, params, num_tokens=None if num_tokens is None else count
            )
        except RefusedError:
            assert count >= longest or self._count_needed(longest) > pool.num_blocks
            self.fired["refuse a fork"] += 1
            return
        assert count < longest
        assert (child.tokens == tokens[:count]).all()
        self.fired[f"fork {state}"] += 1
        life = self._welcome(child, params)
        life.replaced = {place for place in parent.replaced if place < count}

    def replace_last(self, choice: int, token: int) -> None:
        """Beam search: another token than the sampled one goes on."""
        if not self.alive or self.pages.under_way:
            return
        life = self._one_of(choice)
        last = self._tokens(life.sequence).size - 1
        if last >= life.sequence.prompt_len:
            self.scheduler.replace_last(life.sequence.id, token)
            life.replaced.add(last)
            self._num_digested.pop(life.sequence.id, None)
            self.fired["replace the last token"] += 1

    def lose_a_step(self) -> None:
        """The device fails: everybody is aborted, the plans under way are forgotten."""
        self.scheduler.abort_all()
        self.pages.lose()
        self._spans.clear()
        for life in self.alive.values():
            assert life.sequence.finish_reason == "abort"
        self.alive.clear()
        self.fired["lose a step"] += 1

    def run_out_of_memory(self) -> None:
        """The device has too little memory for the last plan, after the one before it: those in it end, others stay."""
        if len(self.pages.under_way) > 1:
            self.commit()
        if not self.pages.under_way:
            return
        self._lose(self.pages.run_out_of_memory())
        self.fired["run out of memory"] += 1
        self.fired["run out of memory, others stay"] += len(self.alive) > 0

    def lose_the_tokens(self) -> None:
        """The oldest plan has run, and the host has too little memory to read its tokens back."""
        if self.pages.under_way:
            self._lose(self.pages.commit().plan)
            self.fired["lose the tokens"] += 1
            self.fired["lose the tokens while a plan runs"] += len(self.pages.under_way) > 0

    def _lose(self, plan: StepPlan) -> None:
        spans = self._spans.popleft()
        num_given_up = self.scheduler.counters.num_given_up
        table = self.scheduler.table
        left = {s.id for row, epoch in spans if (s := table.sequences[row]) is not None and table.epoch[row] == epoch}
        lost = self.scheduler.lose(plan)
        assert {sequence.id for sequence in lost} == left
        for sequence in lost:
            assert sequence.finish_reason == "error"
            self._check_tokens(self.alive.pop(sequence.id))
        self.fired["lose what was held"] += self.scheduler.counters.num_given_up - num_given_up

    def wind_up(self) -> None:
        """Everybody runs to the end, in a bounded number of steps, and leaves nothing behind."""
        bound = 3 * sum(life.sequence.max_length for life in self.alive.values()) + 10
        while self.alive or self.pages.under_way:
            assert bound > 0, f"{len(self.alive)} sequences do not come to their end"
            bound -= 1
            if self.alive:
                self.schedule()
                self.check()
            self.commit()
            self.check()
        scheduler = self.scheduler
        assert scheduler.pool.num_referenced == 0
        assert scheduler.host_pool is None or scheduler.host_pool.num_referenced == 0
        assert not scheduler.has_unfinished
        if scheduler.states is not None:
            assert scheduler.states.pool.num_referenced == 0
            assert scheduler.states.host_pool is None or scheduler.states.host_pool.num_referenced == 0
        blocks = scheduler._cache.allocate(scheduler.pool.num_blocks)
        assert np.unique(blocks).size == scheduler.pool.num_blocks
        scheduler.pool.release(blocks)
        assert scheduler.pool.num_free == scheduler.pool.num_blocks
        self.fired["wind up"] += 1

    # What must hold after each rule

    def check(self) -> None:
        self.num_checks += 1
        self._check_accounts()
        if self.scheduler.states is not None:
            self._check_states(self.scheduler.states)
        for life in self.alive.values():
            self._check_pages(life)
        self._check_kept()

    def _check_accounts(self) -> None:
        scheduler, table = self.scheduler, self.scheduler.table
        rows = scheduler.running
        held = [table.blocks[row, table.first_block[row] : table.num_blocks[row]] for row in rows.tolist()]
        host_held = [effects.plan.swap_ins[0] for effects in self.pages.under_way]
        for life in self.alive.values():
            if life.sequence.row < 0:
                held.append(life.sequence.blocks)
                host_held.append(life.sequence.host_blocks)
        assert all(np.unique(blocks).size == blocks.size for blocks in held)
        _check_pool(scheduler.pool, held)
        if scheduler.host_pool is not None:
            _check_pool(scheduler.host_pool, host_held)
        else:
            assert not any(blocks.size for blocks in host_held)
        assert (table.capacity[rows] == table.num_blocks[rows] * scheduler.pool.block_size).all()
        assert (table.computed[rows] <= table.capacity[rows]).all()
        assert rows.size + table.num_free_rows == table.num_rows
        running = [sequence.id for sequence in table.sequences if sequence is not None]
        assert len(running) == rows.size == scheduler.num_running
        assert scheduler.num_running + scheduler.num_waiting == len(self.alive)
        assert all(life.sequence.finish_reason is None for life in self.alive.values())

    def _check_pages(self, life: Life) -> None:
        """The sequence's blocks hold exactly its computed tokens."""
        sequence, table = life.sequence, self.scheduler.table
        memory, row, first = self.pages.issued.device, sequence.row, sequence.first_block
        if row >= 0:
            assert first == table.first_block[row]
            assert (table.blocks[row, :first] == NO_BLOCK).all()
            blocks = table.blocks[row, first : table.num_blocks[row]]
            count = min(int(table.computed[row]), int(table.known[row]))
        elif sequence.host_blocks.size:
            blocks, count, memory = sequence.host_blocks, sequence.num_computed, self.pages.issued.host
        else:
            blocks, count = sequence.blocks, sequence.num_computed
            assert blocks.size == self.scheduler.pool.blocks_for(count) - first
        self._check_window(sequence, count, first, blocks.size)
        if count:
            tokens = self._tokens(sequence)
            assert count <= tokens.size
            begin = first * self.scheduler.pool.block_size
            found = memory[blocks].reshape(-1)[: count - begin]
            expected = values_after(first_value(sequence.cache_salt), tokens[:count])[begin:]
            assert (found == expected).all(), "stale pages"

    def _check_window(self, sequence: Sequence, count: int, first: int, num_blocks: int) -> None:
        """Of its first `count` tokens a sequence has all blocks that plans under way and its next token see, no more
        than it may have; and all of them where there is no window.
        """
        window, table, row = self.scheduler.window, self.scheduler.table, sequence.row
        if window is None:
            assert first == 0
            return
        starts = [count]
        if row >= 0:
            key = (row, int(table.epoch[row]))
            starts += [spans[key][0] for spans in self._spans if key in spans]
        passed = count_passed(min(starts), window.size, window.block_size)
        assert first <= passed, "a block was given back that somebody sees"
        assert num_blocks <= window.most_blocks, "a sequence has more blocks than it may have"

    def _check_given_back(self, spans: dict[tuple[int, int], tuple[int, int]]) -> None:
        """What no later token sees was given back by the rows of a plan that has just been committed."""
        window, table = self.scheduler.window, self.scheduler.table
        for (row, epoch), (_, end) in spans.items():
            if window is not None and table.sequences[row] is not None and table.epoch[row] == epoch:
                passed = count_passed(end, window.size, window.block_size)
                assert table.first_block[row] == passed, "a sequence has a block that nobody sees any more"
                self.fired["go on without the first blocks"] += passed > 0

    def _check_states(self, states: StateSlots) -> None:
        """Each slot belongs to those who say so, and holds the state as of the place that they believe it to be of."""
        table, issued, holders = self.scheduler.table, self.pages.issued, []
        host_holders = [pairs for effects in self.pages.under_way for pairs in _host_states_read(effects.plan)]
        for life in self.alive.values():
            sequence, row = life.sequence, life.sequence.row
            values = values_after(first_value(sequence.cache_salt), self._tokens(sequence))
            if row >= 0:
                read, written, checkpoint = (
                    int(column[row]) for column in (states._read, states._written, states._checkpoint)
                )
                assert states.pool.refs(as_slots(written))[0] == 1, "a working state has two owners"
                assert not states.pool.is_kept(as_slots(written))[0], "a kept state is written to"
                holders += [written] + [read] * (read not in (written, NO_STATE))
                computed = int(table.computed[row])
                if 0 < computed <= values.size:
                    assert issued.states[read] == values[computed - 1], "stale state"
                if checkpoint != NO_STATE:
                    holders.append(checkpoint)
                    assert issued.states[checkpoint] == values[states._checkpoint_place[row] - 1], "stale checkpoint"
            elif sequence.host_blocks.size:
                host_holders.append(sequence.host_state)
                assert issued.host_states[sequence.host_state] == values[sequence.num_computed - 1], "stale host state"
            elif sequence.blocks.size:
                holders.append(sequence.state)
                assert issued.states[sequence.state] == values[sequence.num_computed - 1], (
                    "stale state of one who waits"
                )
            else:
                assert sequence.state == sequence.host_state == NO_STATE
        _check_pool(states.pool, [as_slots(*holders)])
        if states.host_pool is not None:
            _check_pool(states.host_pool, [as_slots(*host_holders)])
        everything = np.arange(states.pool.num_blocks, dtype=np.int32)
        kept = np.flatnonzero(states.pool.is_kept(everything))
        blocks = np.flatnonzero(states._slot_at != NO_STATE).astype(np.int32)
        assert sorted(states._slot_at[blocks].tolist()) == kept.tolist()
        assert self.scheduler.pool.is_kept(blocks).all(), "a state is kept with a block that is not"
        for block in blocks.tolist():
            slot = states._slot_at[block]
            for memory in (issued, self.pages.committed):
                assert memory.states[slot] == memory.device[block, -1], "a kept state is not that of its block's end"

    def _check_kept(self) -> None:
        """Blocks that can be matched hold what their key says, in plans that have been committed."""
        cache, pool = self.scheduler._cache, self.scheduler.pool
        kept = np.flatnonzero(pool.is_kept(np.arange(pool.num_blocks, dtype=np.int32))).tolist()
        if isinstance(cache, HashPrefixCache):
            by_digest = blocks_by_digest(cache)
            assert sorted(by_digest.values()) == kept
            expected = {block: self._content_of(digest) for digest, block in by_digest.items()}
        elif isinstance(cache, RadixPrefixCache):
            expected = contents_of_trees(cache, pool.block_size)
            assert sorted(expected) == kept
        elif isinstance(cache, WindowedHashCache):
            by_digest = blocks_of_digests(cache)
            assert sorted(by_digest.values()) == kept
            expected = {block: self._content_of(digest) for digest, block in by_digest.items()}
        elif isinstance(cache, WindowedRadixCache):
            expected = contents_of_block_trees(cache)
            assert sorted(expected) == kept
        else:
            assert not kept
            return
        committed, issued = self.pages.committed.device, self.pages.issued.device
        for block, content in expected.items():
            assert committed[block].tobytes() == content, "a block can be matched whose content is not there"
            assert issued[block].tobytes() == content, "a block that can be matched is being overwritten"

    def _content_of(self, digest: bytes) -> bytes:
        content = self._values_of_digest.get(digest)
        if content is None:
            self._learn_digests()
            content = self._values_of_digest[digest]
        return content

    def _learn_digests(self) -> None:
        """The contents that the digests of all sequences so far stand for."""
        cache, block_size = self.scheduler._cache, self.scheduler.pool.block_size
        for life in self._lives:
            sequence = life.sequence
            if self._num_digested.get(sequence.id) == sequence.tokens.size:
                continue
            self._num_digested[sequence.id] = sequence.tokens.size
            twin = Sequence(-1, sequence.tokens, life.params, MAX_MODEL_LEN, cache_salt=sequence.cache_salt)
            digests = cache._digests(twin, sequence.tokens.size // block_size)
            values = values_after(first_value(sequence.cache_salt), sequence.tokens)
            for i, digest in enumerate(cut_digests(digests)):
                content = values[i * block_size : (i + 1) * block_size].tobytes()
                assert self._values_of_digest.setdefault(digest, content) == content, "one digest, two contents"

    # The rules' own

    def _add(self, prompt: NDArray[np.int64], salt: int, priority: int, group: int, max_tokens: int, eos: bool) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=not eos)
        ids = list(range(self.num_created, self.num_created + group))
        pool = self.scheduler.pool
        needed = self._count_needed(min(prompt.size + max_tokens, MAX_MODEL_LEN))
        fits = 1 <= prompt.size < MAX_MODEL_LEN and needed <= pool.num_blocks
        try:
            sequences = self.scheduler.add_group(
                ids, prompt, [params] * group, priority=priority, cache_salt=SALTS[salt]
            )
        except RefusedError:
            assert not fits
            self.fired["refuse"] += 1
            return
        assert fits
        for sequence in sequences:
            self._welcome(sequence, params)
        self.fired["arrive" if group == 1 else "arrive as a group"] += 1

    def _count_needed(self, longest: int) -> int:
        """Blocks that a sequence of up to `longest` tokens needs, alone, to run to its end."""
        window, needed = self.scheduler.window, self.scheduler.pool.blocks_for(longest - 1)
        return needed if window is None else min(needed, window.least_blocks)

    def _spans_of(self, plan: StepPlan) -> dict[tuple[int, int], tuple[int, int]]:
        epochs = self.scheduler.table.epoch
        spans = zip(plan.rows.tolist(), plan.starts.tolist(), plan.ends.tolist(), strict=True)
        return {(row, int(epochs[row])): (start, end) for row, start, end in spans}

    def _welcome(self, sequence: Sequence, params: SamplingParams) -> Life:
        life = Life(sequence, params, sequence.tokens.size)
        self.alive[sequence.id] = life
        self._lives.append(life)
        self.num_created += 1
        return life

    def _finish(self, sequence: Sequence) -> None:
        life = self.alive.pop(sequence.id)
        assert life.sequence is sequence
        self._check_tokens(life)
        is_stop = sequence.tokens[-1] == EOS and not life.params.ignore_eos
        assert sequence.finish_reason == ("stop" if is_stop else "length")
        assert is_stop or sequence.tokens.size == sequence.max_length
        self.finished.append(sequence.tokens[sequence.tokens != EOS])
        self.fired[f"finish: {sequence.finish_reason}"] += 1

    def _check_tokens(self, life: Life) -> None:
        """Each token of the output is the one that follows in a run of the sequence alone."""
        tokens = life.sequence.tokens
        values = values_after(first_value(life.sequence.cache_salt), tokens).tolist()
        for place in range(life.num_given, tokens.size):
            if place not in life.replaced:
                assert tokens[place] == token_after(values[place - 1])
            assert place == tokens.size - 1 or tokens[place] != EOS or life.params.ignore_eos

    def _one_of(self, choice: int) -> Life:
        """Anybody; of every three choices one is among those who wait with blocks, if there are any: they are few."""
        lives = list(self.alive.values())
        if choice % 3 == 0:
            on_host = [life for life in lives if life.sequence.host_blocks.size]
            lives = on_host or [life for life in lives if life.sequence.blocks.size] or lives
        return lives[choice // 3 % len(lives)]

    def _tokens(self, sequence: Sequence) -> NDArray[np.int64]:
        table, row = self.scheduler.table, sequence.row
        return sequence.tokens if row < 0 else table.tokens[row, : table.known[row]]

    def _is_under_way(self, sequence: Sequence) -> bool:
        epoch = self.scheduler.table.epoch[sequence.row]
        return any(
            (effects.plan.sampled_epochs[effects.plan.sampled_rows == sequence.row] == epoch).any()
            for effects in self.pages.under_way
        )

    def _counts(self) -> Counter[str]:
        counters, stats = self.scheduler.counters, self.scheduler.cache_stats()
        return Counter(
            {
                "preempt": counters.num_preemptions,
                "give up a waiting one's blocks": counters.num_given_up,
                "fork a group": counters.num_forks,
                "prefix hit (blocks)": stats.hit_blocks,
                "evict (blocks)": stats.num_evictions,
            }
        )

    def _count_since(self, before: Counter[str]) -> None:
        now = self._counts()
        for name, value in now.items():
            self.fired[name] += max(0, value - before[name])


def _check_pool(pool: BlockPool, held: list[BlockIds]) -> None:
    """References are those of the holders, and every block is free, cached or referenced: exactly one of them."""
    refs = np.bincount(np.concatenate([*held, np.empty(0, np.int32)]), minlength=pool.num_blocks)
    everything = np.arange(pool.num_blocks, dtype=np.int32)
    assert (pool.refs(everything) == refs).all(), "references are not those of the holders"
    free = np.sort(pool._free[: pool.num_free])
    unused = refs == 0
    assert (free == np.flatnonzero(unused & ~pool.is_kept(everything))).all(), "the free blocks are not those"
    assert pool.num_cached == np.count_nonzero(unused & pool.is_kept(everything))
    assert pool.num_free + pool.num_cached + pool.num_referenced == pool.num_blocks


def as_slots(*slots: int) -> BlockIds:
    return np.array(slots, dtype=np.int32)


def _host_states_read(plan: StepPlan) -> list[int]:
    return [] if plan.states is None else plan.states.swap_ins[0].tolist()


assert POISON not in values_after(first_value(b""), np.arange(VOCAB))
