"""Records steps with prefill chunks in pieces, a set of CUDA graphs for each bucket of tokens; attention lies between.

All that is not attention depends on the number of tokens alone. So a step is padded to its bucket (slot -1) and reads
its tokens, positions and slots from fixed buffers, while attention is launched with the step's own tables and lengths.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

import torch

from tkernels.ranges import NVTX, RECORD_GRAPH, Ranges
from tkernels.runtime import Between, Recorder
from tmodel.batch import Batch, KVCache
from tmodel.config import SplitModel
from tsched.execution.exhaustion import Exhaustion, attempt
from tsched.torch_free import TKernelsError

_MOST_TOKENS = 512
"""By the model of `tk inspect --predict`, the products (persistent) and norms of a layer of Qwen3-0.6B take an H100 52
us for 256 tokens, 69 for 512 and 103 for 1,024; of Qwen3-4B 157 us for 256. To launch a layer of Qwen3-4B eagerly takes
the host 57 us (tests.bench.launch_cost), and what torch takes between launches."""
_STEP = 64  # the rows of a tile of most matrix products, so that padding adds next to none


class _NotInPiecesError(TKernelsError):
    """A model attends in another way than between pieces."""


class PrefillGraphs:
    """Runs steps of up to `_MOST_TOKENS` tokens in pieces, recorded by `record_all` or when a bucket is met again.

    A recording takes as long as several steps, so a prompt of a length that comes once does not pay for one.

    Args:
        model: Attends once for each layer of the caches, through PagedAttention.
        kv_cache: The caches.
        recorder: Records a step.
        max_tokens: The most tokens of a step.
        ranges: Name the recording.
    """

    def __init__(
        self, model: SplitModel, kv_cache: KVCache, recorder: Recorder, *, max_tokens: int, ranges: Ranges = NVTX
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._recorder = recorder
        self._recording = ranges.named(RECORD_GRAPH, "phase")
        self.buckets = token_buckets(min(max_tokens, _MOST_TOKENS))
        self._replays: dict[int, Callable[[Batch], torch.Tensor]] = {}
        self._met: set[int] = set()  # buckets that steps were run of
        self._eager: set[int] = set()  # buckets that cannot be recorded
        device = kv_cache[0][0].device
        # Tokens, positions and slots; those of padding are 0, 0 and -1.
        self._inputs = torch.zeros((3, self.buckets[-1]), dtype=torch.int64, device=device)
        self._places = torch.arange(self.buckets[-1], device=device)
        # Layers and buckets run one after the other, so they share what lies between pieces, by place and row.
        self._buffers: dict[tuple[object, ...], torch.Tensor] = {}

    @property
    def recorded(self) -> list[int]:
        """Every recorded bucket, sorted."""
        return sorted(self._replays)

    def use_model(self, model: SplitModel) -> None:
        """Records `model` from now on, which has the same caches."""
        self._model = model
        self._eager.clear()
        self.forget()

    def forget(self) -> None:
        """Drops all graphs; the next use of a bucket that was met records it again."""
        self._replays.clear()

    def record_all(self, tell: Callable[[int, int], object]) -> None:
        """Records every bucket that is not recorded yet, with padding alone, as DecodeGraphs.record_all does.

        Args:
            tell: Called with how many there are and how many there will be, once before the first and after each.
        """
        tell(len(self._replays), len(self.buckets))
        for bucket in reversed(self.buckets):
            if bucket in self._replays or bucket in self._eager:
                continue
            self._pad(0, bucket)
            if not self._record(bucket, self._make_padding_batch()):
                return
            tell(len(self._replays), len(self.buckets))

    def takes(self, batch: Batch) -> bool:
        """Whether the batch has no more tokens than the largest bucket."""
        return batch.token_ids.shape[0] <= self.buckets[-1]

    def run(self, batch: Batch) -> torch.Tensor:
        """Runs a step.

        Args:
            batch: Of a size that it `takes`.

        Returns:
            Logits [n, V] at its logit_indices.
        """
        count = batch.token_ids.shape[0]
        bucket = self.buckets[bisect_left(self.buckets, count)]
        is_new = bucket not in self._met and bucket not in self._replays
        self._met.add(bucket)
        if is_new or bucket in self._eager:
            return self._run_eagerly(batch)
        self._inputs[:, :count] = torch.stack((batch.token_ids, batch.positions, batch.slots))
        self._pad(count, bucket)
        if bucket not in self._replays and not self._record(bucket, batch):
            return self._run_eagerly(batch)
        hidden = self._replays[bucket](batch)  # [bucket, H]
        return self._model.compute_logits(hidden.index_select(0, batch.logit_indices))

    def _pad(self, first: int, end: int) -> None:
        self._inputs[:2, first:end].zero_()
        self._inputs[2, first:end].fill_(-1)

    def _run_eagerly(self, batch: Batch) -> torch.Tensor:
        """Runs a step as it is, and sees whether the model could be recorded in pieces."""
        num_attended = 0

        def attend_now(
            q: torch.Tensor, width: int, attend: Callable[[Batch, torch.Tensor], torch.Tensor]
        ) -> torch.Tensor:
            nonlocal num_attended
            num_attended += 1
            return attend(batch, q)

        hidden = self._model.compute_hidden(replace(batch, attend_between=attend_now), self._kv_cache)
        self._leave_eager_unless(num_attended)
        return self._model.compute_logits(hidden)

    def _leave_eager_unless(self, num_attended: int) -> bool:
        """Whether all layers attended between pieces. Where not, every step stays eager, which is said."""
        if num_attended == len(self._kv_cache):
            return True
        if not self._eager.issuperset(self.buckets):
            self._eager.update(self.buckets)
            warnings.warn(
                f"steps of {type(self._model).__name__} with prompts are recorded in no CUDA graphs: {num_attended} of "
                f"its {len(self._kv_cache)} layers attend through PagedAttention",
                stacklevel=2,
            )
        return False

    def _record(self, bucket: int, batch: Batch) -> bool:
        """Whether the bucket was recorded; where there is no memory for it, or no way to, it stays eager."""
        record = self._recorder.record_pieces
        try:
            with self._recording:
                made = attempt(record, lambda between: self._run(bucket, between, batch), batch)
        except _NotInPiecesError:
            return False
        if isinstance(made, Exhaustion):
            self._eager.add(bucket)
            return False
        self._replays[bucket] = made
        return True

    def _run(self, bucket: int, between: Between[Batch], batch: Batch) -> torch.Tensor:
        """The final hidden states [bucket, H] of the inputs; attention and nothing else is for `between`."""
        num_attended = 0
        # What attends is kept for the replays and refers to all this: emptied, it is no circle that keeps the graphs.
        taking = [between]

        def attend_between(
            q: torch.Tensor, width: int, attend: Callable[[Batch, torch.Tensor], torch.Tensor]
        ) -> torch.Tensor:
            nonlocal num_attended
            num_attended += 1
            queries, attended = self._buffer("queries", q), self._buffer("attended", q[..., :1].expand(-1, -1, width))
            queries.copy_(q)
            (take,) = taking
            take(lambda step: attended.copy_(attend(step, queries)))
            return attended

        tokens, positions, slots = self._inputs[:, :bucket]
        recorded = replace(
            batch, token_ids=tokens, positions=positions, slots=slots, logit_indices=self._places[:bucket],
            attend_between=attend_between,
        )  # fmt: skip
        try:
            hidden = self._model.compute_hidden(recorded, self._kv_cache)
        finally:
            taking.clear()
        if not self._leave_eager_unless(num_attended):
            raise _NotInPiecesError
        return self._buffer("hidden", hidden).copy_(hidden)

    def _buffer(self, place: str, like: torch.Tensor) -> torch.Tensor:
        """Fixed memory for as many rows as `like` has. It is made outside any capture: runs come ahead of one."""
        key = (place, like.shape[1:], like.dtype)
        if key not in self._buffers:
            self._buffers[key] = like.new_empty((self.buckets[-1], *like.shape[1:]))
        return self._buffers[key][: like.shape[0]]

    def _make_padding_batch(self) -> Batch:
        """A batch of one chunk without tokens."""
        device = self._places.device
        nothing, zero = self._places[:0], torch.zeros(1, dtype=torch.int32, device=device)
        return Batch(
            token_ids=nothing, positions=nothing, slots=nothing, block_tables=zero[:, None], context_lens=zero,
            cu_seqlens_q=torch.zeros(2, dtype=torch.int32, device=device), num_decodes=0, max_context_len=1,
            logit_indices=nothing,
        )  # fmt: skip


def token_buckets(max_tokens: int) -> list[int]:
    """Numbers of tokens of graphs: 16, 32, every 64, and `max_tokens`."""
    steps = [16, 32, *range(_STEP, max_tokens, _STEP)]
    return [*(step for step in steps if step < max_tokens), max_tokens]
