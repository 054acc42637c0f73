"""How much memory there is for the KV cache."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import tmodel
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
    """The bytes that there are for the KV cache: kv_cache_bytes, or what kv_cache_fraction of the device leaves.

    The fraction is of all that the device has, whatever else is on it: the weights in the directory `weights`, and on a
    GPU what is taken already, go off it. Where neither is given: 9/10 of a GPU, 1 GiB of a CPU's memory, which the
    operating system hands out as it is used. Weights that are not there yet, None, have no size.
    """
    if options.kv_cache_bytes is not None:
        return options.kv_cache_bytes
    fraction = options.kv_cache_fraction
    if fraction is None:
        if device.type == "cpu":
            return CPU_CACHE_BYTES
        fraction = GPU_FRACTION
    total, taken = device_memory(device)
    return max(
        0, int(total * fraction) - taken - (0 if weights is None else estimate_weight_bytes(weights, config, dtype))
    )


def device_memory(device: torch.device) -> tuple[int, int]:
    """The bytes that a device has, and how many of them are taken. On a CPU none are: most of what is, the operating
    system would give back.
    """
    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0
    free, total = torch.cuda.mem_get_info(device)
    return total, total - free


def estimate_weight_bytes(directory: Path, config: tmodel.ModelConfig, dtype: torch.dtype) -> int:
    """What the weights, which are not loaded yet, will take."""
    if config.quantization is None:
        stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        return stored * dtype.itemsize // config.dtype.itemsize
    with Checkpoint(directory, device="cpu", dtype=dtype) as checkpoint:
        return checkpoint.count_bytes_as(dtype) + config.quantization.zeros_bytes
