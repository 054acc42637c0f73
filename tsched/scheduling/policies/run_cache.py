"""What the prefix caches that keep runs of blocks share: all but how tokens lead to runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic

import numpy as np

from tsched.scheduling.block_pool import NO_BLOCKS, BlockIds, BlockPool
from tsched.scheduling.policies.base import CacheStats, Computed
from tsched.scheduling.policies.run_queue import AnyRun, RunQueue
from tsched.scheduling.sequence import Sequence


class Lookups:
    """Lookups and hits. A sequence that is looked up again and again because there is no room for it counts once."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._last: Sequence | None = None
        self._last_size = self._last_hits = 0
        self._num_lookups = 0
        self._lookup_blocks = 0
        self._hit_blocks = 0
        self._lookup_tokens = 0

    def record(self, sequence: Sequence, num_hits: int) -> None:
        """`num_hits` blocks of the sequence's were found."""
        if sequence is self._last and sequence.tokens.size == self._last_size:
            self._hit_blocks -= self._last_hits
        else:
            self._num_lookups += 1
            self._lookup_blocks += -(-sequence.tokens.size // self._block_size)
            self._lookup_tokens += sequence.tokens.size
            self._last, self._last_size = sequence, sequence.tokens.size
        self._last_hits = num_hits
        self._hit_blocks += num_hits

    def stats(self, num_evictions: int) -> CacheStats:
        return CacheStats(
            num_lookups=self._num_lookups,
            lookup_blocks=self._lookup_blocks,
            hit_blocks=self._hit_blocks,
            lookup_tokens=self._lookup_tokens,
            hit_tokens=self._hit_blocks * self._block_size,
            num_evictions=num_evictions,
        )


class RunCache(ABC, Generic[AnyRun]):
    """A prefix cache of runs, which are split where histories part, so that a run's end can be evicted before what
    others go on using. Eviction takes the last blocks of the least recently used leaf.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._run_of: dict[int, AnyRun] = {}  # by the number of the run's first block
        self._first_of = np.zeros(pool.num_blocks, dtype=np.int32)  # each kept block's run, by its first block
        self._unused = RunQueue(pool, self._trim)
        self._lookups = Lookups(pool.block_size)

    @abstractmethod
    def _find(self, sequence: Sequence, start: int, end: int, before: AnyRun | None) -> tuple[BlockIds, AnyRun | None]:
        """[n] the kept blocks of the sequence's places `start` to `start + n`, at most to `end`, where the next one is
        not kept; and the run of the last block before there. `before` is the run of the block before `start`.
        """

    @abstractmethod
    def _has_first_of(self, sequence: Sequence) -> bool:
        """Whether the sequence's first block is kept; it has one."""

    @abstractmethod
    def _is_leaf(self, run: AnyRun) -> bool:
        """Whether no run follows `run`, which has blocks."""

    @abstractmethod
    def _append(self, sequence: Sequence, start: int, blocks: BlockIds, parent: AnyRun | None) -> AnyRun:
        """A new run of `blocks` from the sequence's place `start` on follows all of `parent`."""

    @abstractmethod
    def _extend(self, leaf: AnyRun, sequence: Sequence, blocks: BlockIds) -> None:
        """`leaf` goes on with `blocks`, which are the sequence's after all of the leaf's own."""

    @abstractmethod
    def _split(self, run: AnyRun, count: int) -> AnyRun:
        """Part `run` after its first `count` blocks and return the run of those, new; the old one now follows it, with
        its place in the order of use.
        """

    @abstractmethod
    def _cut(self, leaf: AnyRun, size: int) -> None:
        """`leaf`, which had more, has `size` >= 1 blocks now."""

    @abstractmethod
    def _remove(self, leaf: AnyRun) -> None:
        """Take `leaf`, which still has its blocks, from where a search finds it."""

    @property
    def num_available(self) -> int:
        return self._pool.num_free + self._pool.num_cached

    def match(self, sequence: Sequence, usable: Callable[[BlockIds], int] | None = None) -> BlockIds:
        count = (sequence.tokens.size - 1) // self._pool.block_size  # whoever is admitted runs a token at least
        blocks = NO_BLOCKS
        if count and self._has_first_of(sequence):
            blocks = self._find(sequence, 0, count, None)[0]
            if usable is not None:
                blocks = blocks[: usable(blocks)]
            self._pool.share(blocks)
        self._lookups.record(sequence, blocks.size)
        return blocks

    def allocate(self, count: int) -> BlockIds:
        self._unused.make_room(count)
        return self._pool.allocate(count)

    def insert(self, sequence: Sequence, blocks: BlockIds, num_computed: int) -> BlockIds:
        pool = self._pool
        end = num_computed // pool.block_size
        # The blocks that are kept came out of the cache, and so did all before them.
        start = int(np.count_nonzero(pool.is_kept(blocks[:end])))
        if start == end:
            return blocks
        parent = self._run(blocks[start - 1]) if start else None
        if parent is None or not self._ends_at(parent, start):  # what comes next may be kept already
            known, parent = self._find(sequence, start, end, parent)
            if known.size:
                pool.share(known)
                pool.release(blocks[start : start + known.size])
                blocks = np.concatenate((blocks[:start], known, blocks[start + known.size :]))
                start += known.size
        # A block that a fork has too waits for the last who has it: the others may have other blocks before it.
        new = pool.keep_unshared(blocks[start:end])
        if new.size:
            self._add(sequence, start, new, parent)
        return blocks

    def insert_each(self, computed: list[Computed]) -> list[BlockIds]:
        pool = self._pool
        inserted = [blocks for _, blocks, _ in computed]
        ends = [num_computed // pool.block_size for _, _, num_computed in computed]
        joint = _join([blocks[:end] for blocks, end in zip(inserted, ends, strict=True) if end])
        is_kept = pool.is_kept(joint)
        num_new = joint.size - np.count_nonzero(is_kept)
        if num_new == 0:
            return inserted
        fresh = joint if num_new == joint.size else joint[~is_kept]
        if np.count_nonzero(pool.refs(fresh) == 1) < num_new:
            return [self.insert(*one) for one in computed]
        new, runs, searching, place = [], [], [], 0
        for i, (blocks, end) in enumerate(zip(inserted, ends, strict=True)):
            start = 0
            if fresh is not joint:
                start, place = int(np.count_nonzero(is_kept[place : place + end])), place + end
            if start == end:
                continue
            run = self._add_unknown(computed[i][0], blocks[:end], start)
            if run is None:
                searching.append(i)
            else:
                runs.append(run)
                new.append(blocks[start:end])
        if runs:
            self._note(runs, new)
            pool.keep_unshared(_join(new))
        for i in searching:
            inserted[i] = self.insert(*computed[i])
        return inserted

    def _add_unknown(self, sequence: Sequence, blocks: BlockIds, start: int) -> AnyRun | None:
        """Add the last of the sequence's `blocks`, from `start` on, to a run if it takes no search to see that nothing
        like them is kept: its first block is new, or nothing follows the one before `start`. Returns the run.
        """
        if start == 0:
            return None if self._has_first_of(sequence) else self._append(sequence, 0, blocks, None)
        run = self._run(blocks[start - 1])
        if not self._ends_at(run, start):
            return None
        self._extend(run, sequence, blocks[start:])
        return run

    def release(self, sequence: Sequence, blocks: BlockIds, num_computed: int) -> None:
        self.release_each([(sequence, blocks, num_computed)])

    def release_each(self, left: list[Computed]) -> None:
        # All are inserted first: what one has may be what another releases.
        for cached in self._pool.release_each(self.insert_each(left)):
            if cached.size:
                self._unused.touch(self._run(cached[-1]))

    def stats(self) -> CacheStats:
        return self._lookups.stats(self._unused.num_evictions)

    def _add(self, sequence: Sequence, start: int, blocks: BlockIds, parent: AnyRun | None) -> None:
        """`blocks`, at the sequence's place `start`, follow those of `parent` before that place, where it has any."""
        if parent is not None and self._ends_at(parent, start):
            self._extend(parent, sequence, blocks)
            self._note([parent], [blocks])
            return
        if parent is not None and start < parent.first + parent.blocks.size:
            tail, parent = parent, self._split(parent, start - parent.first)
            self._note([parent, tail], [parent.blocks, tail.blocks])
        self._note([self._append(sequence, start, blocks, parent)], [blocks])

    def _ends_at(self, run: AnyRun, place: int) -> bool:
        """Whether `run` has blocks up to `place`, and nothing that is kept follows them."""
        size = run.blocks.size
        return size > 0 and run.first + size == place and self._is_leaf(run)

    def _run(self, block: np.int32) -> AnyRun:
        """The run of the kept `block`."""
        return self._run_of[int(self._first_of[block])]

    def _note(self, runs: list[AnyRun], blocks: list[BlockIds]) -> None:
        """`runs` [n], each under its first block, have the `blocks` [n] from now on."""
        firsts = [int(run.blocks[0]) for run in runs]
        self._run_of.update(zip(firsts, runs, strict=True))
        index = _join(blocks).astype(np.intp)
        self._first_of[index] = firsts[0] if len(runs) == 1 else np.repeat(firsts, [one.size for one in blocks])

    def _trim(self, leaf: AnyRun, count: int) -> None:
        """Take the last `count` blocks from `leaf`, and the leaf from the cache when none is left."""
        size = leaf.blocks.size - count
        if size:
            self._cut(leaf, size)
            return
        self._remove(leaf)
        del self._run_of[int(leaf.blocks[0])]
        leaf.blocks = NO_BLOCKS


def _join(blocks: list[BlockIds]) -> BlockIds:
    """All `blocks`; one alone is not copied."""
    if len(blocks) == 1:
        return blocks[0]
    return np.concatenate(blocks) if blocks else NO_BLOCKS
