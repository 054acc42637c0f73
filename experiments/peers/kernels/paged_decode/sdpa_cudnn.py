"""torch's SDPA, its cudnn backend, on keys and values that were gathered before."""

from typing import Any

import torch
from torch.nn.attention import SDPBackend

from experiments.peers.dense_attention import dense_attention
from experiments.peers.installed import needs
from tkernels import Variant

_attend = dense_attention(SDPBackend.CUDNN_ATTENTION)


def paged_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
    context_lens: torch.Tensor, scale: float, *, max_context_len: int | None = None, window: int | None = None,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """The op, for contexts of one length."""
    return _attend({"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_tables": block_tables,
                    "context_lens": context_lens, "scale": scale})  # fmt: skip


VARIANT = Variant(
    wins="a peer: dense keys, no pages",
    function=paged_decode,
    supports=needs(None, options=("window", "k_scale", "v_scale", "return_lse")),
    deterministic=False,
    batch_invariant=False,
)
