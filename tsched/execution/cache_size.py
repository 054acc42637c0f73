"""Computes the memory for the KV cache."""

from __future__ import annotations

from pathlib import Path

import torch

import tmodel
from tkernels.runtime import choose_runtime
from tmodel.weights import Checkpoint
from tsched.options import CPU_CACHE_BYTES, GPU_FRACTION, EngineOptions


def compute_cache_bytes(
    options: EngineOptions,
    config: tmodel.ModelConfig,
    weights: Path | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> int:
    """Computes the bytes for the KV cache: kv_cache_bytes, or kv_cache_fraction of the device less what is taken.

    The fraction is of the device's whole memory; the weights, and on a GPU all memory in use, are subtracted. By
    default it is 9/10 of a GPU. A CPU's default is 1 GiB, which the operating system hands out as it is used.

    Args:
        options: The engine's options.
        config: The model's configuration.
        weights: The directory of its weights; None, for weights that are not made yet, counts as 0 bytes.
        device: Where the cache will be.
        dtype: That the model is served in.
    """
    if options.kv_cache_bytes is not None:
        return options.kv_cache_bytes
    fraction = options.kv_cache_fraction
    if fraction is None:
        if choose_runtime(device).is_host:
            return CPU_CACHE_BYTES
        fraction = GPU_FRACTION
    total, taken = device_memory(device)
    return max(
        0, int(total * fraction) - taken - (0 if weights is None else estimate_weight_bytes(weights, config, dtype))
    )


def device_memory(device: torch.device) -> tuple[int, int]:
    """(bytes of a device's memory, bytes in use), see Runtime.measure_memory."""
    return choose_runtime(device).measure_memory()


def estimate_weight_bytes(directory: Path, config: tmodel.ModelConfig, dtype: torch.dtype) -> int:
    """Estimates the bytes of the weights in `directory` once they are loaded as `dtype`."""
    if config.quantization is None:
        stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        return stored * dtype.itemsize // config.dtype.itemsize
    with Checkpoint(directory, device="cpu", dtype=dtype) as checkpoint:
        return checkpoint.count_bytes_as(dtype) + config.quantization.added_bytes
