"""torch's SDPA on dense keys and values, one variant per backend: what attention costs without pages.

Gathering the pages, and a mask where one is needed, is set-up, done once for a call's tensors: the peer is SDPA at its
best.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.peers.variants import MadeOnce, peer_variant
from tkernels.ops.paged_cache import gather_context
from tkernels.variant import UnsupportedError, Variant

_WINS = "a peer: dense keys, no pages"


@dataclass(frozen=True)
class DenseContext:
    """Keys and values [B, Hkv, L, D] and [B, Hkv, L, Dv]; M, the queries of each sequence. mask: what SDPA is given for
    these to be causal, aligned at the end.
    """

    k: torch.Tensor
    v: torch.Tensor
    queries: int
    mask: Any = None


def _equal(lengths: torch.Tensor, what: str) -> int:
    values = set(lengths.tolist())
    if len(values) != 1:
        raise UnsupportedError(f"dense SDPA takes one length for all sequences; {what} are {sorted(values)[:5]}")
    return int(values.pop())


def _gather(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None, backend: SDPBackend, causal: bool,
) -> DenseContext:  # fmt: skip
    length = _equal(context_lens, "contexts")
    queries = 1 if cu_seqlens_q is None else _equal(cu_seqlens_q.diff(), "chunks")
    k, v = (
        gather_context(cache, block_tables, context_lens)[:, :length].transpose(1, 2) for cache in (k_cache, v_cache)
    )
    mask = _causal_mask(queries, length, k, backend) if causal and queries > 1 else None
    return DenseContext(k, v, queries, mask)


def _causal_mask(queries: int, length: int, like: torch.Tensor, backend: SDPBackend) -> Any:
    """What has a backend leave out the keys after each query, of which the last sees all.

    torch's own form of it, which the flash backend has a kernel for, is made a matrix in every call for a backend that
    has none, as cuDNN's has where there are fewer queries than keys. That matrix is set-up here, and no part of a call.
    """
    if backend != SDPBackend.FLASH_ATTENTION and queries < length:
        shape = (queries, length)
        return torch.full(shape, -math.inf, dtype=like.dtype, device=like.device).triu_(length - queries + 1)
    # It imports torch.compile's whole machinery: most of a second, which naming a variant should not cost.
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(queries, length)


def dense_attention(backend: SDPBackend) -> Callable[..., torch.Tensor]:
    """Computes paged_decode or paged_prefill on dense tensors, which are made once of the pages that it is given."""
    contexts: dict[bool, MadeOnce[DenseContext]] = {causal: MadeOnce() for causal in (False, True)}

    def attend(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
        context_lens: torch.Tensor, scale: float, cu_seqlens_q: torch.Tensor | None = None, causal: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        paged = {"k_cache": k_cache, "v_cache": v_cache, "block_tables": block_tables, "context_lens": context_lens}
        made_of = {**paged, "cu_seqlens_q": cu_seqlens_q}
        context = contexts[causal].get(
            made_of, lambda: _gather(**paged, cu_seqlens_q=cu_seqlens_q, backend=backend, causal=causal)
        )
        rows = q.unflatten(0, (-1, context.queries)).transpose(1, 2)  # [B, Hq, M, D]
        gqa = q.shape[1] != context.k.shape[1]
        with sdpa_kernel([backend]):
            out = F.scaled_dot_product_attention(rows, context.k, context.v, context.mask, scale=scale, enable_gqa=gqa)
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
