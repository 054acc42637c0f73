"""A few tokens of each row whose scores are added to: sparse arrays for all rows, which stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from tkernels.runtime import Runtime
from tsched.execution.row_epochs import RowEpochs
from tsched.scheduling.sequence import Ints, Sequence, SequenceTable

_FEWEST = 8  # columns of the arrays


class TokenBiases:
    """What is added to the scores of a row's tokens.

    The arrays are [rows, n] on the scores' device, made for the first row that has any, with n of the row that has the
    most. A step sends the rows that are new.

    Args:
        table: The running sequences.
        runtime: Of the scores' device.
        read: Gives a sequence's tokens and what is added to each.
    """

    def __init__(self, table: SequenceTable, runtime: Runtime, read: Callable[[Sequence], Mapping[int, float]]) -> None:
        self._runtime = runtime
        self._epochs = RowEpochs(table)
        self._read = read
        self._ids: torch.Tensor | None = None  # [R, n] int64; the rest of a row is token 0 with nothing added
        self._values: torch.Tensor | None = None  # [R, n], in the scores' dtype

    def apply(self, scores: torch.Tensor, entries: Ints, rows: Ints, lengths: Ints) -> None:
        """Adds to scores in place.

        Args:
            scores: [s, V].
            entries: [p] int64, the rows of `scores` to change.
            rows: [p] int64, their rows of the table.
            lengths: [p] int64, not looked at.
        """
        new = self._epochs.take_stale(rows)
        if new:
            self._store(new, scores)
        if self._ids is None or self._values is None:
            raise RuntimeError("no row has tokens to add to")
        places = self._runtime.send(rows)
        starts = self._runtime.send(entries * scores.shape[1])
        index = self._ids.index_select(0, places) + starts.unsqueeze(1)  # [p, n]
        scores.view(-1).index_add_(0, index.view(-1), self._values.index_select(0, places).view(-1))

    def _store(self, new: dict[int, Sequence], scores: torch.Tensor) -> None:
        """Sends the tokens of the rows in `new`."""
        vocab_size = scores.shape[1]
        lists = [{t: v for t, v in self._read(one).items() if t < vocab_size} for one in new.values()]
        self._reserve(max(map(len, lists)), scores)
        if self._ids is None or self._values is None:
            raise RuntimeError("the arrays have just been made")
        ids = np.zeros((len(lists), self._ids.shape[1]), dtype=np.int64)
        values = np.zeros(ids.shape)
        for i, one in enumerate(lists):
            ids[i, : len(one)], values[i, : len(one)] = list(one), list(one.values())
        places = self._runtime.send(np.array(list(new)))
        self._ids.index_copy_(0, places, self._runtime.send(ids))
        self._values.index_copy_(0, places, self._runtime.send(values).to(scores.dtype))

    def _reserve(self, count: int, scores: torch.Tensor) -> None:
        """Makes the arrays, or makes them wider, for rows of `count` tokens."""
        have = 0 if self._ids is None else self._ids.shape[1]
        if have >= max(count, _FEWEST):
            return
        shape = self._epochs.num_rows, max(_FEWEST, 1 << (count - 1).bit_length())
        ids = torch.zeros(shape, dtype=torch.int64, device=scores.device)
        values = torch.zeros(shape, dtype=scores.dtype, device=scores.device)
        if self._ids is not None and self._values is not None:
            ids[:, :have], values[:, :have] = self._ids, self._values
        self._ids, self._values = ids, values


class HeldEnds:
    """Bars what ends an output until it has min_tokens.

    Args:
        table: The running sequences.
        runtime: Of the scores' device.
        eos_token_ids: End an output unless its parameters say ignore_eos.
    """

    def __init__(self, table: SequenceTable, runtime: Runtime, eos_token_ids: tuple[int, ...]) -> None:
        self._table = table

        def read_ends(sequence: Sequence) -> dict[int, float]:
            params = sequence.params
            return dict.fromkeys((*params.stop_ids, *(() if params.ignore_eos else eos_token_ids)), -np.inf)

        self._ends = TokenBiases(table, runtime, read_ends)

    def apply(self, scores: torch.Tensor, entries: Ints, rows: Ints, lengths: Ints) -> None:
        """Bars ends in place, in those of `rows` [p] whose `lengths` [p] are too short. Otherwise as TokenBiases."""
        short = lengths < self._table.min_length[rows]
        if short.any():
            self._ends.apply(scores, entries[short], rows[short], lengths[short])
