"""How many blocks the KV cache gets."""

from __future__ import annotations

from pathlib import Path

import torch

import tmodel

_CPU_DEFAULT_BYTES = 2**30
_GPU_SHARE = 0.9  # the rest is for activations, logits and the allocator's slack


def num_kv_blocks(
    directory: Path,
    config: tmodel.ModelConfig,
    *,
    kv_cache_bytes: int | None,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int,
) -> int:
    """The blocks that `kv_cache_bytes` hold, at most those that `max_tokens` tokens can fill.

    None takes, on a GPU, 9/10 of what is free less what the weights of `directory` will take; on a CPU, 1 GiB, which
    the operating system hands out as it is used. ValueError where not one block fits.
    """
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two, got {block_size}")
    available = kv_cache_bytes
    if available is None:
        available = _CPU_DEFAULT_BYTES if device.type == "cpu" else _free_gpu_bytes(directory, config, dtype, device)
    block_bytes = tmodel.kv_bytes_per_block(config, block_size, dtype)
    num_blocks = min(available // block_bytes, max(1, -(-max_tokens // block_size)))
    if num_blocks < 1:
        given = "kv_cache_bytes is" if kv_cache_bytes is not None else "the memory left for the KV cache is"
        raise ValueError(f"{given} {available}, a block of {block_size} tokens takes {block_bytes} bytes")
    return num_blocks


def _free_gpu_bytes(directory: Path, config: tmodel.ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    weights = stored * dtype.itemsize // config.dtype.itemsize
    return max(0, int(free * _GPU_SHARE) - weights)
