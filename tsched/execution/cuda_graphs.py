"""Records decode steps as CUDA graphs, one for each bucket of batch sizes and bound of the context.

A graph replays the launches that it recorded, with the same addresses, shapes and host integers. So a decode step is
padded to its bucket (slot -1, context 0), reads its rows and places from fixed buffers, and makes its other inputs on
the device. Variants that split a context read its bound on the host, so the bound must hold for many steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch

from tkernels.ranges import NVTX, RECORD_GRAPH, Ranges
from tkernels.runtime import Recorder, Replay
from tmodel.batch import Batch, PrefixGroups
from tmodel.kv_cache import KVCache
from tsched.execution.device_state import DeviceState, pack_groups
from tsched.execution.exhaustion import Exhaustion, attempt
from tsched.scheduling.sequence import Ints
from tsched.scheduling.shared_prefixes import SharedPrefixes

Key = tuple[int, int, bool]
"""(bucket, bound, whether rows share prefixes)."""

_SMALLEST_BOUND = 1024  # tokens
_BOUND_STEP = 4


class DecodeGraphs:
    """Runs decode steps through graphs, each recorded at its first use or, all of them, by `record_all`.

    Args:
        model: Maps (Batch, caches) to logits [n, V] for the batch's logit_indices.
        kv_cache: The caches.
        state: The device's arrays, which a graph reads.
        recorder: Records a step.
        max_rows: The most decode rows of a step.
        max_model_len: The most tokens of a sequence.
        num_states: The scheduler's; the caches have one slot more, for padding. 0 where no layer keeps states.
        shared_prefixes: Whether rows are grouped: then each step has a second graph, for rows that share something.
        ranges: Name the recording.
    """

    def __init__(
        self,
        model: Callable[[Batch, KVCache], torch.Tensor],
        kv_cache: KVCache,
        state: DeviceState,
        recorder: Recorder,
        *,
        max_rows: int,
        max_model_len: int,
        num_states: int = 0,
        shared_prefixes: bool = False,
        ranges: Ranges = NVTX,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._state = state
        self._recorder = recorder
        self._recording = ranges.named(RECORD_GRAPH, "phase")
        self.buckets = batch_buckets(max_rows)
        self.bounds = context_bounds(max_model_len)
        self._kinds = (False, True) if shared_prefixes else (False,)
        self._replays: dict[Key, Replay] = {}
        # All graphs write their logits to one tensor: one each would take gigabytes for a large vocabulary.
        self._logits: torch.Tensor | None = None
        self._num_states = num_states
        num_inputs = 4 if num_states else 2  # tokens, starts; then the slots of states read and written
        self._inputs = torch.zeros((num_inputs, max_rows), dtype=torch.int64, device=state.runtime.device)
        # As pack_groups, for a group of every two rows and an entry more; both rows begin at a multiple of 16 bytes.
        self._groups = torch.zeros((2, max_rows // 8 * 4 + 4), dtype=torch.int32, device=state.runtime.device)

    @property
    def recorded(self) -> list[Key]:
        """The key of every recorded graph, sorted."""
        return sorted(self._replays)

    @property
    def num_graphs(self) -> int:
        """How many there are when all are recorded."""
        return len(self._list_keys())

    def forget(self) -> None:
        """Drops all graphs; the next use of each records it again."""
        self._replays.clear()

    def use_model(self, model: Callable[[Batch, KVCache], torch.Tensor]) -> None:
        """Records `model` from now on, which has the same caches."""
        self._model = model
        self.forget()

    def record_all(self, tell: Callable[[int, int], object]) -> None:
        """Records every graph that is not recorded yet, with rows of padding alone.

        The largest come first: in the memory that they need the smaller ones find theirs. Where memory ends, the others
        are left to their first use.

        Args:
            tell: Called with how many there are and how many there will be, once before the first and after each.
        """
        every = self._list_keys()
        tell(len(self._replays), len(every))
        for key in every:
            if key in self._replays:
                continue
            self._fill(self._padding(key[0]))
            self._groups.zero_()
            if isinstance(attempt(self._record, key), Exhaustion):
                return
            tell(len(self._replays), len(every))

    def run(
        self, rows: Ints, starts: Ints, state_slots: Ints | None = None, shared: SharedPrefixes | None = None
    ) -> torch.Tensor:
        """Runs the step in which the state's first n places decode.

        Args:
            rows: [n] int64, of the table.
            starts: [n] int64, the place of each row's token in its sequence.
            state_slots: [2, n] int64, the slots read and written, where layers keep states.
            shared: The groups of rows that share blocks.

        Returns:
            Logits [n, V], valid until the next run.
        """
        bucket = self.buckets[bisect_left(self.buckets, rows.size)]
        bound = self.bounds[bisect_left(self.bounds, int(starts.max()) + 1)]
        padded = self._padding(bucket)
        padded[0, : rows.size], padded[1, : rows.size] = -1 - rows, starts
        if state_slots is not None:
            padded[2:, : rows.size] = state_slots
        self._fill(padded)
        if shared is not None:
            packed = pack_groups(shared, bucket // 2, self._state.block_size)
            self._groups[:, : packed.shape[1]].copy_(self._state.runtime.send(packed))
        key = (bucket, bound, shared is not None)
        if key not in self._replays:
            self._record(key)
        return self._replays[key]()[: rows.size]

    def _list_keys(self) -> list[Key]:
        """All keys, the largest first. One row alone shares nothing."""
        sizes = [(bucket, bound) for bound in reversed(self.bounds) for bucket in reversed(self.buckets)]
        return [(*size, shares) for size in sizes for shares in self._kinds if size[0] > 1 or not shares]

    def _padding(self, bucket: int) -> Ints:
        """The inputs of `bucket` rows that no sequence has: they write nothing, and nobody reads what they compute."""
        padded = np.zeros((self._inputs.shape[0], bucket), dtype=np.int64)
        padded[1] = -1
        if self._num_states:
            padded[2], padded[3] = -1, self._num_states
        return padded

    def _fill(self, padded: Ints) -> None:
        self._inputs[:, : padded.shape[1]].copy_(self._state.runtime.send(padded))

    def _record(self, key: Key) -> None:
        with self._recording:
            self._replays[key] = self._recorder.record(lambda: self._step(*key))

    def _step(self, bucket: int, bound: int, shares: bool) -> torch.Tensor:
        tokens, starts = self._inputs[:2, :bucket]
        state_slots = self._inputs[2:, :bucket] if self._num_states else None
        most = bucket // 2
        groups = PrefixGroups(self._groups[0, : most + 1], self._groups[1, :most], bound) if shares else None
        batch = self._state.make_decode_batch(tokens, starts, bound, state_slots, groups)
        logits = self._model(batch, self._kv_cache)
        if self._logits is None:  # outside any capture, because a recorder runs the step first
            self._logits = logits.new_empty((self._inputs.shape[1], logits.shape[1]))
        return self._logits[:bucket].copy_(logits)


def batch_buckets(max_rows: int) -> list[int]:
    """Batch sizes of graphs: 1, 2, 4, 8, then every 8 to 64, every 16 to 256, every 64 above, and `max_rows`.

    From 32 rows on padding adds less than a fifth.
    """
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 64)]
    return [*(step for step in steps if step < max_rows), max_rows]


def context_bounds(max_model_len: int) -> list[int]:
    """Bounds of contexts, in tokens: `max_model_len` and its quarters down to 1024, ascending.

    A graph's grids are sized by its bound, so with one bound for all contexts most programs would have no work.
    """
    bounds = [max_model_len]
    while bounds[0] > _SMALLEST_BOUND:
        bounds.insert(0, max(_SMALLEST_BOUND, -(-bounds[0] // _BOUND_STEP)))
    return bounds
