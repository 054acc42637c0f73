"""GPUs by the names that people give them, with what their data sheets and published measurements say."""

from dataclasses import dataclass

from tkernels.device import DeviceFacts
from tkernels.errors import TKernelsError
from tkernels.roofline import PEAKS, Peaks


class UnknownGpuError(TKernelsError, ValueError):
    """A GPU that the model knows nothing of; the message says which it knows."""


@dataclass(frozen=True)
class Gpu:
    """One product.

    name: what people call it. facts: as its driver and a launcher see it. latency_cycles: of a load that misses both
    caches, on an idle device. half_flops_per_clock: of one multiprocessor's matrix units in 16-bit floats, dense.
    """

    name: str
    facts: DeviceFacts
    latency_cycles: int
    half_flops_per_clock: int

    @property
    def peaks(self) -> Peaks:
        return PEAKS[self.facts.name]

    @property
    def clock_hz(self) -> float:
        """That at which the data sheet's peak is what the matrix units do: 1.83 GHz of an H100 SXM."""
        return self.peaks.flops_per_s["bfloat16"] / (self.half_flops_per_clock * self.facts.multiprocessors)


# Latencies: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture" (arXiv 2402.13499, 2024).
# Rates of the matrix units: NVIDIA's architecture white papers (A100, Ada, H100), FMAs a clock times two.
_AMPERE, _ADA, _HOPPER = (466, 2048), (542, 1024), (479, 4096)

GPUS = {
    name: Gpu(name, DeviceFacts(driver, arch, multiprocessors), latency, rate)
    for name, driver, arch, multiprocessors, (latency, rate) in (
        ("H100", "NVIDIA H100 80GB HBM3", "sm_90", 132, _HOPPER),
        ("H100-PCIe", "NVIDIA H100 PCIe", "sm_90", 114, _HOPPER),
        ("H200", "NVIDIA H200", "sm_90", 132, _HOPPER),
        ("A100", "NVIDIA A100-SXM4-80GB", "sm_80", 108, _AMPERE),
        ("A100-40GB", "NVIDIA A100-SXM4-40GB", "sm_80", 108, _AMPERE),
        ("L40S", "NVIDIA L40S", "sm_89", 142, _ADA),
    )
}
"""Those whose peaks `roofline.PEAKS` has, from the same data sheets."""


def find_gpu(name: str) -> Gpu:
    """The GPU of a name, whatever the case of its letters.

    Raises:
        UnknownGpuError: There is none.
    """
    by_name = {one.lower(): gpu for one, gpu in GPUS.items()}
    if (found := by_name.get(name.lower())) is None:
        raise UnknownGpuError(f"no data sheet of a GPU {name!r}; known are {', '.join(GPUS)}")
    return found
