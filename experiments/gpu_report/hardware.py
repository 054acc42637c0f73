"""What a card is, and what it can do at most by the project's own timer: the ceilings that the marks are shares of."""

import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from experiments.runs.environment import find_version, git_state
from tkernels.clocks import read_clocks
from tkernels.device import device_facts
from tkernels.timing import Timing, time_call

# Far above any L2 cache; a copy of 4 GiB takes 2 ms at 4.3 TB/s.
_COPIED_BYTES = 4 * 2**30
_MATMUL_SIZE = 8192

_PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "gemlite", "flashinfer-python", "nvidia-ml-py")


def describe_device(device: torch.device) -> dict[str, Any]:
    """The parts of a run's environment.json: the device, the software, the machine and the code."""
    facts = device_facts(device)
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": {
            "name": facts.name, "type": device.type, "arch": facts.arch, "multiprocessors": facts.multiprocessors,
            "memory_bytes": properties.total_memory, "l2_bytes": properties.L2_cache_size, "triton": "compiled",
            "cuda": torch.version.cuda, "clocks": asdict(read_clocks(device)),
        },
        "versions": {"python": platform.python_version(), **{name: find_version(name) for name in _PACKAGES}},
        "host": {"system": platform.platform(), "cpus": os.cpu_count()},
        "git": git_state(Path(__file__).parent),
    }  # fmt: skip


def measure_rates(
    device: torch.device, copied_bytes: int = _COPIED_BYTES, size: int = _MATMUL_SIZE
) -> tuple[dict[str, float], dict[str, Any]]:
    """Copy (bytes read plus bytes written), read and bf16 matmul rates, on random data: zeros multiply faster.

    Returns:
        The figures of a row of rates, and the timings that they are from.
    """
    source = torch.empty(copied_bytes // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    timings: dict[str, Timing] = {
        "copy": time_call(lambda: target.copy_(source), device),
        "read": time_call(lambda: torch.amax(source), device),  # a maximum reads everything and writes one number
        "matmul": time_call(lambda: a @ b, device),
    }
    seconds = {name: timing.median_us / 1e6 for name, timing in timings.items()}
    rates = {
        "copy_bytes_per_s": 2.0 * copied_bytes / seconds["copy"],
        "read_bytes_per_s": float(copied_bytes) / seconds["read"],
        "matmul_flops_per_s": 2.0 * size**3 / seconds["matmul"],
    }
    return rates, {name: asdict(timing) for name, timing in timings.items()}
