"""A CPU's own roofline: measured once, and kept."""

from pathlib import Path

import pytest

from experiments.runs import cpu_rates


def test_rates_are_measured_once_for_a_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    taken: list[dict[str, float]] = []

    def measured() -> dict[str, float]:
        taken.append(measure(1 << 10, 16))
        return taken[-1]

    measure = cpu_rates.measure_rates
    monkeypatch.setattr(cpu_rates, "measure_rates", measured)
    first = cpu_rates.cpu_rates("some CPU")
    assert all(rate > 0 for rate in first.values())
    assert cpu_rates.cpu_rates("some CPU") == first
    assert len(taken) == 1
    cpu_rates.cpu_rates("another CPU")
    assert len(taken) == 2
    assert cpu_rates.cpu_rates("some CPU") == first


def test_a_folder_that_cannot_be_written_only_costs_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/x")
    monkeypatch.setattr(cpu_rates, "measure_rates", lambda: {"copy_bytes_per_s": 1.0, "matmul_flops_per_s": 2.0})
    assert cpu_rates.cpu_rates("some CPU")["matmul_flops_per_s"] == 2.0
