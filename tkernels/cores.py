"""How many CPU cores this process was given, which may be fewer than the machine has."""

import math
import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = _CGROUPS) -> int:
    """The cores of the process's affinity, or of its container's quota where that is smaller; at least one.

    torch starts a thread for each core of the affinity. It does not read the quota, and a process with more threads
    than its quota has cores spends its time being held back.
    """
    cores = float(len(os.sched_getaffinity(0)))
    return max(1, math.ceil(min(cores, _quota(cgroups))))


def _quota(cgroups: Path) -> float:
    """CPU seconds a second that the container may take, of version 2's file or version 1's two; infinite for none."""
    try:
        if (version_2 := cgroups / "cpu.max").exists():
            quota, period = version_2.read_text().split()
        else:
            quota, period = ((cgroups / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 else math.inf
    except (OSError, ValueError):
        return math.inf
