"""torch's SDPA on dense keys and values, one variant per backend: what attention costs without pages.

Gathering the pages is set-up, done once for a call's tensors: the peer is SDPA at its best.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.peers.installed import MadeOnce
from tkernels.ops.paged_cache import gather_context
from tkernels.variant import UnsupportedError


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
