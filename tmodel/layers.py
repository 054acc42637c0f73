"""What architectures share. Layers hold weights and call the KernelSet; none of them knows a checkpoint's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tkernels import KernelSet
from tmodel.batch import Batch


@dataclass(frozen=True, slots=True)
class Linear:
    """x [T, K] -> [T, N] by the chosen matmul, with weight [N, K] and, where there is one, bias [N]."""

    matmul: Callable[..., torch.Tensor]
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return self.matmul(x, self.weight)
        return self.matmul(x, self.weight, bias=self.bias)


class PagedAttention:
    """One step's attention over the paged cache: decode rows through one kernel, prefill chunks through the other.

    Made once per step, so that what depends on the batch alone is not cut anew in every layer.
    """

    __slots__ = (
        "context_lens",
        "cu_seqlens_q",
        "decode_tables",
        "kernels",
        "max_context_len",
        "num_decodes",
        "num_prefills",
        "prefill_context_lens",
        "prefill_tables",
        "scale",
    )

    def __init__(self, kernels: KernelSet, batch: Batch, scale: float) -> None:
        split = batch.num_decodes
        self.kernels = kernels
        self.scale = scale
        self.max_context_len = batch.max_context_len
        self.num_decodes = split
        self.num_prefills = batch.num_prefills
        self.decode_tables, self.context_lens = batch.block_tables[:split], batch.context_lens[:split]
        self.prefill_tables, self.prefill_context_lens = batch.block_tables[split:], batch.context_lens[split:]
        self.cu_seqlens_q = batch.cu_seqlens_q

    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """q [T, Hq, D] -> [T, Hq, D], padding's rows undefined. The caches hold this step's keys and values already."""
        split = self.num_decodes
        if split == 0 and self.num_prefills:
            return self._prefill(q, k_cache, v_cache, window)
        decoded: torch.Tensor = self.kernels.paged_decode(
            q[:split], k_cache, v_cache, self.decode_tables, self.context_lens, self.scale,
            max_context_len=self.max_context_len, window=window,
        )  # fmt: skip
        if split == q.shape[0]:
            return decoded
        # Past the decode rows: prefill chunks and padding, or padding alone, for which there is nothing to launch.
        rest = self._prefill(q[split:], k_cache, v_cache, window) if self.num_prefills else torch.zeros_like(q[split:])
        return torch.cat((decoded, rest))

    def _prefill(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        attended: torch.Tensor = self.kernels.paged_prefill(
            q, k_cache, v_cache, self.prefill_tables, self.cu_seqlens_q, self.prefill_context_lens, self.scale,
            max_context_len=self.max_context_len, window=window,
        )  # fmt: skip
        return attended
