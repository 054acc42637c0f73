"""The tokens that grammars allow next: one mask for all rows of a step that have one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tkernels.runtime import Runtime
from tsched.execution.token_masks import Masks, bar_others, count_words
from tsched.requests.grammar import GrammarState
from tsched.scheduling.sequence import Ints, SequenceTable

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarMasks:
    """The grammars of running sequences, as far as their known tokens have come.

    Masks are computed between the commit of a step's tokens and the sampling of the next, with overlap while the device
    runs the forward. A mask takes a few microseconds, so threads are not worth their start: llguidance's own took 14 ms
    where one call after the other took 1, for 32 rows on two busy cores.

    Args:
        table: The running sequences.
        runtime: Of the scores' device.
    """

    def __init__(self, table: SequenceTable, runtime: Runtime) -> None:
        self._table = table
        self._runtime = runtime
        self._states: dict[int, GrammarState] = {}  # by the sequence's id

    def add(self, sequence_id: int, state: GrammarState) -> None:
        """The output of a sequence has a grammar."""
        self._states[sequence_id] = state

    def forget(self, sequence_id: int) -> None:
        """A sequence has finished."""
        self._states.pop(sequence_id, None)

    def clear(self) -> None:
        """Forgets every sequence."""
        self._states.clear()

    def apply(self, scores: torch.Tensor, entries: Ints, rows: Ints, lengths: Ints) -> None:
        """Bars what the grammars do not allow, in place; all tokens where a grammar gives up.

        Args:
            scores: [s, V].
            entries: [p] int64, ascending, the rows of `scores` to change.
            rows: [p] int64, their rows of the table.
            lengths: [p] int64, not looked at: the grammars have all known tokens.
        """
        masks = _compute_masks(self._find_matchers(rows), scores.shape[1])
        bar_others(scores, entries, self._runtime.send(masks), self._runtime)

    def _find_matchers(self, rows: Ints) -> list[LLMatcher]:
        sequences = [self._table.sequences[row] for row in rows.tolist()]
        return [self._states[sequence.id].matcher for sequence in sequences if sequence is not None]


def _compute_masks(matchers: list[LLMatcher], vocab_size: int) -> Masks:
    """[p, W] the masks of `matchers` [p]; nothing is allowed where one gives up."""
    masks = np.zeros((len(matchers), count_words(vocab_size)), dtype=np.int32)
    address, size = masks.ctypes.data, 4 * masks.shape[1]
    for i, matcher in enumerate(matchers):
        matcher.unsafe_compute_mask_ptr(address + i * size, size)
        if matcher.is_error():
            masks[i] = 0
    return masks
