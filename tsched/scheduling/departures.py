"""How sequences end: by their newest token, at their last place, from outside, or with a step that was lost."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tsched.scheduling.kv_memory import KVMemory
from tsched.scheduling.planner import Planner
from tsched.scheduling.sequence import Ints, Sequence, SequenceTable
from tsched.scheduling.sibling_groups import SiblingGroups
from tsched.scheduling.step_plan import Counters
from tsched.scheduling.waiting_queue import WaitingQueue


class Departures:
    """Takes sequences out of `unfinished`, by id, and of wherever else they are, and frees what they had.

    Args:
        eos_token_ids: End a sequence unless its parameters say ignore_eos.
    """

    def __init__(
        self,
        table: SequenceTable,
        memory: KVMemory,
        planner: Planner,
        waiting: WaitingQueue,
        groups: SiblingGroups,
        counters: Counters,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.unfinished: dict[int, Sequence] = {}
        self._table = table
        self._memory = memory
        self._planner = planner
        self._waiting = waiting
        self._groups = groups
        self._counters = counters
        self._eos_token_ids = eos_token_ids

    def end_stopped(self, rows: Ints, tokens: Ints, lengths: Ints) -> list[Sequence]:
        """End those of `rows` [m] whose new `tokens` [m] stop them, or whose `lengths` [m] are all they may have."""
        ended = lengths >= self._table.max_length[rows]
        stopped = self._find_stopped(rows, tokens, lengths)
        if stopped is not None:
            ended |= stopped
        if np.count_nonzero(ended) == 0:
            return []
        entries = ended.nonzero()[0].tolist()
        if stopped is None:
            return self.end_rows(dict.fromkeys(rows[ended].tolist(), "length"))
        finished = self.end_rows({int(rows[i]): "stop" if stopped[i] else "length" for i in entries})
        for sequence, i in zip(finished, entries, strict=True):
            if stopped[i]:
                self._note_stop(sequence, int(tokens[i]))
        return finished

    def end_rows(self, reasons: dict[int, str]) -> list[Sequence]:
        """End the sequences in the rows that `reasons` has, in its order."""
        table = self._table
        rows, left = list(reasons), []
        self._planner.stop_running(rows)
        for row in rows:
            num_committed = table.num_committed(row)
            left.append((*table.remove(row), num_committed))
        self._memory.release_each(rows, left)
        for row, (sequence, _, _) in zip(rows, left, strict=True):
            self._mark_finished(sequence, reasons[row])
        return [sequence for sequence, _, _ in left]

    def end(self, sequence: Sequence, reason: str) -> Sequence:
        """End an unfinished `sequence`, wherever it is."""
        if sequence.row >= 0:
            return self.end_rows({sequence.row: reason})[0]
        if not self._groups.remove(sequence):
            self._waiting.remove(sequence)
            self._memory.drop(sequence)
        self._planner.disturb()
        self._mark_finished(sequence, reason)
        return sequence

    def _find_stopped(self, rows: Ints, tokens: Ints, lengths: Ints) -> NDArray[np.bool_] | None:
        """[m] bool, which of `rows` were ended by their new token; None where none was."""
        table = self._table
        stopped: NDArray[np.bool_] | None = None
        for eos in self._eos_token_ids:
            is_eos = tokens == eos
            if np.count_nonzero(is_eos):
                stopped = is_eos if stopped is None else stopped | is_eos
        if stopped is not None:
            stopped &= ~table.ignore_eos[rows]
        if table.num_with_stop_ids:
            stopped = np.zeros(rows.size, dtype=np.bool_) if stopped is None else stopped
            for i in np.flatnonzero(table.has_stop_ids[rows]).tolist():
                sequence = table.sequences[int(rows[i])]
                stopped[i] |= sequence is not None and int(tokens[i]) in sequence.stop_ids
        return None if stopped is None else stopped & (lengths > table.min_length[rows])

    def _note_stop(self, sequence: Sequence, token: int) -> None:
        """`token` has ended a sequence; one of the model's ends of sequence comes before its stop ids."""
        sequence.ended_by_token = True
        is_eos = token in self._eos_token_ids and not sequence.params.ignore_eos
        sequence.stop_id = None if is_eos else token

    def _mark_finished(self, sequence: Sequence, reason: str) -> None:
        del self.unfinished[sequence.id]
        heirs = self._groups.disband(sequence.id)
        if heirs:  # it led a group, whose prompt another one computes now
            self._groups.form(heirs[0], heirs[1:])
            self._waiting.add(heirs[0])
        if sequence.params.max_tokens == 0 and sequence.tokens.size > sequence.prompt_len:
            self._counters.num_output_tokens -= sequence.tokens.size - sequence.prompt_len
            sequence.tokens, reason = sequence.tokens[: sequence.prompt_len], "length"
        sequence.finish_reason = reason
        self._counters.num_finished += 1
