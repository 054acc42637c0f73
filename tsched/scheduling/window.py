"""Which blocks a sequence still needs where every layer has a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tsched.requests.errors import ArgumentError
from tsched.scheduling.block_pool import BlockPool
from tsched.scheduling.sequence import Ints, SequenceTable


@dataclass(frozen=True, slots=True)
class Window:
    """No layer's query sees more than the last `size` keys, itself included.

    So a block wholly before the window of a sequence's next token is read by no later plan. It goes back to the pool
    once the plan that last read it has been committed.

    size          in tokens
    block_size    tokens of a block
    most_blocks   that a sequence holds at once: its chunks of a prompt end where these do
    least_blocks  with which a sequence of any length runs to its end: those that a plan under way and the next one see
                  of a sequence that decodes
    """

    size: int
    block_size: int
    most_blocks: int
    least_blocks: int

    @classmethod
    def of(cls, size: int, pool: BlockPool, *, chunk: int, chunked: bool) -> Window:
        """The window of `size` tokens over `pool`, of whose prompts a step computes `chunk` tokens at most; unless they
        are `chunked`, a step computes them whole.
        """
        if size < 1:
            raise ArgumentError(f"window must be None or at least 1, got {size}")
        most = pool.blocks_for(size + chunk) + 1
        return cls(
            size,
            pool.block_size,
            most_blocks=min(most, pool.num_blocks),
            least_blocks=pool.blocks_for(size) + 1 if chunked else most,
        )

    def count_passed(self, places: Ints | int) -> Any:
        """How many of a sequence's first blocks no token at `places` or after them sees."""
        return np.maximum((places - self.size + 1) // self.block_size, 0)

    def cut(self, table: SequenceTable, rows: Ints, computed: Ints, wanted: Ints) -> Ints:
        """`wanted` [n] tokens of `rows` from places `computed` [n] on, at most as many as most_blocks have room for."""
        ends = (table.first_block[rows] + self.most_blocks) * self.block_size
        return np.minimum(wanted, ends - computed)

    def count_spared(self, table: SequenceTable, rows: Ints) -> int:
        """Blocks that newcomers leave to `rows` [n]: those that each lacks for its known tokens, else one where it may
        soon have more than now.
        """
        first, have = table.first_block[rows], table.num_blocks[rows]
        known = -(-table.length[rows] // self.block_size)
        lacking = np.minimum(known, first + self.most_blocks) - have
        may_grow = table.can_grow(rows) & (have - first < self.least_blocks)
        return int(np.where(lacking > 0, lacking, may_grow).sum())
