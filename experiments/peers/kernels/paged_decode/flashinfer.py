"""FlashInfer's batch decode over the same pages."""

from typing import Any

import torch

from experiments.peers.flashinfer_pages import attend
from experiments.peers.variants import peer_variant


def paged_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
    context_lens: torch.Tensor, scale: float, *, max_context_len: int | None = None,
) -> Any:  # fmt: skip
    """The op, for contexts of at least one token."""

    def make_wrapper(workspace: torch.Tensor) -> Any:
        import flashinfer

        # Tensor cores pay where a KV head serves several query heads, as its documentation says.
        tensor_cores = q.shape[1] >= 4 * k_cache.shape[2]
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)

    return attend(make_wrapper, q, (k_cache, v_cache), block_tables, context_lens, scale)


VARIANT = peer_variant("flashinfer", paged_decode)
