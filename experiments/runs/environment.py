"""What a run's figures depend on besides its YAML: versions, machine, code and seeds."""

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from experiments.planning.plan import Plan, Sweep
from experiments.runs.checked import unchecked_variants
from experiments.runs.cpu_rates import cpu_rates
from experiments.runs.imports import imported_names
from experiments.runs.provenance import (
    file_hashes,
    foreign_variants,
    imports_of,
    lockfile_hashes,
    model_hashes,
    sha256_of,
    variants_of,
)
from experiments.runs.reading import workload_key
from tkernels.clocks import read_clocks
from tkernels.device import DeviceFacts, device_facts
from tkernels.mode import MODE
from tkernels.source_hash import source_hash

_PACKAGES = ("tkernels", "torch", "triton", "transformers", "safetensors", "tokenizers", "numpy", "pydantic", "ray")
_PROJECT = ("tkernels", "tmodel", "tsched", "experiments")

_MOST_UNTRACKED, _MOST_HASHED_BYTES = 1000, 1_000_000

_MARKS_OF_MADE_FOLDERS = ("pyvenv.cfg", "CACHEDIR.TAG")  # a virtual environment's; what a cache says of itself
_NAMES_OF_MADE_FOLDERS = frozenset({"__pycache__", "node_modules"})


def environment_of(sweep: Sweep, run_id: str, overrides: list[str]) -> dict[str, Any]:
    """Everything but the tuned configs that are used and the clocks afterwards, which the end of the run tells.

    Reads the weights of the models that are served, for their hashes.
    """
    plan = sweep.plans[0]
    facts, variants = device_facts(plan.device), variants_of(sweep.plans)
    seeds = {"inputs": plan.experiment.seed}
    for workload in plan.experiment.workload:
        if workload.kind in ("synthetic", "trace"):
            seeds[workload_key(workload.name)] = workload.seed
    return {
        "run_id": run_id,
        "overrides": overrides,
        "versions": {
            "python": platform.python_version(),
            **{name: find_version(name) for name in _PACKAGES},
            **package_versions(sweep.plans),
        },
        "device": _device_state(plan.device, facts),
        "rates": dict(cpu_rates(_processor())) if plan.device.type == "cpu" else None,
        "host": {"system": platform.platform(), "cpus": os.cpu_count(), "torch_threads": torch.get_num_threads()},
        "git": git_state(Path(__file__).parent),
        "seeds": seeds,
        "model": model_hashes(sweep.plans),
        "files": file_hashes(plan),
        "sources": {name: sha256_of(variant.file) for name, variant in variants.items()},
        "unchecked": unchecked_variants(sweep.plans),
        "imports": {name: sha256_of(file) for name, file in imports_of(sweep.plans).items()},
        "lockfiles": lockfile_hashes(sweep.plans, facts),
        "kernels": {name: source_hash(one.kernels) if one.kernels else None for name, one in variants.items()},
    }


def _device_state(device: torch.device, facts: DeviceFacts) -> dict[str, Any]:
    on_cpu = device.type == "cpu"
    return {
        "name": _processor() if on_cpu else facts.name,
        "type": device.type,
        "arch": platform.machine() if on_cpu else facts.arch,
        "triton": "interpreted" if MODE == "interpret" else "compiled",
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "clocks": asdict(read_clocks(device)),
    }


def package_versions(plans: Sequence[Plan]) -> dict[str, str]:
    """Module -> its package's version, of the installed ones that variants import: peers', and outside ones'."""
    own = imports_of(plans)
    files = [*(variant.file for variant in foreign_variants(plans).values()), *own.values()]
    modules = {name.partition(".")[0] for file in files for name in imported_names(file)}
    modules -= {*sys.stdlib_module_names, *_PROJECT, *_PACKAGES, *(name.partition(".")[0] for name in own)}
    found = {name: _version_of_module(name) for name in sorted(modules)}
    return {name: version for name, version in found.items() if version is not None}


def git_state(folder: Path) -> dict[str, Any]:
    """{"commit", "dirty", "diff", "untracked"} of the checkout that `folder` is in, or {"commit": None, "reason"}.

    diff: of all tracked files, against the commit. untracked: files that are not ignored -> SHA-256 of each, or its
    size where it is no source (a megabyte or more); the first thousand. Virtual environments and caches are not among
    them, whatever their folders are called: tools made them, and versions are recorded apart.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", "-C", str(folder), *arguments), capture_output=True, text=True, check=True, timeout=20,
            errors="replace",
        ).stdout  # fmt: skip

    try:
        top = Path(git("rev-parse", "--show-toplevel").removesuffix("\n"))
        commit, diff = git("rev-parse", "HEAD").strip(), git("diff", "HEAD", "--no-ext-diff", "--no-color")
        others = git("-C", str(top), "ls-files", "--others", "--exclude-standard", "-z").split("\0")
        own = islice(_outside_made_folders(top, filter(None, others)), _MOST_UNTRACKED)
        files = {name: top / name for name in own if (top / name).is_file()}
        untracked = {name: _identity(file) for name, file in files.items()}
        return {"commit": commit, "dirty": bool(diff or untracked), "diff": diff, "untracked": untracked}
    except FileNotFoundError:
        return {"commit": None, "reason": "git is not installed"}
    except subprocess.SubprocessError as error:
        reason = getattr(error, "stderr", None) or error
        return {"commit": None, "reason": str(reason).strip()}


def _outside_made_folders(top: Path, names: Iterable[str]) -> Iterator[str]:
    """Those of the file names, relative to `top`, that are in no virtual environment and in no cache."""

    @functools.cache
    def is_made(folder: Path) -> bool:
        if folder == top:
            return False
        marked = folder.name in _NAMES_OF_MADE_FOLDERS or any((folder / m).exists() for m in _MARKS_OF_MADE_FOLDERS)
        return marked or is_made(folder.parent)

    return (name for name in names if not is_made((top / name).parent))


def _identity(file: Path) -> str:
    size = file.stat().st_size
    return sha256_of(file) if size < _MOST_HASHED_BYTES else f"{size} bytes"


def _driver() -> str | None:
    """NVIDIA's, as its kernel module gives it; None where there is none."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    found = re.search(r"\b\d+(\.\d+)+\b", first)
    return found.group() if found else first


def find_version(package: str) -> str | None:
    """Of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version_of_module(name: str) -> str | None:
    """Of the package that a module is of, which may have another name; None where it is not installed."""
    known = find_version(name)
    if known is None and PathFinder.find_spec(name) is not None:
        packages = importlib.metadata.packages_distributions().get(name, [])
        known = ", ".join(filter(None, map(find_version, packages))) or None
    return known


def _processor() -> str:
    about = Path("/proc/cpuinfo")
    text = about.read_text() if about.exists() else ""
    named = re.search(r"^model name\s*:\s*(.+)", text, re.MULTILINE)
    return named.group(1).strip() if named else platform.processor() or platform.machine()
