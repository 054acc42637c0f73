"""torch's SDPA on dense keys and values, one variant per backend: what attention costs without pages.

Gathering the pages is set-up, done once for a call's tensors: the peer is SDPA at its best.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.peers.installed import MadeOnce, needs
from tkernels.ops.paged_cache import gather_context
from tkernels.variant import UnsupportedError, Variant


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


def _made(arguments: dict[str, Any]) -> DenseContext:
    length = _equal(arguments["context_lens"], "contexts")
    starts = arguments.get("cu_seqlens_q")
    queries = 1 if starts is None else _equal(starts.diff(), "chunks")
    k, v = (
        gather_context(arguments[name], arguments["block_tables"], arguments["context_lens"])[:, :length].transpose(
            1, 2
        )
        for name in ("k_cache", "v_cache")
    )
    return DenseContext(k, v, queries)


def dense_attention(backend: SDPBackend) -> Callable[[dict[str, Any]], torch.Tensor]:
    """Computes paged_decode or paged_prefill, given its arguments by name, on dense tensors made of them once."""
    contexts: MadeOnce[DenseContext] = MadeOnce()

    def attend(arguments: dict[str, Any]) -> torch.Tensor:
        q, scale = arguments["q"], arguments["scale"]
        paged = {name: arguments.get(name) for name in ("k_cache", "v_cache", "block_tables", "context_lens")}
        context = contexts.get({**paged, "cu_seqlens_q": arguments.get("cu_seqlens_q")}, lambda: _made(arguments))
        rows = q.unflatten(0, (-1, context.queries)).transpose(1, 2)  # [B, Hq, M, D]
        mask = None
        if arguments.get("causal", True) and context.queries > 1:
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
        return attend({"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_tables": block_tables,
                       "context_lens": context_lens, "scale": scale})  # fmt: skip

    return _dense_variant(paged_decode)


def dense_prefill(backend: SDPBackend) -> Variant:
    """paged_prefill by one backend of SDPA, for chunks of one length over contexts of one length."""
    attend = dense_attention(backend)

    def paged_prefill(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
        cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor, scale: float, *, max_context_len: int | None = None,
        causal: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        return attend({"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_tables": block_tables,
                       "cu_seqlens_q": cu_seqlens_q, "context_lens": context_lens, "scale": scale,
                       "causal": causal})  # fmt: skip

    return _dense_variant(paged_prefill)


def _dense_variant(function: Callable[..., torch.Tensor]) -> Variant:
    return Variant(
        wins="a peer: dense keys, no pages",
        function=function,
        supports=needs(None),
        deterministic=False,
        batch_invariant=False,
    )
