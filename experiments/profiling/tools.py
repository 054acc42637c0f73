"""The command lines of NVIDIA's profilers around one of our processes; see experiments.profiling.target.

Options as documented in the Nsight Systems User Guide ("CLI Profile Command Switch Options") and the Nsight Compute CLI
manual ("Filter options").
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tkernels.ranges import DOMAIN

_TARGET = "experiments.profiling.target"
STEADY = "steady"
"""The range around the round that a profile is about; what comes before it warms up, and records graphs."""


def target(mode: str, file: Path, overrides: Sequence[str], *more: str) -> list[str]:
    """The process to profile: `steps` of the experiment's first arm, or one `launch` of a variant."""
    sets = [part for override in overrides for part in ("--set", override)]
    return [sys.executable, "-m", _TARGET, mode, *more, str(file), *sets]


def nsys_profile(report: Path, process: Sequence[str]) -> list[str]:
    """Collects from cudaProfilerStart to cudaProfilerStop, after which the process ends by itself; every node of a
    graph is traced, or its kernels would be one range; no sampling of the CPU, which slows the host down. `report` is
    without its suffix .nsys-rep.
    """
    return [
        "nsys", "profile",
        "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
        "--cuda-graph-trace=node", "--trace=cuda,nvtx,osrt", f"--nvtx-domain-include={DOMAIN}",
        "--sample=none", "--cpuctxsw=none",
        f"--output={report}", "--force-overwrite=true",
        *process,
    ]  # fmt: skip


def nsys_export(report: Path) -> list[str]:
    """Turns `report`.nsys-rep into `report`.sqlite."""
    return [
        "nsys",
        "export",
        "--type=sqlite",
        "--force-overwrite=true",
        f"--output={report}.sqlite",
        f"{report}.nsys-rep",
    ]


def ncu_launch(report: Path, kernels: Sequence[str], process: Sequence[str]) -> list[str]:
    """Profiles the kernels of one call, by name in the order of their launches: those between cudaProfilerStart and
    Stop, of these names, and as many as the call launches.
    """
    names = "|".join(re.escape(name) for name in dict.fromkeys(kernels))
    return [
        "ncu",
        "--set=full", "--profile-from-start=off",
        "--kernel-name-base=function", f"--kernel-name=regex:^({names})$", f"--launch-count={len(kernels)}",
        f"--export={report}", "--force-overwrite",
        *process,
    ]  # fmt: skip
