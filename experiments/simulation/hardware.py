"""GPUs by name: the data sheets' figures, without torch and without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.exits import check_name


@dataclass(frozen=True)
class Gpu:
    """memory_bytes: its own memory. host_bytes_per_s: its link to the host's, one way. flops_per_s: dense bfloat16."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: float
    host_bytes_per_s: float


_PCIE_4, _PCIE_5 = 32e9, 64e9  # bytes/s of 16 lanes, one way
_CARDS: Mapping[str, tuple[str, int, float]] = {
    "H200": ("NVIDIA H200", 141, _PCIE_5),
    "H100": ("NVIDIA H100 80GB HBM3", 80, _PCIE_5),
    "H100-PCIe": ("NVIDIA H100 PCIe", 80, _PCIE_5),
    "A100": ("NVIDIA A100-SXM4-80GB", 80, _PCIE_4),
    "A100-40GB": ("NVIDIA A100-SXM4-40GB", 40, _PCIE_4),
    "L40S": ("NVIDIA L40S", 48, _PCIE_4),
}
"""The name under which tkernels.roofline has the peaks; gigabytes of memory and the link, of the same data sheets."""


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`; ExperimentError names the alternatives."""
    check_name("--gpu", name, _CARDS)
    from tkernels.roofline import PEAKS  # loads torch, once, before a simulation begins

    product, gigabytes, link = _CARDS[name]
    peaks = PEAKS[product]
    return Gpu(name, gigabytes * 10**9, peaks.memory_bytes_per_s, peaks.flops_per_s["bfloat16"], link)
