"""How many blocks the KV cache gets."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import tmodel
from tmodel.weights import Checkpoint

_CPU_DEFAULT_BYTES = 2**30
_GPU_FRACTION = 0.9  # the rest is for activations, logits and the allocator's slack


def num_kv_blocks(
    directory: Path | None,
    config: tmodel.ModelConfig,
    *,
    kv_cache_bytes: int | None,
    kv_cache_fraction: float | None,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int,
) -> int:
    """The blocks that `kv_cache_bytes` hold, or `kv_cache_fraction` of the device's memory; at most those that
    `max_tokens` tokens can fill.

    The fraction is of all that the device has, whatever else is on it: the weights of `directory`, and on a GPU what is
    taken already, go off it. Where neither is given: 9/10 of a GPU, 1 GiB of a CPU's memory, which the operating system
    hands out as it is used. A directory that is not known yet, None, holds weights of no size. ValueError where both
    are given, or not one block fits.
    """
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two, got {block_size}")
    if kv_cache_fraction is not None:
        if kv_cache_bytes is not None:
            raise ValueError("kv_cache_bytes and kv_cache_fraction are two ways to say one thing: give one")
        if not 0.0 < kv_cache_fraction <= 1.0:
            raise ValueError(f"kv_cache_fraction must be above 0 and at most 1, got {kv_cache_fraction!r}")
    elif device.type != "cpu":
        kv_cache_fraction = _GPU_FRACTION
    if kv_cache_bytes is not None:
        available = kv_cache_bytes
    elif kv_cache_fraction is not None:
        total, taken = device_memory(device)
        weights = weight_bytes(directory, config, dtype) if directory is not None else 0
        available = max(0, int(total * kv_cache_fraction) - taken - weights)
    else:
        available = _CPU_DEFAULT_BYTES
    block_bytes = tmodel.kv_bytes_per_block(config, block_size, dtype)
    num_blocks = min(available // block_bytes, max(1, -(-max_tokens // block_size)))
    if num_blocks < 1:
        given = "kv_cache_bytes is" if kv_cache_bytes is not None else "the memory left for the KV cache is"
        raise ValueError(f"{given} {available}, a block of {block_size} tokens takes {block_bytes} bytes")
    return num_blocks


def num_host_blocks(
    config: tmodel.ModelConfig, swap_bytes: int, *, preemption: str, block_size: int, dtype: torch.dtype
) -> int:
    """The blocks that `swap_bytes` of host memory hold, 0 where nothing is swapped; ValueError where swapping gets
    none.
    """
    if preemption != "swap":
        return 0
    block_bytes = tmodel.kv_bytes_per_block(config, block_size, dtype)
    if swap_bytes < block_bytes:
        raise ValueError(
            f"preemption 'swap' needs swap_bytes for a block at least: one of {block_size} tokens takes {block_bytes} "
            f"bytes, got {swap_bytes}"
        )
    return swap_bytes // block_bytes


def device_memory(device: torch.device) -> tuple[int, int]:
    """The bytes that a device has, and how many of them are taken. On a CPU none are: most of what is, the operating
    system would give back.
    """
    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0
    free, total = torch.cuda.mem_get_info(device)
    return total, total - free


def weight_bytes(directory: Path, config: tmodel.ModelConfig, dtype: torch.dtype) -> int:
    """What the weights, which are not loaded yet, will take."""
    if config.quantization is None:
        stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        return stored * dtype.itemsize // config.dtype.itemsize
    with Checkpoint(directory, device="cpu", dtype=dtype) as checkpoint:
        return checkpoint.bytes_as(dtype) + config.quantization.zeros_bytes
