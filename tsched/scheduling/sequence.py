"""A request's tokens, and the table in which the running ones live side by side."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.block_pool import NO_BLOCK, NO_BLOCKS, BlockIds

Ints = NDArray[np.int64]

NO_STATE = -1
"""In the place of a state's slot: there is none."""


class Sequence:
    """One request as the scheduler knows it.

    `tokens` holds prompt and output; while the sequence runs, the newest tokens are in its row of the table, and
    `Scheduler.output_of` reads them from there. `max_length` bounds prompt and output together.
    """

    # What changes while it lives is here, in the class, until it does: so it costs a newcomer nothing.
    arrival: int = 0  # its request's place in the order of arrival; forks have their parent's
    serial: int = 0  # tells sequences of one arrival apart
    key: int = 0  # its place in the scheduler's order: lower goes first
    row: int = -1  # its row of the table, -1 when it is not running
    finish_reason: str | None = None  # "stop", "length" or "abort"
    ended_by_token: bool = False  # "stop", by its last token
    stop_id: int | None = None  # which one of its stop_ids that was; None for the model's end-of-sequence
    num_preemptions: int = 0
    num_cached: int | None = None  # tokens that it had in the cache when it first came to run
    # Where layers have windows: the place of the first block that it has. Its lists of blocks begin there.
    first_block: int = 0
    # While it waits: the blocks that it holds, on the device or on the host, and how many of its tokens are in them.
    blocks: BlockIds = NO_BLOCKS
    host_blocks: BlockIds = NO_BLOCKS
    num_computed: int = 0
    # And, where layers keep states, the slots of its state as of num_computed, on the device or on the host.
    state: int = NO_STATE
    host_state: int = NO_STATE
    branch_place: int = NO_STATE  # siblings go on from the first so many tokens, while they follow it
    num_frozen: int = 0  # tokens that `freeze_tokens` has given out
    prefix: object = None  # what the prefix cache has prepared of its tokens; nobody else's business

    def __init__(
        self,
        id: int,
        tokens: Items[int] | NDArray[Any],
        params: SamplingParams,
        max_length: int,
        *,
        prompt_len: int | None = None,
        priority: int = 0,
        cache_salt: bytes = b"",
    ) -> None:
        """A new sequence of `tokens` [n] that ends at `max_length` tokens at the latest; all of them are its prompt,
        or the first `prompt_len`. Only sequences with the same `cache_salt` share cached prefixes.
        """
        count = len(tokens)
        self._room: Ints = np.empty(max(max_length, count), np.int64)  # what is never written costs nothing
        self.id = id
        self.params = params
        self.tokens = self._room[:count]  # [prompt + output], as of the last time that the sequence left its row
        self.tokens[:] = tokens
        self.prompt_len = count if prompt_len is None else prompt_len
        self.max_length = max_length
        self.stop_ids = frozenset(params.stop_ids)
        self.priority = priority
        self.cache_salt = cache_salt

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Among the waiting, lower goes first: swapped ones, then by key, which forks share with their parent."""
        return self.host_blocks.size == 0, self.key, self.serial

    def update_tokens(self, tokens: Ints, count: int) -> None:
        """The first `count` of `tokens` are its tokens now, the first of which it has: the others alone are copied."""
        have, room = self.tokens.size, self._room
        if self.tokens.base is not room:  # somebody has given it others
            self.tokens = tokens[:count].copy()
            return
        room[have:count] = tokens[have:count]
        self.tokens = room[:count]

    def freeze_tokens(self, tokens: Ints) -> Ints:
        """`tokens` [n], the first n known of it, read-only and in its own memory, where nobody else's come to lie: for
        those who may keep them. Of many calls each copies only what is new.
        """
        have = self.num_frozen
        if tokens.size > have:
            self._room[have : tokens.size] = tokens[have:]
            self.num_frozen = tokens.size
        own = self._room[: tokens.size]
        own.flags.writeable = False
        return own

    @property
    def output_token_ids(self) -> list[int]:
        """The output's token ids; complete once the sequence has finished."""
        ids: list[int] = self.tokens[self.prompt_len :].tolist()
        return ids


@dataclass(frozen=True, slots=True)
class Holding:
    """What the first `num_computed` tokens of a sequence left in the caches: `blocks` from the place `first_block` on,
    which others may follow, and where layers keep states, the slot of the state as of that place.
    """

    blocks: BlockIds
    num_computed: int
    state: int = NO_STATE
    first_block: int = 0


