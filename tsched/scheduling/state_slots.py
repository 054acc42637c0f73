"""The states of sequences, by slot number: working ones, which each step changes, and kept ones, which none does.

Layers that keep a state for each sequence, and not something for each token, can go on from a prefix only where the
state as of exactly its end is still there. So a step names two slots for each row: the one it reads and the one it
writes. Mostly they are the same. Where the state as of the step's start is to stay, for later prefixes or for a fork,
the step writes to another slot, and no state is ever copied on the device.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from tsched.requests.errors import ArgumentError
from tsched.scheduling.block_pool import BlockIds, BlockPool
from tsched.scheduling.sequence import NO_STATE, Ints, Sequence, SequenceTable


class StateSlots:
    """`num_slots` slots, each with one sequence's state in all layers that keep one.

    A running row owns the slot that it writes. It may hold a checkpoint too: the state as of an earlier place, which
    nobody writes any more. Places where one is taken are aligned with blocks, every `interval` blocks and at the last
    whole block of a prompt, and one token before the end of a prompt that siblings wait for. Once the tokens before an
    aligned checkpoint are committed and their blocks are in the prefix cache, it is kept with the last of these blocks:
    a hit may end there. Kept states that nobody reads are evicted in the order of their last use, and go with their
    block; checkpoints of running rows go when a newcomer needs a slot.

    A slot that a plan reads is not lent again before the next plan is made.
    """

    def __init__(
        self, num_slots: int, num_host_slots: int, interval: int, table: SequenceTable, blocks: BlockPool
    ) -> None:
        if num_slots < 2:
            raise ArgumentError(f"num_states must be at least 2, a step reads one and writes another; got {num_slots}")
        if interval < 1:
            raise ArgumentError(f"state_interval must be at least 1, got {interval}")
        self.pool = BlockPool(num_slots, 1)
        self.host_pool = BlockPool(num_host_slots, 1) if num_host_slots else None
        self._table = table
        self._blocks = blocks
        self._span = interval * blocks.block_size
        num_rows = table.num_rows

        # By row. The state that the next plan of the row reads is as of the place `table.computed`.
        self._read = np.full(num_rows, NO_STATE, dtype=np.int32)
        self._written = np.full(num_rows, NO_STATE, dtype=np.int32)
        self._checkpoint = np.full(num_rows, NO_STATE, dtype=np.int32)
        self._checkpoint_place: Ints = np.zeros(num_rows, dtype=np.int64)
        self._last_block: Ints = np.zeros(num_rows, dtype=np.int64)  # the place where a prompt's last block begins
        self._branch: Ints = np.zeros(num_rows, dtype=np.int64)  # where siblings go on from, 0 where none wait

        self._slot_at = np.full(blocks.num_blocks, NO_STATE, dtype=np.int32)  # by block: the kept state as of its end
        self._block_of = np.zeros(num_slots, dtype=np.int32)  # by kept slot
        self._unused: OrderedDict[int, None] = OrderedDict()  # kept slots, the least recently used first
        blocks.on_forget = self._forget_blocks

    @property
    def num_available(self) -> int:
        """Slots that newcomers can get: free ones, kept ones that nobody reads, checkpoints of running rows."""
        return self.pool.num_free + self.pool.num_cached + self._droppable().size

    # For newcomers

    def count_usable(self, blocks: BlockIds) -> int:
        """How many of `blocks` [n], which follow each other from the first, end where a state is kept."""
        ends = np.flatnonzero(self._slot_at[blocks] != NO_STATE)
        return int(ends[-1]) + 1 if ends.size else 0

    def share_at(self, block: np.int32) -> int:
        """The state kept as of the end of `block`, with one more reference, the caller's."""
        slot = int(self._slot_at[block])
        self.pool.share(_as_slots(slot))
        return slot

    def has_room_for(self, state: int) -> bool:
        """Whether a sequence that goes on from `state` finds a slot to write to."""
        return self._is_own(state) or self.num_available > 0

    def allocate(self) -> int:
        """A slot with one reference, the caller's, for a newcomer."""
        if self.pool.num_free + self.pool.num_cached == 0:
            droppable = self._droppable()
            if droppable.size == 0:
                raise RuntimeError(f"a slot asked for, and all {self.pool.num_blocks} are in use")
            self._drop_checkpoint(int(droppable[0]))
        return self._take()

    def place(self, row: int, sequence: Sequence) -> None:
        """`sequence` has got `row`, which goes on from the state that it held."""
        state, sequence.state = sequence.state, NO_STATE
        self._read[row] = state
        self._written[row] = state if self._is_own(state) else self.allocate()
        self._last_block[row] = (sequence.prompt_len - 1) // self._blocks.block_size * self._blocks.block_size
        self._branch[row] = max(sequence.branch_place, 0)

    # For running rows

    def cut_at_checkpoints(self, rows: Ints | int, places: Ints | int, counts: Ints | int) -> Ints:
        """`counts` [n] tokens from `places` [n] on, at most up to the next place where a checkpoint is taken."""
        ends = (np.asarray(places) // self._span + 1) * self._span
        for other in (self._last_block[rows], self._branch[rows]):
            ends = np.where(other > places, np.minimum(ends, other), ends)
        return np.minimum(counts, ends - places)

    def advance(self, rows: Ints, starts: Ints) -> BlockIds:
        """[2, n] the slots that a plan's `rows` [n], from places `starts` [n] on, read and write; NO_STATE is read at
        place 0, before which there is none.
        """
        is_checkpoint = (starts % self._span == 0) | (starts == self._last_block[rows]) | (starts == self._branch[rows])
        for row, place in zip(rows[is_checkpoint].tolist(), starts[is_checkpoint].tolist(), strict=True):
            if place:
                self._take_checkpoint(row, place)
        read, written = self._read[rows], self._written[rows]
        for row in rows[(read != written) & (read != NO_STATE)].tolist():
            if self._checkpoint[row] != self._read[row]:
                self.release(int(self._read[row]))
        self._read[rows] = written
        return np.stack((read, written))

    def find_latest(self, row: int, most: int) -> tuple[int, int]:
        """(place, slot) of the row's last state as of a place of `most` at most; (0, NO_STATE) where there is none.

        It stays the row's: the caller takes no reference.
        """
        computed = int(self._table.computed[row])
        if computed <= most:
            return computed, int(self._read[row])
        if self._checkpoint[row] != NO_STATE and self._checkpoint_place[row] <= most:
            return int(self._checkpoint_place[row]), int(self._checkpoint[row])
        return 0, NO_STATE

    def fork(self, row: int, most: int) -> tuple[int, int]:
        """What `find_latest` says, with a reference for a child; the row writes to another slot from now on."""
        place, slot = self.find_latest(row, most)
        if slot == self._written[row] and slot != NO_STATE:
            if self.pool.num_free + self.pool.num_cached == 0:
                place, slot = self.find_latest(row, min(most, place - 1))
            else:
                self._written[row] = self._take()
        if slot != NO_STATE:
            self.share(slot)
        return place, slot

    def attach(self, row: int, blocks: BlockIds) -> None:
        """Keep the checkpoint of a row with `blocks` [n] with the block that ends there, where that is in the prefix
        cache, so that what it holds has been committed, and has none yet.
        """
        slot, place = int(self._checkpoint[row]), int(self._checkpoint_place[row])
        size = self._blocks.block_size
        if slot == NO_STATE or place % size:
            return
        block = blocks[place // size - 1]
        is_new = self._slot_at[block] == NO_STATE and not self.pool.is_kept(_as_slots(slot))[0]
        if is_new and self._blocks.is_kept(_as_slots(int(block)))[0]:
            self.pool.keep(_as_slots(slot))
            self._slot_at[block], self._block_of[slot] = slot, block

    def leave(self, row: int) -> None:
        """The sequence in `row` is gone: its slots are given back."""
        read, written = int(self._read[row]), int(self._written[row])
        if self._checkpoint[row] != NO_STATE:
            self._drop_checkpoint(row)
        if read not in (written, NO_STATE):
            self.release(read)
        self.release(written)
        self._read[row] = self._written[row] = NO_STATE

    def share(self, slot: int) -> None:
        """One more reference to `slot`, which has one."""
        self.pool.share(_as_slots(slot))

    def release(self, slot: int) -> None:
        """One reference less to `slot`."""
        if self.pool.release(_as_slots(slot)).size:
            self._unused[slot] = None
            self._unused.move_to_end(slot)

    def allocate_on_host(self) -> int:
        """A slot of the host with one reference, the caller's; NO_STATE where none is free."""
        if self.host_pool is None or self.host_pool.num_free == 0:
            return NO_STATE
        return int(self.host_pool.allocate(1)[0])

    def share_on_host(self, slot: int) -> None:
        """One more reference to the host's `slot`."""
        if self.host_pool is not None:
            self.host_pool.share(_as_slots(slot))

    def release_on_host(self, slot: int) -> None:
        """One reference less to the host's `slot`."""
        if self.host_pool is not None:
            self.host_pool.release(_as_slots(slot))

    def _take_checkpoint(self, row: int, place: int) -> None:
        """What `row` reads next, the state as of `place`, stays where it is, if there is a slot to write to."""
        if self._checkpoint[row] != NO_STATE:
            self._drop_checkpoint(row)
        if self._read[row] == self._written[row]:
            if self.pool.num_free + self.pool.num_cached == 0:
                return
            self._written[row] = self._take()
        self._checkpoint[row], self._checkpoint_place[row] = self._read[row], place

    def _drop_checkpoint(self, row: int) -> None:
        slot, self._checkpoint[row] = int(self._checkpoint[row]), NO_STATE
        self.release(slot)

    def _droppable(self) -> Ints:
        """The rows whose checkpoint nobody else refers to."""
        rows = np.flatnonzero(self._checkpoint != NO_STATE)
        return rows[self.pool.refs(self._checkpoint[rows]) == 1]

    def _is_own(self, state: int) -> bool:
        """Whether the holder of `state` may write to it: nobody else refers to it, and no later prefix may."""
        slot = _as_slots(state)
        return state != NO_STATE and bool(self.pool.refs(slot)[0] == 1 and not self.pool.is_kept(slot)[0])

    def _take(self) -> int:
        """A slot that is free, or kept and not read by anybody."""
        while self.pool.num_free == 0:
            slot, _ = self._unused.popitem(last=False)
            if self.pool.refs(_as_slots(slot))[0] == 0:
                self._forget(slot)
        return int(self.pool.allocate(1)[0])

    def _forget(self, slot: int) -> None:
        self.pool.forget(_as_slots(slot))
        self._slot_at[self._block_of[slot]] = NO_STATE
        self._unused.pop(slot, None)

    def _forget_blocks(self, blocks: BlockIds) -> None:
        """The prefix cache has evicted `blocks`: the states as of their ends go with them."""
        slots = self._slot_at[blocks]
        for slot in slots[slots != NO_STATE].tolist():
            self._forget(slot)


def _as_slots(slot: int) -> BlockIds:
    return np.array([slot], dtype=np.int32)
