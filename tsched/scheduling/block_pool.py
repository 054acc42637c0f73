"""The blocks of a paged KV cache, by number: which are free, which are kept for later prefixes, which are in use."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tsched.requests.errors import ArgumentError

BlockIds = NDArray[np.int32]

NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int32)
NO_BLOCK = -1
"""In the place of a block's number: there is none."""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, each with a count of references.

    A block is free, or cached (nobody refers to it, but the prefix cache keeps its content), or referenced; at any
    moment num_free + num_cached + num_referenced == num_blocks. Free ones form a stack, so a warm block is lent again
    first. Every call is a few array operations over the blocks that it names, whatever the number of all blocks; they
    are distinct [n] int32. Misuse (a block given back that nobody has, or named twice) raises RuntimeError and changes
    nothing: an error here, and not another request's garbled text later.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ArgumentError(
                f"a block pool needs num_blocks >= 1 and block_size >= 1, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: BlockIds = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # block 0 on top
        self._num_free = num_blocks
        self._num_cached = 0
        self._refs = np.zeros(num_blocks, dtype=np.int32)
        self._kept = np.zeros(num_blocks, dtype=np.bool_)
        self.on_forget: Callable[[BlockIds], None] | None = None  # hears of blocks that are kept no longer
        self._place = np.zeros(num_blocks, dtype=np.int32)  # scratch: where in a call's blocks each one stands
        self._places = np.arange(num_blocks, dtype=np.int32)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Blocks without a reference whose content is kept."""
        return self._num_cached

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self._num_free - self._num_cached

    def blocks_for(self, num_tokens: int) -> int:
        """The blocks that `num_tokens` tokens of one sequence take."""
        return -(-num_tokens // self.block_size)

    def refs(self, blocks: BlockIds) -> NDArray[np.int32]:
        """[n] int32, the references to each of `blocks` [n], which may name a block twice."""
        return self._refs.take(blocks)

    def is_kept(self, blocks: BlockIds) -> NDArray[np.bool_]:
        """[n] bool, which of `blocks` [n] the prefix cache keeps, referenced or not."""
        return self._kept.take(blocks)

    def allocate(self, count: int) -> BlockIds:
        """[count] int32, free blocks with one reference now, the caller's; RuntimeError where fewer are free."""
        if count > self._num_free:
            raise RuntimeError(f"{count} blocks asked for, {self._num_free} of {self.num_blocks} are free")
        if count < 0:
            raise RuntimeError(f"{count} blocks asked for")
        self._num_free -= count
        blocks = self._free[self._num_free : self._num_free + count][::-1].copy()
        self._refs[blocks.astype(np.intp)] = 1
        return blocks

    def share(self, blocks: BlockIds) -> None:
        """One more reference to each of `blocks`, which are cached or referenced."""
        index, refs = self._distinct(blocks, "shared")
        if np.count_nonzero(refs) < refs.size:
            unused = refs == 0
            self._require(self._kept[index[unused]], blocks, "shared", "one is free")
            self._num_cached -= int(np.count_nonzero(unused))
        self._refs[index] = refs + 1

    def release(self, blocks: BlockIds) -> BlockIds:
        """One reference less to each of `blocks`, which are referenced. Returns those that are cached now; the others
        without a reference are free.
        """
        index, refs = self._distinct(blocks, "released")
        if np.count_nonzero(refs == 1) == refs.size:
            return self._release_last(blocks, index)
        self._require(refs, blocks, "released", "nobody refers to one")
        refs -= 1
        self._refs[index] = refs
        is_unused = refs == 0
        num_unused = np.count_nonzero(is_unused)
        if num_unused == 0:
            return NO_BLOCKS
        is_cached = is_unused & self._kept[index]
        num_cached = int(np.count_nonzero(is_cached))
        if num_cached < num_unused:
            self._push(blocks if num_cached == 0 and num_unused == blocks.size else blocks[is_unused & ~is_cached])
        self._num_cached += num_cached
        return blocks[is_cached] if num_cached else NO_BLOCKS

    def _release_last(self, blocks: BlockIds, index: NDArray[np.intp]) -> BlockIds:
        """`release` of `blocks`, at `index`, with one reference each."""
        self._refs[index] = 0
        is_cached = self._kept[index]
        num_cached = int(np.count_nonzero(is_cached))
        self._num_cached += num_cached
        if num_cached == blocks.size:
            return blocks
        self._push(blocks[~is_cached] if num_cached else blocks)
        return blocks[is_cached] if num_cached else NO_BLOCKS

    def release_each(self, lists: list[BlockIds]) -> list[BlockIds]:
        """`release` of each of `lists`, in this order; one call of it where no block of theirs has two references."""
        if len(lists) < 2:
            return [self.release(blocks) for blocks in lists]
        joint = np.concatenate(lists)
        if np.count_nonzero(self._refs.take(joint) != 1):
            return [self.release(blocks) for blocks in lists]
        cached = self.release(joint)
        if cached.size == 0:
            return [NO_BLOCKS] * len(lists)
        if cached.size == joint.size:
            return lists
        before = np.zeros(joint.size + 1, np.int64)  # how many of the blocks before each place are cached
        np.cumsum(self._kept.take(joint), out=before[1:])
        ends = [0, *before[np.cumsum([blocks.size for blocks in lists])].tolist()]
        return [cached[begin:end] for begin, end in pairwise(ends)]

    def keep(self, blocks: BlockIds) -> None:
        """The prefix cache keeps `blocks`, which are referenced and not kept yet, past their last reference."""
        index, refs = self._distinct(blocks, "kept")
        self._require(refs, blocks, "kept", "nobody refers to one")
        if np.count_nonzero(self._kept[index]):
            raise RuntimeError(f"blocks {blocks.tolist()} cannot be kept: one is kept already")
        self._kept[index] = True

    def keep_unshared(self, blocks: BlockIds) -> BlockIds:
        """`keep` of the first of `blocks`, up to one that has several references. Returns those."""
        refs = self._refs.take(blocks)
        is_single = refs == 1
        if np.count_nonzero(is_single) < blocks.size:
            self._require(refs, blocks, "kept", "nobody refers to one")
            blocks = blocks[: is_single.argmin()]
        index = blocks.astype(np.intp)
        if np.count_nonzero(self._kept[index]):
            raise RuntimeError(f"blocks {blocks.tolist()} cannot be kept: one is kept already")
        self._kept[index] = True
        return blocks

    def forget(self, blocks: BlockIds) -> None:
        """The prefix cache keeps `blocks` no longer; those without a reference are free now."""
        index, refs = self._distinct(blocks, "forgotten")
        self._require(self._kept[index], blocks, "forgotten", "one is not kept")
        self._kept[index] = False
        cached = blocks[refs == 0] if np.count_nonzero(refs) else blocks
        self._num_cached -= cached.size
        self._push(cached)
        if self.on_forget is not None:
            self.on_forget(blocks)

    def _push(self, blocks: BlockIds) -> None:
        self._free[self._num_free : self._num_free + blocks.size] = blocks
        self._num_free += blocks.size

    def _distinct(self, blocks: BlockIds, verb: str) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
        """`blocks` [n] as numpy likes indices best, a tenth of the time of int32, and their references [n], a copy;
        RuntimeError where one is no block or is named twice.
        """
        # By way of uint32, so that a negative number is out of range and does not count from the end.
        index = (blocks if blocks.dtype == np.int32 else blocks.astype(np.int32)).view(np.uint32).astype(np.intp)
        try:
            refs = self._refs[index]
        except IndexError:
            raise RuntimeError(
                f"blocks {blocks.tolist()} cannot be {verb}: there are blocks 0 to {self.num_blocks - 1}"
            ) from None
        if blocks.size > 1:  # each block remembers its last place: two places of one block differ. No sort is needed
            places = self._places[: blocks.size]
            if places.size < blocks.size:
                raise RuntimeError(f"{blocks.size} of {self.num_blocks} blocks cannot be {verb}: one is named twice")
            self._place[index] = places
            if self._place[index].tobytes() != places.tobytes():
                raise RuntimeError(f"blocks {blocks.tolist()} cannot be {verb}: one is named twice")
        return index, refs

    def _require(self, fits: NDArray[Any], blocks: BlockIds, verb: str, reason: str) -> None:
        if np.count_nonzero(fits) < fits.size:
            raise RuntimeError(f"blocks {blocks.tolist()} cannot be {verb}: {reason}")
