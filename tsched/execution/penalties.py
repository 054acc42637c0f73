"""Repetition, presence and frequency penalties from counts that stay on the device and grow by a step's new tokens."""

from __future__ import annotations

import numpy as np
import torch

from tkernels.runtime import Runtime
from tsched.scheduling.sequence import Ints, SequenceTable


class PenaltyCounts:
    """How often each token is in the sequences of penalized rows.

    The counts are [slots, V] int32 on the logits' device, a slot for each penalized row. They are made for the first
    such row and double when slots run out. An entry is twice the occurrences in the output, plus one where the token is
    in the prompt; 0 is a token that the sequence does not have.

    Args:
        table: The running sequences.
        runtime: Of the logits' device.
    """

    def __init__(self, table: SequenceTable, runtime: Runtime) -> None:
        self._table = table
        self._runtime = runtime
        self._counts: torch.Tensor | None = None
        self._slot_of: dict[int, int] = {}  # row -> slot
        self._free: list[int] = []
        self._epoch = np.full(table.num_rows, -1, dtype=np.int64)
        self._counted = np.zeros(table.num_rows, dtype=np.int64)  # tokens of the row's sequence

    def forget(self, rows: Ints) -> None:
        """Drops the counts of `rows` [n]: their tokens have changed."""
        self._epoch[rows] = -1

    def update(
        self, scores: torch.Tensor, entries: Ints, rows: Ints, lengths: Ints
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Counts the tokens that came since the last call.

        Args:
            scores: [s, V], of the step.
            entries: [p] int64, the rows of `scores` that are penalized.
            rows: [p] int64, their rows of the table.
            lengths: [p] int64, how many tokens of each sequence count; the table has them all.

        Returns:
            (counts [slots, V], slots [s], penalties [s, 3]), as the op `sample` takes them.
        """
        slots = np.full(scores.shape[0], -1, dtype=np.int64)
        slots[entries] = self._update_counts(scores, rows, lengths)
        penalties = np.zeros((scores.shape[0], 3), dtype=np.float32)
        penalties[entries] = [self._get_penalties(row) for row in rows.tolist()]
        return self._require_counts(scores), self._runtime.send(slots), self._runtime.send(penalties)

    def _get_penalties(self, row: int) -> tuple[float, float, float]:
        sequence = self._table.sequences[row]
        if sequence is None:
            raise RuntimeError(f"row {row} of the sequence table is empty")
        params = sequence.params
        return params.repetition_penalty, params.frequency_penalty, params.presence_penalty

    def _update_counts(self, scores: torch.Tensor, rows: Ints, lengths: Ints) -> Ints:
        """Counts the tokens that came since the last call, and returns the slots [p] of `rows` [p]."""
        table = self._table
        stale = self._epoch[rows] != table.epoch[rows]
        if stale.any():
            self._assign_slots(scores, rows[stale])
        slots = np.array([self._slot_of[row] for row in rows.tolist()], dtype=np.int64)
        self._count_tokens(scores, slots, rows, self._counted[rows], lengths)
        self._counted[rows] = lengths
        return slots

    def _assign_slots(self, scores: torch.Tensor, rows: Ints) -> None:
        """Gives each of `rows` [n] an empty slot and counts its prompt there."""
        table = self._table
        for row in [row for row in self._slot_of if self._epoch[row] != table.epoch[row]]:
            self._free.append(self._slot_of.pop(row))
        while len(self._free) < rows.size:
            self._add_slots(scores)
        for row in rows.tolist():
            self._slot_of[row] = self._free.pop()
        slots = np.array([self._slot_of[row] for row in rows.tolist()], dtype=np.int64)
        counts = self._require_counts(scores)
        counts.index_fill_(0, self._runtime.send(slots), 0)
        prompts = [np.unique(table.tokens[row, : table.prompt_len[row]]) for row in rows.tolist()]
        index = np.concatenate([slot * scores.shape[1] + ids for slot, ids in zip(slots, prompts, strict=True)])
        counts.view(-1).index_fill_(0, self._runtime.send(index), 1)
        self._counted[rows], self._epoch[rows] = table.prompt_len[rows], table.epoch[rows]

    def _count_tokens(self, scores: torch.Tensor, slots: Ints, rows: Ints, starts: Ints, ends: Ints) -> None:
        """Counts the output's tokens from `starts` to `ends` of each of `rows`, all [p]."""
        lens = ends - starts
        if not lens.any():
            return
        owner = np.repeat(np.arange(rows.size), lens)  # [sum of lens]
        places = np.arange(owner.size) + np.repeat(starts - (np.cumsum(lens) - lens), lens)
        index = slots[owner] * scores.shape[1] + self._table.tokens[rows[owner], places]
        flat = self._require_counts(scores).view(-1)
        flat.index_add_(0, self._runtime.send(index), torch.full_like(flat[:1], 2).expand(index.size))

    def _add_slots(self, scores: torch.Tensor) -> None:
        """Doubles the slots."""
        old = self._counts
        have = 0 if old is None else old.shape[0]
        counts = torch.zeros((max(1, 2 * have), scores.shape[1]), dtype=torch.int32, device=scores.device)
        if old is not None:
            counts[:have] = old
        self._counts = counts
        self._free += range(have, counts.shape[0])

    def _require_counts(self, scores: torch.Tensor) -> torch.Tensor:
        if self._counts is None or self._counts.shape[1] != scores.shape[1]:
            raise RuntimeError(f"the counts are not those of a vocabulary of {scores.shape[1]} tokens")
        return self._counts
