"""Bars the last token of a word wherever an output has the tokens before it, for all rows at once."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tkernels.runtime import Runtime
from tsched.execution.row_epochs import RowEpochs
from tsched.scheduling.sequence import Ints, SequenceTable

_ANY = -1  # in a word's tokens: it has none there, and any token matches
_NOT_OUTPUT = -2  # in an output's: it has none there, and no token matches


class BadWords:
    """The words of rows that have any, as arrays on the host, where the tokens are that they are compared with.

    Args:
        table: The running sequences.
        runtime: Of the scores' device.
    """

    def __init__(self, table: SequenceTable, runtime: Runtime) -> None:
        self._table = table
        self._runtime = runtime
        self._epochs = RowEpochs(table)
        # For w words of l + 1 tokens at most: the tokens before the last, at the right, and the last, _ANY past a row's
        # last word.
        self._before: NDArray[np.int32] = np.full((table.num_rows, 0, 0), _ANY, dtype=np.int32)  # [R, w, l]
        self._last: NDArray[np.int32] = np.full((table.num_rows, 0), _ANY, dtype=np.int32)  # [R, w]

    def apply(self, scores: torch.Tensor, entries: Ints, rows: Ints, lengths: Ints) -> None:
        """Bars tokens in place.

        Args:
            scores: [s, V].
            entries: [p] int64, the rows of `scores` to change.
            rows: [p] int64, their rows of the table.
            lengths: [p] int64, the tokens of each sequence; the table has them all.
        """
        for row, sequence in self._epochs.take_stale(rows).items():
            self._store(row, sequence.params.bad_word_ids)
        last = self._last[rows]  # [p, w]
        before = self._before[rows]  # [p, w, l]
        recent = self._read_recent(rows, lengths)  # [p, l]
        found = (last != _ANY) & ((before == _ANY) | (before == recent[:, None])).all(axis=2)
        owners, words = np.nonzero(found)
        if owners.size:
            index = entries[owners] * scores.shape[1] + last[owners, words]
            scores.view(-1).index_fill_(0, self._runtime.send(index), -torch.inf)

    def _read_recent(self, rows: Ints, lengths: Ints) -> NDArray[np.int32]:
        """[p, l] int32: the last l tokens of each row, of its output alone."""
        places = lengths[:, None] - np.arange(self._before.shape[2], 0, -1)  # [p, l]
        tokens = self._table.tokens[rows[:, None], np.maximum(places, 0)]
        return np.where(places >= self._table.prompt_len[rows][:, None], tokens, _NOT_OUTPUT).astype(np.int32)

    def _store(self, row: int, words: tuple[tuple[int, ...], ...]) -> None:
        self._reserve(len(words), max(map(len, words)) - 1)
        self._before[row] = self._last[row] = _ANY
        width = self._before.shape[2]
        for i, word in enumerate(words):
            self._before[row, i, width - len(word) + 1 :] = word[:-1]
            self._last[row, i] = word[-1]

    def _reserve(self, num_words: int, num_before: int) -> None:
        """Makes room for so many words with so many tokens before the last."""
        _, have_words, have_before = self._before.shape
        if num_words <= have_words and num_before <= have_before:
            return
        shape = self._table.num_rows, max(num_words, have_words), max(num_before, have_before)
        before, last = np.full(shape, _ANY, dtype=np.int32), np.full(shape[:2], _ANY, dtype=np.int32)
        before[:, :have_words, shape[2] - have_before :] = self._before
        last[:, :have_words] = self._last
        self._before, self._last = before, last
