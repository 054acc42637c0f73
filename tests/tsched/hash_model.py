"""A model whose KV cache holds token ids and whose logits point at a hash of all it reads back through the batch."""

from __future__ import annotations

import numpy as np
import torch

from tests.tsched.simulated_device import VOCAB, next_token
from tmodel.batch import Batch
from tmodel.kv_cache import KVCache
from tsched.scheduling.block_pool import BlockIds

Pages = tuple[torch.Tensor, ...]


def hash_cache(num_blocks: int, block_size: int) -> KVCache:
    shape = (num_blocks, block_size, 1, 1)
    return [(torch.full(shape, -1.0, dtype=torch.float64), torch.full(shape, -1.0, dtype=torch.float64))]


class HashPages:
    """Moves pages of a hash cache, and notes how many each way."""

    def __init__(self, kv_cache: KVCache, num_host_blocks: int) -> None:
        self._device = kv_cache[0]
        self._host = tuple(torch.full((num_host_blocks, *cache.shape[1:]), -2.0).double() for cache in self._device)
        self.moved = {"swap_out": 0, "swap_in": 0, "copy": 0}

    def _move(self, name: str, sources: Pages, targets: Pages, pages: BlockIds) -> None:
        self.moved[name] += pages.shape[1]
        source_pages, target_pages = torch.from_numpy(pages).long()
        for source, target in zip(sources, targets, strict=True):
            target[target_pages] = source[source_pages]

    def swap_out(self, pages: BlockIds) -> None:
        self._move("swap_out", self._device, self._host, pages)

    def swap_in(self, pages: BlockIds) -> None:
        self._move("swap_in", self._host, self._device, pages)

    def copy(self, pages: BlockIds) -> None:
        self._move("copy", self._device, self._device, pages)


class HashModel:
    """Logits [n, VOCAB]: 5 at the next token, 4 at the one after it (mod VOCAB), falling on from there. With a `window`
    they follow from the last so many tokens.
    """

    vocab_size = VOCAB
    dtype = torch.float32
    window: int | None = None

    def logits_after(self, tokens: np.ndarray) -> torch.Tensor:
        """[VOCAB], those that follow `tokens` [n] int64."""
        return (5.0 - (torch.arange(VOCAB) - next_token(tokens)) % VOCAB).clamp(min=-3)

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def __call__(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        self.batches.append(batch)
        self.write(batch, kv_cache)
        return self.read(batch, kv_cache)

    @staticmethod
    def write(batch: Batch, kv_cache: KVCache) -> None:
        """What depends on single tokens: it puts them into their slots."""
        tokens, positions = (cache.reshape(-1) for cache in kv_cache[0])
        kept = batch.slots >= 0
        slots = batch.slots[kept]
        assert slots.unique().numel() == slots.numel()
        tokens[slots] = batch.token_ids[kept].double()
        positions[slots] = batch.positions[kept].double()

    def read(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        """What depends on the tokens before: logits [n, VOCAB] at `batch.logit_indices`."""
        tokens, positions = (cache.reshape(-1) for cache in kv_cache[0])
        block_size = kv_cache[0][0].shape[1]
        tables = shared_tables(batch, block_size).long()
        # The row of each token, and the context it sees, as the kernels work them out.
        rows = torch.arange(batch.num_decodes)
        starts = batch.cu_seqlens_q
        counts = torch.cat((torch.ones(batch.num_decodes, dtype=torch.int64), (starts[1:] - starts[:-1]).long()))
        assert (starts[:1] == 0).all()
        rows = torch.repeat_interleave(torch.arange(counts.numel()), counts)
        assert rows.numel() == batch.token_ids.numel()
        ends = counts.cumsum(0)
        assert int(batch.context_lens.max()) <= batch.max_context_len
        logits = torch.zeros(batch.logit_indices.numel(), self.vocab_size, dtype=self.dtype)
        for i, index in enumerate(batch.logit_indices.tolist()):
            row = int(rows[index])
            context = int(batch.context_lens[row]) - int(ends[row] - 1 - index)
            if context == 0:  # padding
                assert batch.slots[index] < 0
                continue
            assert int(batch.positions[index]) == context - 1
            place = torch.arange(0 if self.window is None else max(0, context - self.window), context)
            slots = tables[row][place // block_size] * block_size + place % block_size
            assert (positions[slots] == place).all()
            logits[i] = self.logits_after(tokens[slots].long().numpy())
        return logits


def shared_tables(batch: Batch, block_size: int) -> torch.Tensor:
    """[B, N], the tables by which attention reads: a group's prefix by that of its first row."""
    if batch.prefix_groups is None:
        return batch.block_tables
    tables, groups = batch.block_tables.clone(), batch.prefix_groups
    starts = groups.group_starts.tolist()
    assert starts[0] == 0, "sequences before the first group"
    assert starts[-1] <= batch.num_decodes, "groups of more than decodes"
    for begin, end, prefix in zip(starts, starts[1:], groups.prefix_lens.tolist(), strict=False):
        assert begin <= end, "groups overlap"
        if begin < end:
            assert prefix % block_size == 0, "a part of a page is shared"
            assert prefix <= groups.max_prefix_len, "a prefix beyond its bound"
            assert prefix <= int(batch.context_lens[begin:end].min()), "a prefix beyond a context"
            tables[begin:end, : prefix // block_size] = tables[begin, : prefix // block_size]
    return tables
