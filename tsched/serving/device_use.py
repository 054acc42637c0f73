"""Use and memory of GPUs as NVML tells them, where pynvml is installed and there are any."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One GPU now.

    Attributes:
        device: Its UUID.
        utilization: Part of the last moment in which a kernel ran, 0 to 1.
        used_bytes: Of its memory, by all processes.
        total_bytes: Its memory.
    """

    device: str
    utilization: float
    used_bytes: int
    total_bytes: int


def read_device_use() -> list[DeviceUse]:
    """The GPUs of this machine; none where NVML is not there."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [_read(handle) for handle in handles]
    except pynvml.NVMLError:  # a part of a GPU tells no use
        return []
    finally:
        pynvml.nvmlShutdown()


def _read(handle: object) -> DeviceUse:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    utilization = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    return DeviceUse(pynvml.nvmlDeviceGetUUID(handle), utilization, memory.used, memory.total)
