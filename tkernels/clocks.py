"""What the driver says of a GPU's clocks: the speeds at a moment, and what holds them down.

pynvml is optional: it is looked up when it is asked for, and what it would tell is None, with the reason, without it.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch

_HOLDING_BACK = {
    "SwPowerCap": "power cap",
    "HwSlowdown": "hardware slowdown",
    "HwThermalSlowdown": "thermal slowdown by hardware",
    "SwThermalSlowdown": "thermal slowdown by software",
    "HwPowerBrakeSlowdown": "power brake",
    "SyncBoost": "sync boost",
}


@dataclass(frozen=True)
class Clocks:
    """MHz of the multiprocessors and of the memory, and what throttles them ("power cap"); None with the reason."""

    sm_mhz: int | None
    memory_mhz: int | None
    throttled_by: tuple[str, ...] | None
    reason: str | None = None

    @staticmethod
    def unknown(reason: str) -> "Clocks":
        return Clocks(None, None, None, reason)


def read_clocks(device: torch.device) -> Clocks:
    """The clocks of `device` now; a driver that does not tell is a reason, never an error."""
    if device.type != "cuda":
        return Clocks.unknown("a CPU's clocks are not read")
    if torch.version.hip is not None:
        return Clocks.unknown("clocks are read through NVIDIA's pynvml alone")
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return Clocks.unknown("pynvml is not installed")
    try:
        nvml.nvmlInit()
        try:
            # By UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices and not the driver's.
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            return _read(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
        finally:
            nvml.nvmlShutdown()
    except (nvml.NVMLError, AttributeError) as error:
        return Clocks.unknown(f"the driver does not tell: {error}")


def _read(nvml: Any, handle: Any) -> Clocks:
    sm = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
    memory = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)
    # Renamed by pynvml 12; the bits are the same.
    reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    bits = (reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle)
    held = []
    for name, words in _HOLDING_BACK.items():
        for prefix in ("nvmlClocksEventReason", "nvmlClocksThrottleReason"):
            bit = getattr(nvml, prefix + name, None)
            if bit is not None:
                held += [words] if bits & bit else []
                break
    return Clocks(int(sm), int(memory), tuple(held))
