"""The paged key-value cache: plain tensors, one pair per layer."""

from __future__ import annotations

import torch

from tmodel.config import ModelConfig

KVCache = list[tuple[torch.Tensor, torch.Tensor]]


def allocate_kv_cache(
    config: ModelConfig, num_blocks: int, block_size: int, *, device: torch.device | str, dtype: torch.dtype
) -> KVCache:
    """Per layer (k_cache, v_cache), each [P, S, Hkv, D] with P = `num_blocks` and S = `block_size`.

    Zeroed rather than left as it comes: on a CPU an untouched page costs nothing, and no stale NaN can hide in a slot.
    """
    if num_blocks < 1 or block_size < 1:
        raise ValueError(f"a KV cache needs at least one block of one token, got {num_blocks} blocks of {block_size}")
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
    return [
        (torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype))
        for _ in range(config.num_layers)
    ]


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes across all layers, keys and values together."""
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize
