"""Who holds which blocks and states on the device and on the host, and the copies that a plan needs for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from tsched.scheduling.block_pool import NO_BLOCKS, BlockIds, BlockPool
from tsched.scheduling.policies.base import Computed, PrefixCache
from tsched.scheduling.sequence import NO_STATE, Holding, Sequence
from tsched.scheduling.state_slots import StateSlots
from tsched.scheduling.window import Window


@dataclass(slots=True)
class Copies:
    """The copies of one plan, each list of [2, n] pairs: units that are read, units that are written."""

    swap_outs: list[BlockIds] = field(default_factory=list)
    swap_ins: list[BlockIds] = field(default_factory=list)
    on_device: list[BlockIds] = field(default_factory=list)
    state_swap_outs: list[BlockIds] = field(default_factory=list)
    state_swap_ins: list[BlockIds] = field(default_factory=list)


NO_COPIES = Copies()  # shared by the plans without any


class KVMemory:
    """The device's blocks, which the prefix cache owns, the host's, and the holdings of waiting sequences.

    A waiting sequence may hold device blocks (it was forked) or host blocks (it was swapped out). Device blocks that
    wait are lent at call: `give_up` takes them back, and their holder computes those tokens again. Where layers keep
    states, whoever holds blocks holds a state too, as of the same place. Where layers have windows, whoever holds
    blocks holds those that its next token sees, and no earlier ones than were left of them.

    Copies are collected for the plan being made. They run before that plan's forward and after everything earlier,
    swap-outs, swap-ins and copies in this order, so a block may be given away as soon as its copying out is planned.
    Host blocks that are being read back are free only when the plan that reads them has been committed: the swap-outs
    of that same plan come first.
    """

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        host_pool: BlockPool | None,
        states: StateSlots | None = None,
        window: Window | None = None,
    ) -> None:
        self.pool = pool
        self.cache = cache
        self.host_pool = host_pool
        self.states = states
        self.window = window
        self._holders: dict[int, Sequence] = {}  # waiting sequences with device blocks, by id
        self._copies = NO_COPIES
        self._usable = None if states is None else states.count_usable

    def enter(self, sequence: Sequence, spare: int) -> tuple[BlockIds, int] | None:
        """Give a waiting `sequence` what it needs to run, but for free blocks: the caller allocates these.

        Args:
            sequence: It holds no blocks any more, and of its state what `StateSlots.place` turns into a row's.
            spare: Blocks that must be left available.

        Returns:
            Blocks from `sequence.first_block` on, in which is what is needed of its first num_computed tokens by the
            time that the plan's forward runs; and how many more it needs for all its tokens, or as many as a window
            lets it have. None, and nothing changes, where there is no room.
        """
        if sequence.host_blocks.size:
            return self._restore(sequence, spare)
        cache, states = self.cache, self.states
        held, num_computed = sequence.blocks, sequence.num_computed
        is_new = held.size == 0
        if is_new:
            held = self._match(sequence)
            num_computed = (sequence.first_block + held.size) * self.pool.block_size
        copies = num_computed % self.pool.block_size != 0 and self._is_read_by_others(held[-1:])
        missing = self._count_wanted(sequence) - held.size + copies
        has_room = missing + spare <= cache.num_available
        if not has_room or (states is not None and not states.has_room_for(sequence.state)):
            if held.size and is_new:
                cache.release(sequence, held, 0)
                self._release_state(sequence)
                sequence.first_block = 0
            return None
        if copies:  # it is about to write to a block that others read
            own, missing = cache.allocate(1), missing - 1
            self._plan_copies().on_device.append(np.stack((held[-1:], own)))
            cache.release(sequence, held[-1:], 0)
            held = np.concatenate((held[:-1], own))
        sequence.num_computed = num_computed
        if not is_new:
            self._holders.pop(sequence.id, None)
            sequence.blocks = NO_BLOCKS
        return held, missing

    def _count_wanted(self, sequence: Sequence) -> int:
        """The blocks of all tokens of `sequence` from its first block on, as many as a window lets it have."""
        count = self.pool.blocks_for(sequence.tokens.size)
        return count if self.window is None else min(count - sequence.first_block, self.window.most_blocks)

    def _match(self, sequence: Sequence) -> BlockIds:
        """The blocks of the longest prefix that every group of layers can go on from, of which `sequence.first_block`
        is the first; the sequence holds the state as of its end.
        """
        if sequence.params.prompt_logprobs is not None and sequence.tokens.size == sequence.prompt_len:
            return NO_BLOCKS  # what is not computed has no logits
        held = self.cache.match(sequence, self._usable)
        if held.size and self.states is not None:
            sequence.state = self.states.share_at(held[-1])
        return held

    def _restore(self, sequence: Sequence, spare: int) -> tuple[BlockIds, int] | None:
        """`enter` of a sequence that was swapped out."""
        count, cache, states = self._count_wanted(sequence), self.cache, self.states
        if count + spare > cache.num_available or (states is not None and states.num_available == 0):
            return None
        host = sequence.host_blocks
        blocks = cache.allocate(host.size)
        self._plan_copies().swap_ins.append(np.stack((host, blocks)))
        if states is not None:
            sequence.state = states.allocate()
            pair = np.array([[sequence.host_state], [sequence.state]], dtype=np.int32)
            self._plan_copies().state_swap_ins.append(pair)
        sequence.host_blocks, sequence.host_state = NO_BLOCKS, NO_STATE
        return blocks, count - host.size

    def _is_read_by_others(self, block: BlockIds) -> bool:
        """Whether another sequence, or the prefix cache for a later one, needs the content of `block` [1]."""
        return bool(self.pool.refs(block)[0] > 1 or self.pool.is_kept(block)[0])

    def copy_on_write(self, sequence: Sequence, block: BlockIds) -> BlockIds:
        """[1] the block that `sequence`, which runs, may write in place of the shared `block` [1]."""
        own = self.cache.allocate(1)
        self._plan_copies().on_device.append(np.stack((block, own)))
        self.cache.release(sequence, block, 0)
        return own

    def find_holding(self, row: int, first: int, blocks: BlockIds, most: int) -> Holding:
        """What is there of the first tokens of a running row with these `blocks` from the place `first` on, `most` of
        the tokens at most.
        """
        if self.states is None:
            return Holding(blocks, most, first_block=first)
        return Holding(blocks, *self.states.find_latest(row, most))

    def share_row(self, child: Sequence, row: int, first: int, blocks: BlockIds, most: int) -> None:
        """The waiting `child` holds what is there of the first tokens of a running row with these `blocks` from the
        place `first` on, `most` of the tokens at most.
        """
        if self.states is None:
            self._lend(child, Holding(blocks, most, first_block=first))
        else:
            self._lend(child, Holding(blocks, *self.states.fork(row, most)))

    def share_waiting(self, child: Sequence, parent: Sequence, most: int) -> None:
        """The waiting `child` holds what the waiting `parent` does, `most` tokens of it at most."""
        num_computed = min(parent.num_computed, most)
        if self.states is not None and num_computed < parent.num_computed:
            return  # there is no state as of an earlier place
        if parent.host_blocks.size:
            self._lend_host(child, parent, num_computed)
            return
        if self.states is not None and parent.state != NO_STATE:
            self.states.share(parent.state)
        self._lend(child, Holding(parent.blocks, num_computed, parent.state, parent.first_block))

    def _lend(self, child: Sequence, held: Holding) -> None:
        """The waiting `child` holds what it needs of `held`, to whose state it has a reference already."""
        held = self._cut_to_needed(held)
        if held.blocks.size:
            self.pool.share(held.blocks)
            self._holders[child.id] = child
            child.blocks, child.num_computed, child.state = held.blocks, held.num_computed, held.state
            child.first_block = held.first_block

    def _lend_host(self, child: Sequence, parent: Sequence, num_computed: int) -> None:
        held = self._cut_to_needed(Holding(parent.host_blocks, num_computed, first_block=parent.first_block))
        if held.blocks.size and self.host_pool is not None:
            self.host_pool.share(held.blocks)
            child.host_blocks, child.num_computed, child.first_block = held.blocks, num_computed, held.first_block
            if self.states is not None:
                self.states.share_on_host(parent.host_state)
                child.host_state = parent.host_state

    def _cut_to_needed(self, held: Holding) -> Holding:
        """Of `held` the blocks, a copy, that a sequence needs to go on from num_computed; none where one is gone."""
        first = held.first_block
        if self.window is not None:
            first = int(self.window.count_passed(held.num_computed))
            if first < held.first_block:
                return Holding(NO_BLOCKS, 0)
        end = self.pool.blocks_for(held.num_computed)
        blocks = held.blocks[first - held.first_block : end - held.first_block].copy()
        return replace(held, blocks=blocks, first_block=first)

    def swap_out(self, sequence: Sequence, held: Holding) -> bool:
        """Copy what `sequence` `held` to the host, where it holds it from now on. False, and nothing changes, where the
        host has no room. The caller releases it in any case.
        """
        held = self._cut_to_needed(held)
        pool, states, blocks = self.host_pool, self.states, held.blocks
        count = blocks.size
        if pool is None or count == 0 or count > pool.num_free:
            return False
        if states is not None:
            host_state = states.allocate_on_host()
            if host_state == NO_STATE:
                return False
            sequence.host_state = host_state
            pair = np.array([[held.state], [host_state]], dtype=np.int32)
            self._plan_copies().state_swap_outs.append(pair)
        sequence.host_blocks, sequence.num_computed = pool.allocate(count), held.num_computed
        self._plan_copies().swap_outs.append(np.stack((blocks[:count], sequence.host_blocks)))
        return True

    def insert_each(self, rows: list[int], computed: list[Computed]) -> list[BlockIds]:
        """`PrefixCache.insert_each` for those in `rows` [n], whose checkpoints are kept with their blocks."""
        inserted = self.cache.insert_each(computed)
        if self.states is not None:
            for row, blocks in zip(rows, inserted, strict=True):
                self.states.attach(row, blocks)
        return inserted

    def release(self, row: int, sequence: Sequence, blocks: BlockIds, num_computed: int) -> None:
        """What `sequence` had in `row`, which it has left, is kept for later prefixes as far as its first
        `num_computed` tokens go, and free.
        """
        self.release_each([row], [(sequence, blocks, num_computed)])

    def release_each(self, rows: list[int], left: list[Computed]) -> None:
        """`release` of those who have `left` their `rows` [n]."""
        if self.states is None:
            self.cache.release_each(left)
            if self.window is not None:
                for sequence, _, _ in left:  # what was swapped out begins with what is needed
                    is_kept = sequence.host_blocks.size > 0
                    sequence.first_block = int(self.window.count_passed(sequence.num_computed)) if is_kept else 0
            return
        for row, one in zip(rows, left, strict=True):
            blocks = self.insert_each([row], [one])[0]
            self.states.leave(row)
            self.cache.release(one[0], blocks, 0)

    def give_up(self, *, but: Sequence | None = None) -> Sequence | None:
        """Take back what the last in the order of the waiting sequences holds on the device; returns that sequence,
        None where nobody but `but` holds any.
        """
        others = [sequence for sequence in self._holders.values() if sequence is not but]
        if not others:
            return None
        last = max(others, key=lambda sequence: sequence.rank)
        self.drop(last)
        self.cache.prepare(last)  # it will look for its tokens like a newcomer
        return last

    def drop_from_host(self, sequences: Iterable[Sequence], blocks: BlockIds) -> int:
        """Drops what those of `sequences` hold that hold any of the host's `blocks` [n], which were never written.
        Returns how many did.
        """
        holding = [one for one in sequences if one.host_blocks.size and np.isin(one.host_blocks, blocks).any()]
        for one in holding:
            self.drop(one)
            self.cache.prepare(one)  # it will look for its tokens like a newcomer
        return len(holding)

    def drop(self, sequence: Sequence) -> None:
        """The waiting `sequence` holds nothing any more."""
        if sequence.blocks.size:
            del self._holders[sequence.id]
            self.cache.release(sequence, sequence.blocks, 0)
            self._release_state(sequence)
        elif sequence.host_blocks.size and self.host_pool is not None:
            self.host_pool.release(sequence.host_blocks)
            if self.states is not None:
                self.states.release_on_host(sequence.host_state)
        sequence.blocks = sequence.host_blocks = NO_BLOCKS
        sequence.host_state = NO_STATE
        sequence.num_computed = sequence.first_block = 0

    def _release_state(self, sequence: Sequence) -> None:
        if self.states is not None and sequence.state != NO_STATE:
            self.states.release(sequence.state)
            sequence.state = NO_STATE

    def _plan_copies(self) -> Copies:
        """The copies of the plan being made."""
        if self._copies is NO_COPIES:
            self._copies = Copies()
        return self._copies

    def take_copies(self) -> Copies:
        """The copies of the plan that has just been made; those of the next one begin."""
        copies, self._copies = self._copies, NO_COPIES
        return copies

    def free_restored(self, copies: Copies) -> None:
        """The plan with these copies has been committed, or is lost: the host units that it read back are free."""
        if self.host_pool is not None:
            for pairs in copies.swap_ins:
                self.host_pool.release(pairs[0])
        if self.states is not None:
            for pairs in copies.state_swap_ins:
                self.states.release_on_host(int(pairs[0, 0]))
