"""Which rows of the table hold another sequence than when something was last stored for them."""

from __future__ import annotations

import numpy as np

from tsched.scheduling.sequence import Ints, Sequence, SequenceTable


class RowEpochs:
    """The epoch of each row of `table` for which something is stored."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._epoch = np.full(table.num_rows, -1, dtype=np.int64)

    @property
    def num_rows(self) -> int:
        return self._table.num_rows

    def take_stale(self, rows: Ints) -> dict[int, Sequence]:
        """Row -> its sequence, of those of `rows` [n] for which nothing is stored. From now on something is."""
        table = self._table
        stale = rows[self._epoch[rows] != table.epoch[rows]]
        if stale.size == 0:
            return {}
        self._epoch[stale] = table.epoch[stale]
        found: dict[int, Sequence] = {}
        for row in stale.tolist():
            sequence = table.sequences[row]
            if sequence is None:
                raise RuntimeError(f"row {row} of the sequence table is empty")
            found[row] = sequence
        return found
