"""From a plan's rows to the packed tensors that the model reads."""

from __future__ import annotations

import numpy as np
import torch

from tmodel.batch import Batch
from tsched.scheduler import StepPlan
from tsched.sequence import Ints, SequenceTable

_NO_PREFILLS = np.zeros(1, dtype=np.int32)


class BatchBuilder:
    """Builds a step's Batch on `device`. The tokens that the plan names must be known to the table."""

    def __init__(self, table: SequenceTable, device: torch.device) -> None:
        self._table = table
        self._device = device
        self._width = table.blocks.shape[1]
        # Flat views: one index array is cheaper than two.
        self._tokens = table.tokens.reshape(-1)
        self._blocks = table.blocks.reshape(-1)
        self._tokens_stride = table.tokens.shape[1]

    def build(self, plan: StepPlan) -> Batch:
        """`plan`, which is not empty, as one Batch: its decode rows, then its prefill chunks, no padding."""
        rows, starts = plan.rows, plan.starts
        num_decodes = plan.num_decodes
        context = plan.ends
        if num_decodes == rows.size:
            token_rows, positions, logits = rows, starts, plan.sampled
            cu_seqlens = _NO_PREFILLS
        else:
            ends = np.cumsum(plan.counts)
            token_rows = np.repeat(rows, plan.counts)  # [T]
            positions = np.arange(plan.num_tokens) + np.repeat(context - ends, plan.counts)  # [T]
            logits = ends[plan.sampled] - 1
            cu_seqlens = np.zeros(rows.size - num_decodes + 1, dtype=np.int32)
            np.subtract(ends[num_decodes:], num_decodes, out=cu_seqlens[1:], casting="same_kind")
        block_size = self._table.block_size
        token_ids = self._tokens.take(token_rows * self._tokens_stride + positions)
        page, offset = np.divmod(positions, block_size)
        slots = self._blocks.take(token_rows * self._width + page) * np.int64(block_size) + offset
        max_context = int(context.max())
        num_pages = -(-max_context // block_size)
        tables = self._table.blocks[:, :num_pages].take(rows, axis=0)  # [B, N]
        wide, narrow = self._tensors(
            (token_ids, positions, slots, logits), (tables.reshape(-1), context.astype(np.int32), cu_seqlens)
        )
        return Batch(
            token_ids=wide[0],
            positions=wide[1],
            slots=wide[2],
            block_tables=narrow[0].view(rows.size, num_pages),
            context_lens=narrow[1],
            cu_seqlens_q=narrow[2],
            num_decodes=num_decodes,
            max_context_len=max_context,
            logit_indices=wide[3],
        )

    def _tensors(
        self, wide: tuple[Ints, ...], narrow: tuple[np.ndarray, ...]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """int64 and int32 arrays as tensors on the device; to a GPU in two copies, because a copy's cost is its
        launch.
        """
        if self._device.type == "cpu":
            return [torch.from_numpy(a) for a in wide], [torch.from_numpy(a) for a in narrow]
        return self._copied(wide), self._copied(narrow)

    def _copied(self, arrays: tuple[np.ndarray, ...]) -> list[torch.Tensor]:
        packed = torch.from_numpy(np.concatenate(arrays)).to(self._device)
        return list(packed.split([array.size for array in arrays]))
