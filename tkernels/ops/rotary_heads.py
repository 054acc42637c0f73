"""What the launches that norm and rotate heads share: their arguments, and how heads are cut into tiles."""

from typing import Any

import torch
import triton

from tkernels.ops.arguments import pointers


def rotary_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    interleaved: bool,
    block_heads: int,
) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, tokens x tiles of heads, queries' before keys', and the arguments of a kernel for it."""
    (tokens, q_heads, head_dim), half = q.shape, cos.shape[1]
    q_tiles = triton.cdiv(q_heads, block_heads)
    tensors = (q, k, cos, sin, positions, q_weight, k_weight)
    return (tokens, q_tiles + triton.cdiv(k.shape[1], block_heads)), {
        **pointers("q[th] k[th] cos[l] sin[l] positions q_weight k_weight", *tensors),
        "q_heads": q_heads,
        "kv_heads": k.shape[1],
        "q_tiles": q_tiles,
        "eps": eps,
        "HEAD_DIM": head_dim,
        "HALF": half,
        "INTERLEAVED": interleaved,
        "BLOCK_HEADS": block_heads,
        "BLOCK_HALF": triton.next_power_of_2(half),
        "BLOCK_REST": triton.next_power_of_2(max(head_dim - 2 * half, 1)),
    }
