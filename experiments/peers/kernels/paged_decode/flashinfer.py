"""FlashInfer's batch decode over the same pages, planned once for a call's tables and lengths."""

from typing import Any

import torch

from experiments.peers.flashinfer_pages import Pages, workspace
from experiments.peers.installed import MadeOnce, needs
from tkernels import Variant

_planned: MadeOnce[Any] = MadeOnce()


def paged_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
    context_lens: torch.Tensor, scale: float, *, max_context_len: int | None = None,
) -> Any:  # fmt: skip
    """The op, for contexts of at least one token."""
    paged = {"k_cache": k_cache, "block_tables": block_tables, "context_lens": context_lens}

    def planned() -> Any:
        import flashinfer

        pages, (_, heads, dim), (_, page, heads_kv, _) = Pages.of(paged), q.shape, k_cache.shape
        # Tensor cores pay where a KV head serves several query heads, as its documentation says.
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(q.device), "NHD", use_tensor_cores=heads >= 4 * heads_kv
        )
        wrapper.plan(
            pages.indptr, pages.indices, pages.last_page_len, heads, heads_kv, dim, page,
            sm_scale=scale, q_data_type=q.dtype, kv_data_type=k_cache.dtype,
        )  # fmt: skip
        return wrapper

    # The queries tell sets of data apart that share a table's address in turn.
    return _planned.get({**paged, "q": q}, planned).run(q, (k_cache, v_cache))


VARIANT = Variant(
    wins="a peer",
    function=paged_decode,
    supports=needs("flashinfer"),
    deterministic=False,
    batch_invariant=False,
)
