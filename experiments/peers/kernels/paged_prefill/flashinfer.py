"""FlashInfer's batch prefill over the same pages."""

from typing import Any

import torch

from experiments.peers.flashinfer_pages import attend
from experiments.peers.variants import peer_variant


def paged_prefill(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor, scale: float, *, max_context_len: int | None = None,
    causal: bool = True,
) -> Any:  # fmt: skip
    """The op, for contexts of at least one token and no rows past the last chunk."""

    def make_wrapper(workspace: torch.Tensor) -> Any:
        import flashinfer

        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    caches = (k_cache, v_cache)
    return attend(make_wrapper, q, caches, block_tables, context_lens, scale, cu_seqlens_q, causal=causal)


VARIANT = peer_variant("flashinfer", paged_prefill)
