"""torch's SDPA on dense keys and values, one variant per backend: what attention costs without pages.

Gathering the pages is set-up, done once for a call's tensors: the peer is SDPA at its best.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.peers.variants import MadeOnce, peer_variant
from tkernels.ops.paged_cache import gather_context
from tkernels.variant import UnsupportedError, Variant

_WINS = "a peer: dense keys, no pages"


@dataclass(frozen=True)
class DenseContext:
    """Keys and values [B, Hkv, L, D] and [B, Hkv, L, Dv]; M, the queries of each sequence."""

    k: torch.Tensor
    v: torch.Tensor
    queries: int


def _equal(lengths: torch.Tensor, what: str) -> int:
    values = set(lengths.tolist())
    if len(values) != 1:
        raise UnsupportedError(f"dense SDPA takes one length for all sequences; {what} are {sorted(values)[:5]}")
    return int(values.pop())


def _gather(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
) -> DenseContext:  # fmt: skip
    length = _equal(context_lens, "contexts")
    queries = 1 if cu_seqlens_q is None else _equal(cu_seqlens_q.diff(), "chunks")
    k, v = (
        gather_context(cache, block_tables, context_lens)[:, :length].transpose(1, 2) for cache in (k_cache, v_cache)
    )
    return DenseContext(k, v, queries)


def dense_attention(backend: SDPBackend) -> Callable[..., torch.Tensor]:
    """Computes paged_decode or paged_prefill on dense tensors, which are made once of the pages that it is given."""
    contexts: MadeOnce[DenseContext] = MadeOnce()

    def attend(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
        context_lens: torch.Tensor, scale: float, cu_seqlens_q: torch.Tensor | None = None, causal: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        paged = {"k_cache": k_cache, "v_cache": v_cache, "block_tables": block_tables, "context_lens": context_lens}
        made_of = {**paged, "cu_seqlens_q": cu_seqlens_q}
        context = contexts.get(made_of, lambda: _gather(**paged, cu_seqlens_q=cu_seqlens_q))
        rows = q.unflatten(0, (-1, context.queries)).transpose(1, 2)  # [B, Hq, M, D]
        mask = None
        if causal and context.queries > 1:
            # It imports torch.compile's whole machinery: most of a second, which naming a variant should not cost.
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(context.queries, context.k.shape[2])
        gqa = q.shape[1] != context.k.shape[1]
        with sdpa_kernel([backend]):
            out = F.scaled_dot_product_attention(rows, context.k, context.v, mask, scale=scale, enable_gqa=gqa)
        return out.transpose(1, 2).flatten(0, 1)  # [T, Hq, Dv]

    return attend


def dense_decode(backend: SDPBackend) -> Variant:
    """paged_decode by one backend of SDPA, for contexts of one length."""
    attend = dense_attention(backend)

    def paged_decode(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
        context_lens: torch.Tensor, scale: float, *, max_context_len: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return attend(q, k_cache, v_cache, block_tables, context_lens, scale)

    return peer_variant(None, paged_decode, wins=_WINS)


def dense_prefill(backend: SDPBackend) -> Variant:
    """paged_prefill by one backend of SDPA, for chunks of one length over contexts of one length."""
    attend = dense_attention(backend)

    def paged_prefill(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
        cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor, scale: float, *, max_context_len: int | None = None,
        causal: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        return attend(q, k_cache, v_cache, block_tables, context_lens, scale, cu_seqlens_q, causal)

    return peer_variant(None, paged_prefill, wins=_WINS)
