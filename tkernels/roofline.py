"""How near the hardware's limit a measured time is, from the contract's bytes and flops and the data sheet's peaks."""

from dataclasses import dataclass

from tkernels.device import DeviceFacts
from tkernels.errors import TKernelsError


class RooflineError(TKernelsError, ValueError):
    """A time shorter than the hardware allows: the timer, the contract's counting or the peaks are wrong."""


@dataclass(frozen=True)
class Peaks:
    """Data-sheet figures of one product: bytes/s of its memory, FLOP/s by input dtype, dense, accumulating in fp32.

    fp32 is without the tensor cores: the kernels ask for "ieee" products, which tf32 is not.
    """

    memory_bytes_per_s: float
    flops_per_s: dict[str, float]
    source: str


def _peaks(
    terabytes: float, half_teraflops: float, single_teraflops: float, int8_teraops: float, has_fp8: bool, source: str
) -> Peaks:
    """Where there is fp8, its peak is int8's."""
    half, eight = half_teraflops * 1e12, int8_teraops * 1e12
    flops = {"float16": half, "bfloat16": half, "float32": single_teraflops * 1e12, "int8": eight}
    return Peaks(terabytes * 1e12, flops | ({"float8_e4m3fn": eight} if has_fp8 else {}), source)


PEAKS = {
    "NVIDIA H200": _peaks(4.8, 989.5, 67, 1979, True, "NVIDIA H200 data sheet, SXM"),
    "NVIDIA H100 80GB HBM3": _peaks(3.35, 989.5, 67, 1979, True, "NVIDIA H100 data sheet, SXM"),
    "NVIDIA H100 PCIe": _peaks(2.0, 756.5, 51, 1513, True, "NVIDIA H100 data sheet, PCIe"),
    "NVIDIA A100-SXM4-80GB": _peaks(2.039, 312, 19.5, 624, False, "NVIDIA A100 data sheet"),
    "NVIDIA A100-SXM4-40GB": _peaks(1.555, 312, 19.5, 624, False, "NVIDIA A100 data sheet"),
    "NVIDIA L40S": _peaks(0.864, 362.05, 91.6, 733, True, "NVIDIA L40S data sheet"),
}
"""By the name that the driver gives a device."""


@dataclass(frozen=True)
class Roofline:
    """`fraction` of the limit that a call reached, in (0, 1], and what the limit is ("memory" or "compute").

    Both are None, with the `reason`, where nothing is known about the device.
    """

    fraction: float | None
    bound: str | None
    reason: str | None


def roofline(median_us: float, bytes_moved: int, flops: int, dtype: str, device: DeviceFacts) -> Roofline:
    """The share of the roofline that `median_us` reaches.

    Args:
        median_us: Measured microseconds a call, above 0.
        bytes_moved, flops: The contract's, at the case that was measured.
        dtype: The inputs', by name ("bfloat16").
        device: What it was measured on.

    Raises:
        RooflineError: The time is beyond the physical limit.
    """
    if median_us <= 0:
        raise ValueError(f"median_us must be above 0, got {median_us}")
    if device.arch == "interpreter":
        return Roofline(None, None, "no roofline is known for a CPU")
    peaks = PEAKS.get(device.name)
    if peaks is None:
        return Roofline(None, None, f"no peaks are known for {device.name!r}; known are {', '.join(sorted(PEAKS))}")
    if dtype not in peaks.flops_per_s:
        return Roofline(None, None, f"no peak is known for {dtype} on {device.name}")
    memory_us = bytes_moved / peaks.memory_bytes_per_s * 1e6
    compute_us = flops / peaks.flops_per_s[dtype] * 1e6
    limit_us, bound = max((memory_us, "memory"), (compute_us, "compute"))
    fraction = limit_us / median_us
    if fraction > 1:
        raise RooflineError(
            f"{median_us:.3g} us is beyond the {bound} limit of {device.name}, {limit_us:.3g} us for "
            f"{bytes_moved} bytes and {flops} flops ({peaks.source}): "
            "data that stayed in a cache, a wrong count or a wrong timer"
        )
    return Roofline(fraction, bound, None)
