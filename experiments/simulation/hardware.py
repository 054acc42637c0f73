"""GPUs by name: the data sheets' figures, without torch and without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.document import ExperimentError
from tsched.torch_free import suggest_name


@dataclass(frozen=True)
class Gpu:
    """memory_bytes: its own memory. host_bytes_per_s: its link to the host's, one way. flops_per_s: dense bfloat16."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: float
    host_bytes_per_s: float


@dataclass(frozen=True)
class _Card:
    product: str  # the name under which tkernels.roofline has its peaks
    gigabytes: int
    link_gigabytes_per_s: int


_PCIE_4, _PCIE_5 = 32, 64  # 16 lanes, one way
_CARDS: Mapping[str, _Card] = {
    "H200": _Card("NVIDIA H200", 141, _PCIE_5),
    "H100": _Card("NVIDIA H100 80GB HBM3", 80, _PCIE_5),
    "H100-PCIe": _Card("NVIDIA H100 PCIe", 80, _PCIE_5),
    "A100": _Card("NVIDIA A100-SXM4-80GB", 80, _PCIE_4),
    "A100-40GB": _Card("NVIDIA A100-SXM4-40GB", 40, _PCIE_4),
    "L40S": _Card("NVIDIA L40S", 48, _PCIE_4),
}
"""Memory and link: the same data sheets as the peaks."""


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`; ExperimentError names the alternatives."""
    card = _CARDS.get(name)
    if card is None:
        raise ExperimentError([f"--gpu {name}: there is {', '.join(_CARDS)}{suggest_name(name, _CARDS)}"])
    from tkernels.roofline import PEAKS  # loads torch, once, before a simulation begins

    peaks = PEAKS[card.product]
    return Gpu(
        name,
        card.gigabytes * 10**9,
        peaks.memory_bytes_per_s,
        peaks.flops_per_s["bfloat16"],
        card.link_gigabytes_per_s * 1e9,
    )
