"""FlashInfer's batch prefill over the same pages, planned once for a call's tables and lengths."""

from typing import Any

import torch

from experiments.peers.flashinfer_pages import Pages, workspace
from experiments.peers.installed import MadeOnce, needs
from tkernels import Variant

_planned: MadeOnce[Any] = MadeOnce()


def paged_prefill(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor, scale: float, *, max_context_len: int | None = None,
    causal: bool = True,
) -> Any:  # fmt: skip
    """The op, for contexts of at least one token and no rows past the last chunk."""
    paged = {"k_cache": k_cache, "block_tables": block_tables, "context_lens": context_lens}

    def planned() -> Any:
        import flashinfer

        pages, (_, heads, dim), (_, page, heads_kv, _) = Pages.of(paged), q.shape, k_cache.shape
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(q.device), "NHD")
        wrapper.plan(
            cu_seqlens_q, pages.indptr, pages.indices, pages.last_page_len, heads, heads_kv, dim, page,
            causal=causal, sm_scale=scale, q_data_type=q.dtype, kv_data_type=k_cache.dtype,
        )  # fmt: skip
        return wrapper

    wrapper = _planned.get({**paged, "q": q, "cu_seqlens_q": cu_seqlens_q}, planned)
    return wrapper.run(q, (k_cache, v_cache))


VARIANT = Variant(
    wins="a peer",
    function=paged_prefill,
    supports=needs("flashinfer"),
    deterministic=False,
    batch_invariant=False,
)