class SequenceTable:
    """The running sequences, one per row, as one array per fact, so that a step over all of them is a few numpy calls.

    A row's `epoch` changes whenever it changes hands: a plan that is committed late is told apart from its successor
    by it. All arrays are [rows]; `tokens` is [rows, max_model_len], `blocks` [rows, blocks per sequence].
    """

    def __init__(self, num_rows: int, max_model_len: int, block_size: int) -> None:
        self.num_rows = num_rows
        self.block_size = block_size
        # Untouched pages of these cost nothing: the operating system maps them when they are written. They come first,
        # for too many rows are refused here, before anything is written.
        self.tokens: Ints = np.zeros((num_rows, max_model_len), dtype=np.int64)
        self.blocks: BlockIds = np.zeros((num_rows, -(-max_model_len // block_size)), dtype=np.int32)

        self.sequences: list[Sequence | None] = [None] * num_rows

        def column(dtype: type = np.int64) -> NDArray[Any]:
            return np.zeros(num_rows, dtype=dtype)

        self.epoch: Ints = column()
        self.prompt_len: Ints = column()
        self.max_length: Ints = column()
        self.min_length: Ints = column()  # below this many tokens nothing stops the sequence
        self.known: Ints = column()  # tokens whose values are here
        self.length: Ints = column()  # and those that a plan under way will bring
        self.computed: Ints = column()  # tokens whose keys and values are in the cache once every plan has run
        self.prefill_length: Ints = column()  # tokens it came into its row with
        self.prefilled: Ints = column()  # and those of them that committed plans have computed
        self.key: Ints = column()
        self.serial: Ints = column()
        self.first_block: Ints = column()  # where its blocks begin in `blocks`: those before were given back
        self.num_blocks: Ints = column()  # and where they end
        self.capacity: Ints = column()  # num_blocks * block_size
        self.ignore_eos: NDArray[np.bool_] = column(np.bool_)
        self.has_stop_ids: NDArray[np.bool_] = column(np.bool_)
        self.asks: Ints = column()  # as SamplingParams.asks; the sampler reads it, and what follows
        self.temperature: NDArray[np.float64] = column(np.float64)
        self.top_p: NDArray[np.float64] = column(np.float64)
        self.min_p: NDArray[np.float64] = column(np.float64)
        self.top_k: Ints = column()
        self.num_with_stop_ids = 0
        self.num_departures = 0  # sequences that have left a row
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def place(self, sequence: Sequence, blocks: BlockIds) -> int:
        """Give `sequence` a row and its `blocks` [n] int32 from its first one on, which hold what is still needed of
        its first num_computed tokens. Returns the row.
        """
        row = self._free_rows.pop()
        params, length, first = sequence.params, sequence.tokens.size, sequence.first_block
        self.sequences[row] = sequence
        sequence.row = row
        self.tokens[row, :length] = sequence.tokens
        self.prompt_len[row] = sequence.prompt_len
        self.max_length[row] = sequence.max_length
        self.min_length[row] = sequence.prompt_len + params.min_tokens
        self.known[row] = self.length[row] = length
        self.computed[row] = sequence.num_computed
        # Its blocks may be filled by a plan under way, or by this one's copies: nothing counts before a commit.
        self.prefilled[row] = 0
        self.prefill_length[row] = length
        self.key[row] = sequence.key
        self.serial[row] = sequence.serial
        if first:
            self.blocks[row, :first] = NO_BLOCK
        end = first + blocks.size
        self.blocks[row, first:end] = blocks
        self.first_block[row], self.num_blocks[row], self.capacity[row] = first, end, end * self.block_size
        self.ignore_eos[row] = params.ignore_eos
        self.has_stop_ids[row] = has_stop_ids = bool(sequence.stop_ids)
        self.num_with_stop_ids += has_stop_ids
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.top_k[row] = max(params.top_k, 0)
        self.asks[row] = params.asks
        return row

    def num_committed(self, row: int) -> int:
        """The row's tokens whose keys and values plans that have been committed have computed."""
        known = int(self.known[row])
        return known - 1 if known > self.prefill_length[row] else int(self.prefilled[row])

    def extend(self, row: int, blocks: BlockIds) -> None:
        """Append `blocks` to the row's list."""
        have = int(self.num_blocks[row])
        self.blocks[row, have : have + blocks.size] = blocks
        self.num_blocks[row] = have + blocks.size
        self.capacity[row] = (have + blocks.size) * self.block_size

    def extend_each(self, rows: Ints, blocks: BlockIds, counts: Ints | None = None) -> None:
        """Append to each of `rows`, which are distinct, the next of `blocks`, or the next `counts[i]` of them."""
        if counts is not None and blocks.size > rows.size:
            ends = np.cumsum(counts)
            for row, begin, end in zip(rows.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
                self.extend(row, blocks[begin:end])
            return
        have = self.num_blocks[rows]
        self.blocks[rows, have] = blocks
        self.num_blocks[rows] = have + 1
        self.capacity[rows] += self.block_size

    def count_lacking(self, rows: Ints, ends: Ints) -> Ints:
        """[n] the blocks that each of `rows` lacks for its tokens up to place `ends[i]`, one at least."""
        lacking: Ints = -(-ends // self.block_size) - self.num_blocks[rows]
        return lacking

    def take_before(self, row: int, place: int) -> BlockIds:
        """Take the row's blocks before `place` of its list out, which are now the caller's."""
        first, sequence = int(self.first_block[row]), self.sequences[row]
        if sequence is None:
            raise RuntimeError(f"row {row} of the sequence table is empty")
        taken = self.blocks[row, first:place].copy()
        self.blocks[row, first:place] = NO_BLOCK
        self.first_block[row] = sequence.first_block = place
        return taken

    def can_grow(self, rows: Ints | int) -> Any:
        """Which of `rows` may still need another block; a sequence's last token is never computed."""
        return self.capacity[rows] < self.max_length[rows] - 1

    def last_page_waste(self, rows: Ints) -> float:
        """Of the slots lent to `rows` [n], the fraction past their known tokens."""
        capacity, known = self.capacity[rows], self.known[rows]
        given_back = self.first_block[rows] * self.block_size
        lent = int((capacity - given_back).sum())
        return 1.0 - int((np.minimum(known, capacity) - given_back).sum()) / lent if lent else 0.0

    def remove(self, row: int) -> tuple[Sequence, BlockIds]:
        """Take the row's sequence out, with the tokens known of it; returns it and its blocks from its first one on,
        which are now the caller's.
        """
        sequence = self.sequences[row]
        if sequence is None:
            raise RuntimeError(f"row {row} of the sequence table is empty")
        sequence.update_tokens(self.tokens[row], int(self.known[row]))
        sequence.row = -1
        self.sequences[row] = None
        self.epoch[row] += 1
        self.num_departures += 1
        self.num_with_stop_ids -= bool(sequence.stop_ids)
        self._free_rows.append(row)
        return sequence, self.blocks[row, sequence.first_block : self.num_blocks[row]].copy()
