"""Who holds which blocks on the device and on the host, and the page copies that a plan needs for it."""

from __future__ import annotations

import numpy as np

from tsched.scheduling.block_pool import NO_BLOCKS, BlockIds, BlockPool
from tsched.scheduling.policies.base import PrefixCache
from tsched.scheduling.sequence import Sequence
from tsched.scheduling.step_plan import NO_PAIRS


class KVMemory:
    """The device's blocks, which the prefix cache owns, the host's, and the holdings of waiting sequences.

    A waiting sequence may hold device blocks (it was forked) or host blocks (it was swapped out). Device blocks that
    wait are lent at call: `give_up` takes them back, and their holder computes those tokens again.

    Copies are collected for the plan being made. They run before that plan's forward and after everything earlier,
    swap-outs, swap-ins and copies in this order, so a block may be given away as soon as its copying out is planned.
    Host blocks that are being read back are free only when the plan that reads them has been committed: the swap-outs
    of that same plan come first.
    """

    def __init__(self, pool: BlockPool, cache: PrefixCache, host_pool: BlockPool | None) -> None:
        self.pool = pool
        self.cache = cache
        self.host_pool = host_pool
        self._holders: dict[int, Sequence] = {}  # waiting sequences with device blocks, by id
        self._swap_outs: list[BlockIds] = []
        self._swap_ins: list[BlockIds] = []
        self._copies: list[BlockIds] = []
        self._restored: list[BlockIds] = []  # host blocks that the plan being made reads back

    def enter(self, sequence: Sequence, spare: int) -> BlockIds | None:
        """[blocks_for(its tokens)] for a waiting `sequence`, the first num_computed tokens of which are in them by
        the time that the plan's forward runs; it holds nothing any more. None, and nothing changes, where that would
        not leave `spare` blocks available.
        """
        size, cache = self.pool.blocks_for(sequence.tokens.size), self.cache
        if sequence.host_blocks.size:
            if size + spare > cache.num_available:
                return None
            blocks, host = cache.allocate(size), sequence.host_blocks
            self._swap_ins.append(np.stack((host, blocks[: host.size])))
            self._restored.append(host)
            sequence.host_blocks = NO_BLOCKS
            return blocks
        is_new = sequence.blocks.size == 0
        held = cache.match(sequence) if is_new else sequence.blocks
        num_computed = held.size * self.pool.block_size if is_new else sequence.num_computed
        copies = num_computed % self.pool.block_size != 0 and self._is_read_by_others(held[-1:])
        missing = size - held.size + copies
        if missing + spare > cache.num_available:
            if held.size and is_new:
                cache.release(sequence, held, 0)
            return None
        added = cache.allocate(missing)
        if copies:  # it is about to write to a block that others read
            self._copies.append(np.stack((held[-1:], added[:1])))
            cache.release(sequence, held[-1:], 0)
            held = held[:-1]
        self._holders.pop(sequence.id, None)
        sequence.blocks, sequence.num_computed = NO_BLOCKS, num_computed
        return np.concatenate((held, added))

    def _is_read_by_others(self, block: BlockIds) -> bool:
        """Whether another sequence, or the prefix cache for a later one, needs the content of `block` [1]."""
        return bool(self.pool.refs(block)[0] > 1 or self.pool.is_kept(block)[0])

    def copy_on_write(self, sequence: Sequence, block: BlockIds) -> BlockIds:
        """[1] the block that `sequence`, which runs, may write in place of the shared `block` [1]."""
        own = self.cache.allocate(1)
        self._copies.append(np.stack((block, own)))
        self.cache.release(sequence, block, 0)
        return own

    def share(self, child: Sequence, blocks: BlockIds, num_computed: int) -> None:
        """The waiting `child` holds the device's `blocks` too, which have its first `num_computed` tokens."""
        held = blocks[: self.pool.blocks_for(num_computed)].copy()
        if held.size:
            self.pool.share(held)
            self._holders[child.id] = child
            child.blocks, child.num_computed = held, num_computed

    def share_host(self, child: Sequence, blocks: BlockIds, num_computed: int) -> None:
        """The same of the host's `blocks`."""
        held = blocks[: self.pool.blocks_for(num_computed)].copy()
        if held.size and self.host_pool is not None:
            self.host_pool.share(held)
            child.host_blocks, child.num_computed = held, num_computed

    def swap_out(self, sequence: Sequence, blocks: BlockIds, num_computed: int) -> bool:
        """Copy the first `num_computed` tokens of `sequence`, in `blocks`, to the host, where it holds them from now
        on. False, and nothing changes, where the host has no room. The caller releases `blocks` in any case.
        """
        pool, count = self.host_pool, self.pool.blocks_for(num_computed)
        if pool is None or count == 0 or count > pool.num_free:
            return False
        sequence.host_blocks, sequence.num_computed = pool.allocate(count), num_computed
        self._swap_outs.append(np.stack((blocks[:count], sequence.host_blocks)))
        return True

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

    def drop(self, sequence: Sequence) -> None:
        """The waiting `sequence` holds nothing any more."""
        if sequence.blocks.size:
            del self._holders[sequence.id]
            self.cache.release(sequence, sequence.blocks, 0)
        elif sequence.host_blocks.size and self.host_pool is not None:
            self.host_pool.release(sequence.host_blocks)
        sequence.blocks = sequence.host_blocks = NO_BLOCKS
        sequence.num_computed = 0

    def take_copies(self) -> tuple[BlockIds, BlockIds, BlockIds, list[BlockIds]]:
        """The plan's swap_outs, swap_ins and copies, each [2, n], and the host blocks to free at its commit."""
        if not (self._swap_outs or self._swap_ins or self._copies):
            return NO_PAIRS, NO_PAIRS, NO_PAIRS, []
        taken = tuple(
            np.concatenate(pairs, axis=1) if pairs else NO_PAIRS
            for pairs in (self._swap_outs, self._swap_ins, self._copies)
        )
        restored = self._restored
        self._swap_outs, self._swap_ins, self._copies, self._restored = [], [], [], []
        return taken[0], taken[1], taken[2], restored

    def free_restored(self, restored: list[BlockIds]) -> None:
        """The plan that read these host blocks back has been committed, or is lost."""
        if self.host_pool is not None:
            for blocks in restored:
                self.host_pool.release(blocks)
