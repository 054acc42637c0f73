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
    cache_bytes_per_s: that the second-level cache gives to all multiprocessors together, as measured.
    """

    name: str
    facts: DeviceFacts
    latency_cycles: int
    half_flops_per_clock: int
    cache_bytes_per_s: float

    @property
    def peaks(self) -> Peaks:
        return PEAKS[self.facts.name]

    @property
    def clock_hz(self) -> float:
        """That at which the data sheet's peak is what the matrix units do: 1.83 GHz of an H100 SXM."""
        return self.peaks.flops_per_s["bfloat16"] / (self.half_flops_per_clock * self.facts.multiprocessors)


# Latencies: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture" (arXiv 2402.13499, 2024).
# Rates of the matrix units: NVIDIA's architecture white papers (A100, Ada, H100), FMAs a clock times two.
# The cache's TB/s: github.com/te42kyfo/gpu-benches, gpu-l2-cache, which has data sets of 16 to 25 MB read at 9.8 on an
# H200, 6.9 on an H100 PCIe, 5.4 on an A100 80 GB and 5.2 on an L40. An H100 SXM has an H200's units and clock.
_AMPERE, _ADA, _HOPPER = (466, 2048), (542, 1024), (479, 4096)

GPUS = {
    name: Gpu(name, DeviceFacts(driver, arch, multiprocessors), latency, rate, cache * 1e12)
    for name, driver, arch, multiprocessors, (latency, rate), cache in (
        ("H100", "NVIDIA H100 80GB HBM3", "sm_90", 132, _HOPPER, 9.8),
        ("H100-PCIe", "NVIDIA H100 PCIe", "sm_90", 114, _HOPPER, 6.9),
        ("H200", "NVIDIA H200", "sm_90", 132, _HOPPER, 9.8),
        ("A100", "NVIDIA A100-SXM4-80GB", "sm_80", 108, _AMPERE, 5.4),
        ("A100-40GB", "NVIDIA A100-SXM4-40GB", "sm_80", 108, _AMPERE, 5.4),
        ("L40S", "NVIDIA L40S", "sm_89", 142, _ADA, 5.2),
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
