"""What a request's random numbers come from: its seed and the output index alone, see the op `sample`."""

from __future__ import annotations

import numpy as np

from tsched.execution.row_epochs import RowEpochs
from tsched.scheduling.sequence import Ints, Sequence, SequenceTable


def find_seed(engine_seed: int, sequence: Sequence) -> int:
    """A request's own seed, or one derived from the engine's and its id: 64 bits, as an int64."""
    seed = sequence.params.seed
    if seed is None:
        seed = int(np.random.SeedSequence((engine_seed, sequence.id)).generate_state(1, np.uint64)[0])
    return seed - (seed >> 63 << 64)


class SeedTable:
    """The seeds of running sequences.

    Args:
        table: The running sequences.
        engine_seed: Of requests without a seed.
    """

    def __init__(self, table: SequenceTable, engine_seed: int) -> None:
        self._engine_seed = engine_seed
        self._epochs = RowEpochs(table)
        self._seeds: Ints = np.zeros(table.num_rows, dtype=np.int64)

    def find_seeds(self, rows: Ints) -> Ints:
        """[n] int64: the seed of each of `rows` [n]."""
        for row, sequence in self._epochs.take_stale(rows).items():
            self._seeds[row] = find_seed(self._engine_seed, sequence)
        return self._seeds[rows]
