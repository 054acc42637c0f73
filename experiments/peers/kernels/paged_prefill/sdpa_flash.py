"""torch's SDPA, its flash backend, on keys and values that were gathered before."""

from typing import Any

import torch
from torch.nn.attention import SDPBackend

from experiments.peers.dense_attention import dense_attention
from experiments.peers.installed import needs
from tkernels import Variant

_attend = dense_attention(SDPBackend.FLASH_ATTENTION)


def paged_prefill(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor, scale: float, *, max_context_len: int | None = None,
    window: int | None = None, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    return_lse: bool = False, causal: bool = True,
) -> Any:  # fmt: skip
    """The op, for chunks of one length over contexts of one length."""
    return _attend({"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_tables": block_tables,
                    "cu_seqlens_q": cu_seqlens_q, "context_lens": context_lens, "scale": scale,
                    "causal": causal})  # fmt: skip


VARIANT = Variant(
    wins="a peer: dense keys, no pages",
    function=paged_prefill,
    supports=needs(None, options=("window", "k_scale", "v_scale", "return_lse")),
    deterministic=False,
    batch_invariant=False,
)
