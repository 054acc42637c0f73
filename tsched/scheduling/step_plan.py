"""What one step is to do: the scheduler's answer, by rows and places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tsched.scheduling.block_pool import BlockIds
from tsched.scheduling.sequence import Ints

# Most plans copy no page and change no list of blocks: they share these.
NO_PAIRS: BlockIds = np.empty((2, 0), dtype=np.int32)
NO_ROWS: Ints = np.empty(0, dtype=np.int64)


class PageMover(Protocol):
    """Copies whole pages of every layer's keys and values. Its copies and the model's forwards run in call order."""

    def swap_out(self, pages: BlockIds) -> None:
        """Copies pages of the device, pages[0], to the host's cache, pages[1]; [2, n] int32."""

    def swap_in(self, pages: BlockIds) -> None:
        """Copies pages of the host's cache, pages[0], to the device, pages[1]; [2, n] int32."""

    def copy(self, pages: BlockIds) -> None:
        """Copies pages of the device, pages[0], to others of it, pages[1]; [2, n] int32."""


@dataclass(frozen=True, slots=True)
class StateStep:
    """What a step does to states, where layers keep some.

    slots       [2, n] int32, for each of the plan's entries the slot that its row reads, -1 where it begins at place 0
                and there is nothing to read, and the slot that it writes. No slot that one row writes is another's
    swap_outs   [2, m] int32, slots of the device and where they go on the host
    swap_ins    [2, m] int32, slots of the host and where they go on the device
    """

    slots: BlockIds
    swap_outs: BlockIds
    swap_ins: BlockIds


@dataclass(eq=False, slots=True)  # frozen, it takes 1.3 us more, of the 17 of a step of 256 rows; nobody changes one
class StepPlan:
    """One step: n rows of the sequence table advance, those by one token (`num_decodes` of them) first.

    It names rows and places, never token values, so the next plan can be made before this one's tokens are known.
    Whatever is built from it is built before the next call to the scheduler.

    rows            [n] int64, rows of the table
    starts          [n] int64, the place of each row's first token in its sequence
    counts          [n] int64, tokens of each row, at least 1
    ends            [n] int64, starts + counts
    num_tokens      the sum of counts
    sampled         [m] int64, the entries whose last token's logits are wanted, one new token each
    sampled_rows    [m] int64, rows[sampled]
    sampled_epochs  [m] int64, the rows' epochs when the plan was made
    lengths         [m] int64, ends[sampled]: the tokens that the logits have seen, and the new token's place
    num_departures  the table's when the plan was made
    num_preempted   sequences that gave way to this plan

    Copies of pages, done before the step's forward, in the order of `move_pages`; all distinct destinations:
    swap_outs       [2, n] int32, pages of the device and where they go in the host's cache
    swap_ins        [2, n] int32, pages of the host's cache and where they go on the device
    copies          [2, n] int32, pages of the device and where they go on it (copy on write)

    What changed in the table's lists of blocks since the plan before; rows, not all of which need be in the plan:
    placed          [a] int64, changed hands: everything about the row is new
    rewritten       [r] int64, blocks in the middle are others now
    grown           [g] int64, got one more block at the end; where layers have windows, one at least

    states          None where no layer keeps states
    """

    rows: Ints
    starts: Ints
    counts: Ints
    ends: Ints
    num_decodes: int
    num_tokens: int
    sampled: Ints
    sampled_rows: Ints
    sampled_epochs: Ints
    lengths: Ints
    num_departures: int
    num_preempted: int
    swap_outs: BlockIds
    swap_ins: BlockIds
    copies: BlockIds
    placed: Ints
    rewritten: Ints
    grown: Ints
    states: StateStep | None = None

    @property
    def is_empty(self) -> bool:
        return self.num_tokens == 0

    @property
    def moves_pages(self) -> bool:
        """Whether any page is to be copied; no state is without one."""
        return bool(self.swap_outs.size or self.swap_ins.size or self.copies.size)

    def move_pages(self, pages: PageMover, states: PageMover | None) -> None:
        """Lets `pages`, and `states` where layers keep some, make the plan's copies in the order that the scheduler
        counts on: what leaves the device is read before anything is written where it was.
        """
        _move(pages.swap_out, self.swap_outs)
        _move(pages.swap_in, self.swap_ins)
        _move(pages.copy, self.copies)
        if self.states is not None and states is not None:
            _move(states.swap_out, self.states.swap_outs)
            _move(states.swap_in, self.states.swap_ins)


def _move(move: Callable[[BlockIds], None], pairs: BlockIds) -> None:
    if pairs.size:
        move(pairs)


@dataclass(slots=True)
class Counters:
    """Plain sums since the scheduler was made."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_forks: int = 0
    num_given_up: int = 0  # waiting sequences whose blocks were taken back
    num_swapped_out: int = 0  # blocks
    num_swapped_in: int = 0  # blocks
    num_copied: int = 0  # blocks, on write
