"""What a run's figures depend on besides its YAML: versions, machine, code and seeds."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from experiments.plan import Plan, Sweep
from tkernels.device import device_facts
from tkernels.mode import MODE
from tkernels.source_hash import source_hash

_PACKAGES = ("tkernels", "torch", "triton", "transformers", "safetensors", "tokenizers", "numpy", "pydantic")


def environment_of(sweep: Sweep, run_id: str, overrides: list[str]) -> dict[str, Any]:
    """Everything but the tuned configs, which are known when the run has ended."""
    plan = sweep.plans[0]
    facts = device_facts(plan.device)
    seeds = {"inputs": plan.experiment.seed}
    for workload in plan.experiment.workload:
        if workload.kind == "synthetic":
            seeds[f"workload {workload.name}".strip()] = workload.seed
    return {
        "run_id": run_id,
        "overrides": overrides,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "device": {
            "name": _processor() if plan.device.type == "cpu" else facts.name,
            "type": plan.device.type,
            "arch": platform.machine() if plan.device.type == "cpu" else facts.arch,
            "triton": "interpreted" if MODE == "interpret" else "compiled",
            "cuda": torch.version.cuda,
        },
        "host": {"system": platform.platform(), "cpus": os.cpu_count(), "torch_threads": torch.get_num_threads()},
        "git": git_state(Path(__file__).parent),
        "seeds": seeds,
        "kernels": {name: code for each in sweep.plans for name, code in kernel_hashes(each).items()},
    }


def kernel_hashes(plan: Plan) -> dict[str, str | None]:
    """ "op.variant" -> hash of its kernels' code; None for one that has no Triton kernel."""
    variants = {(op, pick.variant): plan.ops[op].variants[pick.variant] for op in plan.picks for pick in plan.picks[op]}
    return {
        f"{op}.{name}": source_hash(variant.kernels) if variant.kernels else None
        for (op, name), variant in sorted(variants.items(), key=lambda item: item[0])
    }


def git_state(folder: Path) -> dict[str, Any]:
    """{"commit", "dirty"} of the checkout that `folder` is in, or {"commit": None, "reason"}."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", "-C", str(folder), *arguments), capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except FileNotFoundError:
        return {"commit": None, "reason": "git is not installed"}
    except subprocess.SubprocessError as error:
        reason = getattr(error, "stderr", None) or error
        return {"commit": None, "reason": str(reason).strip()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
