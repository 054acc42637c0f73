"""A request's random numbers, which depend on its seed and the output index alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tsched.requests.errors import ArgumentError
from tsched.scheduling.sequence import Ints, Sequence, SequenceTable

_PER_COUNTER = 4  # 64-bit words that Philox4x64 makes of one counter value


def philox_key(engine_seed: int, sequence: Sequence) -> NDArray[np.uint64]:
    """[2] uint64, the key of a request's stream: its own seed, or one derived from the engine's and its id."""
    if sequence.params.seed is not None:
        return np.array([sequence.params.seed, 0], dtype=np.uint64)
    derived = np.random.SeedSequence((engine_seed, sequence.id)).generate_state(1, np.uint64)
    return np.array([derived[0], 1], dtype=np.uint64)


def draw_uniforms(key: NDArray[np.uint64], first: int, count: int) -> NDArray[np.float64]:
    """Draws the uniforms of output indices from `first` on.

    Args:
        key: [2] uint64, of the request's stream.
        first: The first output index, a multiple of 4.
        count: How many.

    Returns:
        [count] float64 in [0, 1).

    Raises:
        ArgumentError: `first` is no multiple of 4.
    """
    if first % _PER_COUNTER:
        raise ArgumentError(f"first must be a multiple of {_PER_COUNTER}, got {first}")
    return np.random.Generator(np.random.Philox(key=key, counter=first // _PER_COUNTER)).random(count)


class UniformTable:
    """The uniforms of running sequences, drawn STRETCH at a time, because a generator costs more than its numbers.

    Args:
        table: The running sequences.
        seed: Of requests without a seed.
    """

    STRETCH = 64

    def __init__(self, table: SequenceTable, seed: int) -> None:
        self._table = table
        self._seed = seed
        self._values = np.zeros((table.num_rows, self.STRETCH))
        self._stretch = np.full(table.num_rows, -1, dtype=np.int64)
        self._epoch = np.full(table.num_rows, -1, dtype=np.int64)

    def find_uniforms(self, rows: Ints, output_indices: Ints) -> NDArray[np.float64]:
        """[n] float64 in [0, 1): the uniform of each of `rows` [n] for the token at `output_indices` [n]."""
        stretch, offset = np.divmod(output_indices, self.STRETCH)
        stale = (self._stretch[rows] != stretch) | (self._epoch[rows] != self._table.epoch[rows])
        if stale.any():
            for i in np.flatnonzero(stale).tolist():
                row = int(rows[i])
                sequence = self._table.sequences[row]
                if sequence is None:
                    raise RuntimeError(f"row {row} of the sequence table is empty")
                first = int(stretch[i]) * self.STRETCH
                self._values[row] = draw_uniforms(philox_key(self._seed, sequence), first, self.STRETCH)
            self._stretch[rows] = stretch
            self._epoch[rows] = self._table.epoch[rows]
        return self._values[rows, offset]
