"""The benchmark suite as people call it: as typed, with the roofline's fields, and comparable with the run before."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import conftest
from tests.bench.test_kernels import subjects
from tkernels.contract import Value
from tkernels.measurement import storage_bytes
from tkernels.variant import Variant

ROOT = Path(__file__).parents[2]


def pytest_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    # In a worker's environment pytest-benchmark would take itself to be one, and measure nothing.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
def test_as_typed_it_measures_and_compares_with_the_run_before(tmp_path: Path) -> None:
    one = next(str(subject.id) for subject in subjects() if str(subject.id).startswith("swiglu-T=1"))
    chosen = [
        f"tests/bench/test_kernels.py::test_variant[{one}]",
        "--benchmark-only",
        f"--benchmark-storage={tmp_path}",
    ]
    first = pytest_run(*chosen, "--benchmark-save=first", f"--benchmark-json={tmp_path / 'first.json'}")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "Triton variants: not measured" in first.stdout
    (run,) = json.loads((tmp_path / "first.json").read_text())["benchmarks"]
    assert run["group"].startswith("swiglu T=1")
    assert run["stats"]["rounds"] == 10  # our timer's samples, not one call of pytest-benchmark's
    for name in ("bytes_moved", "flops", "bytes_per_s", "median_us", "timer", "first_call_us", "clocks"):
        assert run["extra_info"][name] is not None, name
    assert run["extra_info"]["variant"] == "torch"
    assert run["extra_info"]["roofline_fraction"] is None
    assert run["extra_info"]["roofline_reason"] == "no roofline is known for a CPU"
    assert abs(run["stats"]["median"] * 1e6 / run["extra_info"]["median_us"] - 1) < 1e-6
    second = pytest_run(*chosen, "--benchmark-compare=0001", "--benchmark-compare-fail=median:100000%")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "(0001_first)" in second.stdout
    assert "(NOW)" in second.stdout


@pytest.mark.slow
def test_the_heaviest_benchmarks_as_typed_stay_under_four_gigabytes() -> None:
    """What a benchmark takes follows its inputs' bytes: of the three ops that have most, the largest point is run."""
    by_bytes = sorted(subjects(), key=lambda one: input_bytes(*one.values), reverse=True)
    largest: dict[str, str] = {}
    for one in by_bytes:
        largest.setdefault(one.values[0].contract.name, f"tests/bench/test_kernels.py::test_variant[{one.id}]")
    chosen = list(largest.values())[:3]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--benchmark-only", *chosen]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None
    said = child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)  # what Popen would have learned by waiting itself
    assert child.returncode == 0, said
    assert "3 passed" in said
    assert used.ru_maxrss < 4 * 2**20  # KiB


def input_bytes(variant: Variant, point: str, axes: Mapping[str, Value]) -> int:
    return storage_bytes(variant.contract.case(axes, 0, torch.device("meta")).inputs)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config: Any = SimpleNamespace(getoption=lambda name: "cuda")
    with pytest.raises(pytest.UsageError, match="--device cuda: no CUDA device is found here"):
        conftest.pytest_configure(config)
