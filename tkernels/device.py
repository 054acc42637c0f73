"""The facts about a device that a launcher may branch on."""

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class DeviceFacts:
    """name: as the driver gives it; arch: "sm_90", "gfx942" or "interpreter"; multiprocessors: SMs or CUs."""

    name: str
    arch: str
    multiprocessors: int


# A launcher that derives a split count from the multiprocessors gets few, so that interpreted grids stay small.
INTERPRETER = DeviceFacts(name="interpreter", arch="interpreter", multiprocessors=4)

# For compiling ahead of time: the product that each architecture is best known by.
TARGETS = {
    "sm_80": DeviceFacts("NVIDIA A100", "sm_80", 108),
    "sm_86": DeviceFacts("NVIDIA A10", "sm_86", 72),
    "sm_89": DeviceFacts("NVIDIA L40S", "sm_89", 142),
    "sm_90": DeviceFacts("NVIDIA H200", "sm_90", 132),
    "sm_100": DeviceFacts("NVIDIA B200", "sm_100", 148),
    "sm_120": DeviceFacts("NVIDIA RTX PRO 6000", "sm_120", 188),
    "gfx942": DeviceFacts("AMD Instinct MI300X", "gfx942", 304),
}


def is_from_sm_90(arch: str) -> bool:
    """Whether an architecture is Hopper's or newer, of NVIDIA's: with tensor descriptors and dependent launches."""
    return arch.startswith("sm_") and int(arch.removeprefix("sm_").rstrip("a")) >= 90


def unsupported_e4m3(device: DeviceFacts) -> str | None:
    """Why Triton has no fp8 of the dtype float8_e4m3fn on a device, or None where it has."""
    if device.arch in ("sm_80", "sm_86"):
        return f"Triton has e4m3 from sm_89 on; this is {device.arch}"
    if device.arch.startswith("gfx9"):
        return f"e4m3fn is not {device.arch}'s own fp8, which is e4m3fnuz"
    return None


@lru_cache(maxsize=32)  # at most a handful of devices exist; asking the driver costs tens of microseconds
def device_facts(device: torch.device) -> DeviceFacts:
    """Facts about a CPU (which means the interpreter) or CUDA device."""
    if device.type == "cpu":
        return INTERPRETER
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hip_arch = getattr(properties, "gcnArchName", None) if torch.version.hip else None
        arch = hip_arch.split(":")[0] if hip_arch else f"sm_{properties.major}{properties.minor}"
        return DeviceFacts(properties.name, arch, properties.multi_processor_count)
    raise ValueError(f"device {device}: tkernels runs on cpu (interpreted) and cuda devices")


def first_device() -> torch.device:
    """The first GPU; the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
