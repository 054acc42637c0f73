"""The tokens that grammars allow next: one mask for all rows of a step that have one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch

from tsched.execution.device_state import to_device
from tsched.execution.token_masks import bar_others, count_words
from tsched.requests.grammar import GrammarState
from tsched.scheduling.sequence import Ints, SequenceTable


class GrammarMasks:
    """The grammars of running sequences, as far as their known tokens have come.

    llguidance computes the masks of a step in one call, on threads of its own and without the interpreter's lock. With
    overlap that is between the commit of the last tokens and the sampling of the next, while the device computes.

    Args:
        table: The running sequences.
    """

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._states: dict[int, GrammarState] = {}  # by the sequence's id
        self._executor: Any = None

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
            scores: [s, V] float64.
            entries: [p] int64, ascending, the rows of `scores` to change.
            rows: [p] int64, their rows of the table.
            lengths: [p] int64, not looked at: the grammars have all known tokens.
        """
        if self._executor is None:
            self._executor = import_module("llguidance").LLExecutor()
        masks = np.zeros((rows.size, count_words(scores.shape[1])), dtype=np.int32)
        matchers = [(self._find(row).matcher, i) for i, row in enumerate(rows.tolist())]
        self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, 4 * masks.shape[1], masks.shape[0])
        for matcher, i in matchers:
            if matcher.is_error():
                masks[i] = 0
        bar_others(scores, entries, to_device(masks, scores.device))

    def _find(self, row: int) -> GrammarState:
        sequence = self._table.sequences[row]
        if sequence is None:
            raise RuntimeError(f"row {row} of the sequence table is empty")
        return self._states[sequence.id]
