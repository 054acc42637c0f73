"""What a card can do at most, measured with the project's own timer: the ceilings that the marks are shares of."""

import importlib.metadata
from collections.abc import Mapping
from typing import Any

import torch

from tkernels.clocks import read_clocks
from tkernels.device import device_facts
from tkernels.timing import Timing, time_call

# Far above any L2 cache; a copy of 4 GiB takes 2 ms at 4.3 TB/s.
_COPIED_BYTES = 4 * 2**30
_MATMUL_SIZE = 8192

_PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "gemlite", "flashinfer-python", "nvidia-ml-py")


def describe(device: torch.device) -> dict[str, Any]:
    """The device's and the software's names."""
    facts = device_facts(device)
    properties = torch.cuda.get_device_properties(device)
    return {
        "kind": "device",
        "name": facts.name,
        "arch": facts.arch,
        "multiprocessors": facts.multiprocessors,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "versions": {"cuda": torch.version.cuda, **{name: _version(name) for name in _PACKAGES}},
        "clocks": vars(read_clocks(device)),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def rates(device: torch.device, copied_bytes: int = _COPIED_BYTES, size: int = _MATMUL_SIZE) -> Mapping[str, Any]:
    """Copy (bytes read plus bytes written), read and bf16 matmul rates, on random data: zeros multiply faster."""
    copy, read = _memory(device, copied_bytes)
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    matmul = time_call(lambda: a @ b, device)
    return {
        "kind": "rates",
        "copy_bytes_per_s": 2.0 * copied_bytes / copy.median_us * 1e6,
        "read_bytes_per_s": float(copied_bytes) / read.median_us * 1e6,
        "matmul_flops_per_s": 2.0 * size**3 / matmul.median_us * 1e6,
        "timers": {"copy": copy.timer, "read": read.timer, "matmul": matmul.timer},
        "samples_us": {name: list(t.samples_us) for name, t in (("copy", copy), ("read", read), ("matmul", matmul))},
        "clocks": {"before": vars(matmul.before), "after": vars(matmul.after)},
    }


def _memory(device: torch.device, count: int) -> tuple[Timing, Timing]:
    """The times of a copy of `count` bytes and of reading them."""
    source = torch.empty(count // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    copy = time_call(lambda: target.copy_(source), device)
    # A maximum reads everything and writes one number.
    return copy, time_call(lambda: torch.amax(source), device)
